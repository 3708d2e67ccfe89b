"""Cases of `zerolora bench`: their names, the run for each, and text that fills every sequence."""

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bench.assignment import Case
from trainer.config import AUTO, DatasetSection, RunConfig, UserError, dump_yaml, load_config
from trainer.model.published_shapes import PREFIX, find_shape, load_shapes
from trainer.model.random_weights import build_random_config

# Settings of a typical configuration, with every feature on that costs time.
DEFAULTS: dict[str, Any] = {
    "base_model": "random:llama3.1-8b",
    "output_dir": "unset",
    "lora": {"r": 16, "alpha": 32},
    "dataset": {"path": "unset", "max_length": 2048, "packing": True},
    "training": {"batch_size": 4, "lr_scheduler": "constant", "warmup_ratio": 0.0},
    "scu": {"enabled": True, "target": 0.01},
}
AS_CONFIGURED = "as configured"
_RECOMPUTE = {"training.gradient_checkpointing": "non_reentrant"}
_OFFLOAD = {**_RECOMPUTE, "training.offload_activations": True}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"adapter": "lora"},
    "bf16-recompute": {"adapter": "lora", **_RECOMPUTE},
    "bf16-recompute-offload": {"adapter": "lora", **_OFFLOAD},
    "bf16-selective": {"adapter": "lora", "training.gradient_checkpointing": "selective"},
    "nf4": {"adapter": "qlora"},
    "nf4-recompute": {"adapter": "qlora", **_RECOMPUTE},
    "nf4-recompute-offload": {"adapter": "qlora", **_OFFLOAD},
    "fp8": {"adapter": "qlora", "quantization.quant_type": "fp8"},
    "fp8-recompute": {"adapter": "qlora", "quantization.quant_type": "fp8", **_RECOMPUTE},
    "fp8-recompute-offload": {"adapter": "qlora", "quantization.quant_type": "fp8", **_OFFLOAD},
    "int8": {"adapter": "qlora", "quantization.quant_type": "int8"},
}
# In plain torch a recurrent layer saves ten times as much as an attention layer.
OF_RECURRENT = ("training.gradient_checkpointing=non_reentrant",)
MAX_SEQUENCES = 64  # of a micro-batch, while `auto` is undecided
IN_REACH = 1e-6  # an S that any adapter exceeds in its first steps
PROFILED = 4  # steps under the profiler; the first is left out


def resolve(
    config: Path | None,
    case: str,
    shape: str | None,
    overrides: Sequence[str],
    folder: Path,
) -> tuple[RunConfig, str]:
    """Return the configuration to measure, before `prepared` shortens it, and its `random:SHAPE`.

    Raises UserError for an unknown case or shape, or a model of unknown shape.
    """
    if case != AS_CONFIGURED and case not in CASES:
        raise UserError(f"--case {case}: unknown case; choose from {', '.join(CASES)}")
    defaults = config is None
    if config is None:
        config = folder / "defaults.yaml"
        config.write_text(yaml.safe_dump(DEFAULTS))
    of_case = [f"{key}={json.dumps(value)}" for key, value in CASES.get(case, {}).items()]
    run = load_config(config, [*of_case, *overrides]).config
    name = shape or find_shape(run.base_model)
    if name is None or name.split(",")[0] not in load_shapes():
        raise UserError(
            f"--shape {shape}: unknown shape; choose from {', '.join(load_shapes())}"
            if shape
            else f"base_model={run.base_model}: its shape is unknown; set it with --shape ({', '.join(load_shapes())})"
        )
    if defaults and is_recurrent(PREFIX + name):
        run = load_config(config, [*OF_RECURRENT, *of_case, *overrides]).config
    if run.adapter == "none":
        raise UserError("adapter=none: bench measures adapters; set adapter: lora or qlora")
    return run, PREFIX + name


def is_recurrent(base_model: str) -> bool:
    """Return whether layers of a shape carry a state along the sequence."""
    config = build_random_config(base_model).get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    return any(not kind.endswith("attention") or kind == "linear_attention" for kind in kinds)


def prepared(run: RunConfig, base_model: str, texts: Path, folder: Path, *, steps: int, profile: bool) -> Path:
    """Write the YAML file of a short `run` on random weights and random text, otherwise unchanged; return its path."""
    dataset = DatasetSection(
        path=str(texts),
        max_length=run.dataset.max_length,
        packing=run.dataset.packing,
        shuffle=False,
        cache_dir=str(texts.parent / "cache"),
    )
    training = run.training.model_copy(
        update={
            "global_batch_size": None,
            "max_steps": steps + (PROFILED if profile else 0),
            "save_steps": 0,
            "eval_steps": 0,
            "logging_steps": 1,
            "resume_from_checkpoint": None,
            "early_stopping": None,
            "best_checkpoint": False,
        }
    )
    logging = run.logging.model_copy(
        update={"sample_prompts": (), "progress": "lines", "profile_steps": PROFILED if profile else 0}
    )
    changes: dict[str, Any] = {
        "base_model": base_model,
        "model": run.model.model_copy(update={"tokenizer": None, "revision": None, "trust_remote_code": False}),
        "output_dir": str(folder / "run"),
        "dataset": dataset,
        "training": training,
        "logging": logging,
        "output": run.output.model_copy(update={"overwrite": "delete"}),
    }
    if run.scu.enabled and run.scu.controller == "pi":
        # A few steps cannot reach a whole run's target, which is an error. The controller's work is the same.
        near = {"target": IN_REACH} if run.scu.measure == "delta" else {"controller": "fixed"}
        changes["scu"] = run.scu.model_copy(update=near)
    path = folder / "bench.yaml"
    path.write_text(dump_yaml(run.model_copy(update=changes)))
    return path


def count_texts(run: RunConfig, *, steps: int, ranks: int) -> int:
    """Return the number of texts for all steps, so that no step is the short last one of an epoch."""
    training = run.training
    batch_size = MAX_SEQUENCES if training.batch_size == AUTO else training.batch_size
    return (steps + PROFILED) * batch_size * training.gradient_accumulation_steps * ranks


def write_texts(path: Path, length: int, count: int) -> Path:
    """Write random letters, each text longer than `length` tokens of a byte tokenizer."""
    if not path.exists():
        draw = random.Random(0)
        letters = string.ascii_letters + string.digits
        lines = [json.dumps({"text": "".join(draw.choices(letters, k=length + 8))}) for _ in range(count)]
        path.write_text("\n".join(lines) + "\n")
    return path


def build_peer_case(name: str, run: RunConfig, base_model: str, *, on_gpu: bool, batch_size: int) -> Case:
    """Return the case for a peer, which runs one micro-batch per step."""
    precision = run.training.precision
    return Case(
        name=name,
        base_model=base_model,
        four_bit=run.adapter == "qlora" and not run.quantization.is_8bit,
        recompute=run.training.gradient_checkpointing != "none",
        rank=run.lora.r,
        alpha=run.lora.alpha,
        targets=list(run.lora.target_modules),
        stage=max(run.zero.stage, 0),
        bf16=precision == "bf16" or (precision == "auto" and on_gpu),
        batch_size=batch_size,
        length=run.dataset.max_length,
    )
