"""`zerolora init --model M --data D --gpus N`: write a configuration for this model, data and GPUs, with reasons.

The data is tokenized into the cache to measure its lengths, and the model is built without weights. The rules
follow "LoRA Without Regret" (Schulman et al., Thinking Machines, 2025): all linear layers, about ten times the learning
rate of full fine-tuning (more in short runs), a small batch, and a rank that matches the information in the data.
"""

import math
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.finished_run import silence_libraries
from trainer.commands.estimate import DEFAULT_GPU, parse_memory
from trainer.config import CommandParser, LoraSection, ModelSection, RunConfig, UserError, load_config, reports_errors
from trainer.config.command_line import parse_rank_count
from trainer.config.errors import format_count
from trainer.config.values import set_dotted
from trainer.config.yaml_core import dump
from trainer.contract.default_ranks import choose_default_ranks
from trainer.contract.output_files import check_output_file
from trainer.contract.whole_files import write_text_atomic
from trainer.data.prepared import PreparedRun
from trainer.data.samples import Samples
from trainer.data.step_count import FEW_STEPS, MIN_AUTO_STEPS, count_steps, resolve_global_batch
from trainer.memory.bytes import GIB
from trainer.memory.decisions import Machine
from trainer.memory.model_widths import read_shapes
from trainer.memory.planner import DataSize, Planner
from trainer.model.adapter import (
    BITS_PER_PARAMETER,
    BITS_PER_TOKEN,
    apply_adapter,
    build_capacity_warning,
    summarize_adapted_layers,
)
from trainer.model.base import build_empty_model, get_context_length, load_model_config
from trainer.model.expert_layers import count_experts_per_token, find_expert_modules, get_expert_width
from trainer.setup.preflight import prepare

MAX_READ_LENGTH = 16_384
MIN_UNTRUNCATED_FRACTION = 0.995
"""Minimum fraction of documents that are not truncated."""
PACK_LENGTH = 2048
RANKS = (16, 32, 64, 128)
SHORT_RUN_STEPS = 200
WIDTH = 110
Settings = dict[str, tuple[Any, str]]
"""Setting -> value and reason."""


@dataclass(frozen=True)
class TailorRequest:
    model: str
    data: str
    gpus: int
    memory: int
    gpu_text: str
    output_dir: str


@dataclass(frozen=True)
class Profile:
    tokens: Any
    targets: Any
    context: int | None
    parameters: int
    per_rank: int
    """Adapter parameters per unit of rank, excluding experts."""
    widest: int
    """Rank beyond which no layer gains capacity."""
    per_expert_rank: int = 0
    """Adapter parameters per unit of the experts' rank."""
    top_k: int = 1
    """Experts per token."""
    expert_width: int = 0

    def compute_expert_rank(self, rank: int) -> int:
        """Return the experts' rank for `lora.expert_rank: r/top_k`."""
        return max(1, rank // self.top_k)

    def count_parameters(self, rank: int) -> int:
        return rank * self.per_rank + self.compute_expert_rank(rank) * self.per_expert_rank


def choose_settings(request: TailorRequest) -> tuple[Settings, list[str]]:
    """Return the settings with their reasons, and warnings. Raises UserError if the model or data cannot be used."""
    context = get_context_length(load_model_config(request.model, ModelSection()))
    settings: Settings = {
        "base_model": (request.model, ""),
        "output_dir": (request.output_dir, "adapter, checkpoints and report"),
        "adapter": ("lora", ""),
        "dataset.path": (request.data, ""),
    }
    longest = {"dataset.max_length": (min(context or MAX_READ_LENGTH, MAX_READ_LENGTH), "")}
    prepared = prepare(_build_config(settings | longest), for_training=False)
    profile = _build_profile(prepared, context)
    documents = len(profile.tokens)
    warnings = _choose_adapter(settings, profile)
    _choose_data(settings, request, profile)
    trained, packs = 1 - settings.get("dataset.val_split", (0.0, ""))[0], settings["dataset.packing"][0]
    sequences = float(profile.tokens.sum()) / settings["dataset.max_length"][0] if packs else documents
    samples = max(1, (math.ceil if packs else round)(trained * sequences))
    minimum, usual = math.ceil(FEW_STEPS / math.ceil(samples / request.gpus)), _choose_epochs(documents)
    why = f"fewer epochs would mean fewer than {FEW_STEPS} steps" if minimum > usual else "the best checkpoint is kept"
    settings["training.epochs"] = (max(minimum, usual), f"{format_count(documents, 'document')}; {why}")
    settings["training.global_batch_size"] = ("auto", "")
    batch = resolve_global_batch(_build_config(settings), samples, request.gpus).training.global_batch_size
    settings["training.global_batch_size"] = (batch, "")
    _choose_placement(settings, request, prepared, samples)
    steps = count_steps(_build_config(settings).training, samples, request.gpus) or 1
    why = f"adapters learn well from small batches: {steps:,} steps of {batch} sequences"
    settings["training.global_batch_size"] = (batch, why)
    settings["training.learning_rate"] = _choose_learning_rate(profile, steps)
    settings |= _choose_evaluation(has_held_out="dataset.val_split" in settings)
    settings["base_model"] = (request.model, f"{profile.parameters / 1e6:,.1f} million parameters")
    return settings, warnings


def _build_profile(prepared: PreparedRun, context: int | None) -> Profile:
    assert isinstance(prepared.data.train, Samples)
    tokens, targets = prepared.data.train.count_tokens()
    model = build_empty_model(prepared.model_config, ModelSection())
    model.tie_weights()
    size = sum(parameter.numel() for parameter in model.parameters())
    adapted = summarize_adapted_layers(apply_adapter(model, LoraSection(r=1), next(model.parameters()).dtype))
    per_expert_rank = sum(layer.parameters for layer in adapted if "." in layer.name)
    per_rank = sum(layer.parameters for layer in adapted) - per_expert_rank
    widths = [get_expert_width(module) for module in find_expert_modules(model).values()] if per_expert_rank else []
    return Profile(
        tokens, targets, context, size, per_rank,
        widest=max(min(map(int, layer.shape.split(" -> "))) for layer in adapted if "." not in layer.name),
        per_expert_rank=per_expert_rank,
        top_k=count_experts_per_token(prepared.model_config) if widths else 1,
        expert_width=min(widths, default=size),
    )  # fmt: skip


def _choose_adapter(settings: Settings, profile: Profile) -> list[str]:
    """Choose all linear layers, at the lowest rank with enough capacity. Return a warning if none has enough."""
    trained = float(profile.targets.sum())
    usable = (rank for rank in RANKS if rank <= profile.widest)
    ranks = [rank for rank in usable if profile.compute_expert_rank(rank) <= profile.expert_width] or [8]
    information = BITS_PER_TOKEN * trained
    enough = (rank for rank in ranks if BITS_PER_PARAMETER * profile.count_parameters(rank) >= information)
    rank = next(enough, ranks[-1])
    parameters = profile.count_parameters(rank)
    capacity = BITS_PER_PARAMETER * parameters
    data = f"about {information / 1e6:,.1f}" if information >= 1e5 else "less than 0.1"
    why = f"{parameters:,} adapter parameters can store about {capacity / 1e6:,.1f} Mbit; the data contains {data}"
    settings["lora.r"] = (rank, why)
    settings["lora.alpha"] = (32, "fixed, so that the best learning rate hardly depends on r")
    settings["lora.target_modules"] = ("all-linear", "attention layers alone learn less, even with a higher r")
    if profile.per_expert_rank:
        settings["lora.experts"] = (True, "most weights of an MoE model are in its experts")
        why = f"each token uses {profile.top_k} experts, with a combined rank of r"
        settings["lora.expert_rank"] = ("r/top_k", why)
    warning = build_capacity_warning(parameters, trained, rank)
    return [warning] if warning else []


def _choose_data(settings: Settings, request: TailorRequest, profile: Profile) -> None:
    documents, total = len(profile.tokens), int(profile.tokens.sum())
    needed = int(np.quantile(profile.tokens, MIN_UNTRUNCATED_FRACTION, method="higher"))
    context = profile.context or sys.maxsize
    length = min(-(-needed // 64) * 64, context)
    pack = min(max(length, PACK_LENGTH), context)
    short = bool(documents > 1 and profile.tokens.mean() < 0.5 * pack)
    steps = _choose_epochs(documents) * total // (pack * request.gpus)
    packs = short and steps >= MIN_AUTO_STEPS
    length = pack if packs else length
    cut = int((profile.tokens > length).sum())
    held_out = 0.0 if documents < 20 else round(min(0.1, max(200 / documents, 0.01)), 3)
    median, longest = int(np.median(profile.tokens)), int(profile.tokens.max())
    why = f"{format_count(documents, 'document')}, {total:,} tokens, {int(profile.targets.sum()):,} of them trained"
    settings["dataset.path"] = (request.data, why)
    why = f"the median document has {median:,} tokens, the longest {longest:,}; {cut:,} are truncated"
    settings["dataset.max_length"] = (length, why)
    if packs:
        why = f"the average document would fill only {profile.tokens.mean() / pack:.0%} of a sequence"
    elif short:
        why = f"packed into sequences of {pack:,} tokens, the run would have only {format_count(steps, 'step')}"
    else:
        why = "the documents already fill most of a sequence"
    settings["dataset.packing"] = (packs, why)
    if held_out:
        why = f"{format_count(max(1, round(held_out * documents)), 'document')} for evaluation"
        settings["dataset.val_split"] = (held_out, why)


def _choose_epochs(documents: int) -> int:
    return 3 if documents < 10_000 else 2 if documents < 100_000 else 1


def _choose_placement(settings: Settings, request: TailorRequest, prepared: PreparedRun, samples: int) -> None:
    config = _build_config(settings)
    vocabulary = len(prepared.tokenizer)
    shapes = read_shapes(prepared.model_config, config.model, config.lora, min_vocabulary_size=vocabulary)
    longest = config.dataset.max_length
    planner = Planner(shapes, DataSize(longest, longest, samples), Machine.assume_gpus(request.gpus, "bf16"))
    tried: list[str] = []
    for adapter, stage, recompute, offload in _list_placements(request.gpus):
        why_not = f"; too large: {'; '.join(tried)}" if tried else ""
        base = "the base model only fits in 4 bits" if adapter == "qlora" else "the base model fits in 16 bits"
        kept = "the fastest choice" if recompute == "none" else "recompute activations to save memory"
        placed = "each rank keeps the whole base model" if stage == 2 else "the base model is sharded across the ranks"
        chosen: Settings = {
            "adapter": (adapter, f"{base} on GPUs {request.gpu_text}{why_not}"),
            "training.batch_size": (1, ""),
            "training.gradient_checkpointing": (recompute, kept),
            "zero.stage": (stage, placed),
        }
        if offload:
            chosen["zero.offload_parameters"] = (True, "the base model stays in host memory to save GPU memory")
        no_global = {"training.global_batch_size": (None, ""), "training.gradient_accumulation_steps": (1, "")}
        if largest := planner.find_largest_batch(_build_config(settings | chosen | no_global), request.memory):
            rows = min(largest, (settings["training.global_batch_size"][0] or request.gpus) // request.gpus or 1)
            why = f"global batch over {format_count(request.gpus, 'rank')}; up to {largest} per rank fit in memory"
            chosen["training.batch_size"] = (rows, why)
            settings |= chosen
            return
        tried.append(f"{adapter} at stage {stage}{', with gradient checkpointing' * (recompute != 'none')}")
    raise UserError(
        f"--gpu-memory {request.memory / GIB:.3g}GiB: {request.model} does not fit on {request.gpus} of these GPUs "
        f"({'; '.join(tried)}); use more GPUs, or a smaller model"
    )


def _list_placements(gpus: int) -> Iterator[tuple[str, int, str, bool]]:
    """Yield (adapter, ZeRO stage, gradient checkpointing, offload), from fastest to most memory-efficient."""
    for adapter in ("lora", "qlora"):
        for recompute in ("none", "non_reentrant"):
            yield adapter, 2, recompute, False
        if gpus > 1:
            yield adapter, 3, "non_reentrant", False
    yield "qlora", 3, "non_reentrant", True


def _choose_learning_rate(profile: Profile, steps: int) -> tuple[float, str]:
    full = 5e-5 if profile.parameters < 2e9 else 2e-5 if profile.parameters < 2e10 else 1e-5
    factor = 15 if steps < SHORT_RUN_STEPS else 10
    why = f"{factor} times the usual rate for full fine-tuning"
    return float(f"{full * factor:.2g}"), why + ", since the run is short" * (factor > 10)


def _choose_evaluation(*, has_held_out: bool) -> Settings:
    if not has_held_out:
        return {"training.saves_per_epoch": (1, "too few documents for evaluation")}
    return {
        "training.evals_per_epoch": (4, "often enough to see overfitting"),
        "training.saves_per_epoch": (4, "at every evaluation"),
        "training.best_checkpoint": (True, "the best adapter becomes the result"),
    }


def _build_config(settings: Settings) -> RunConfig:
    tree: dict[str, Any] = {}
    for dotted, (value, _) in settings.items():
        set_dotted(tree, dotted, value)
    return RunConfig.model_validate(tree)


def _resolve_gpu_memory(option: str | None) -> tuple[int, str]:
    if option is not None:
        return parse_memory(option), f"of {option}"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return memory, f"of this machine ({memory / GIB:.3g} GiB)"
    return parse_memory(DEFAULT_GPU), f"of {DEFAULT_GPU} (assumed, as this machine has none; set --gpu-memory)"


def render_yaml(settings: Settings, output: Path, warnings: Sequence[str] = ()) -> str:
    """Return the configuration as YAML, with each reason above its setting and sections in order of first use."""
    text = [f"# zerolora train {shlex.quote(str(output))}", "# All other settings: zerolora config --schema"]
    for warning in warnings:
        text += textwrap.wrap(f"Warning: {warning}.", WIDTH, initial_indent="# ", subsequent_indent="# ")
    text.append("")
    for section in dict.fromkeys(name.rpartition(".")[0] for name in settings):
        indent = "  " if section else ""
        text += [f"{section}:"] if section else []
        for name, (value, why) in settings.items():
            if name.rpartition(".")[0] == section:
                text += textwrap.wrap(why, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
                text.append(indent + dump({name.rpartition(".")[2]: value}).rstrip("\n"))
    return "\n".join(text) + "\n"


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="zerolora init", description="Write a configuration for this model, data and GPUs.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument(
        "--gpus", type=parse_rank_count, help="default: the ranks that `zerolora train` would start here"
    )
    parser.add_argument("--gpu-memory")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--output-dir", required=True)
    arguments = parser.parse_args(argv)
    gpus = arguments.gpus or choose_default_ranks()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here computes on a device
    silence_libraries()
    check_output_file(arguments.output, f"--output {arguments.output}")
    memory, gpu_text = _resolve_gpu_memory(arguments.gpu_memory)
    request = TailorRequest(arguments.model, arguments.data, gpus, memory, gpu_text, arguments.output_dir)
    settings, warnings = choose_settings(request)
    write_text_atomic(arguments.output, render_yaml(settings, arguments.output, warnings))
    load_config(arguments.output)
    for warning in warnings:
        print(f"warning: {warning}")
    file = shlex.quote(str(arguments.output))
    ranks, num_gpus = (f" {option} {gpus}" if arguments.gpus else "" for option in ("--ranks", "--num-gpus"))
    commands = f"validate {file}{ranks}", f"inspect {file}", f"train {file}{num_gpus}"
    print(f"wrote {arguments.output}; next:", *(f"  zerolora {command}" for command in commands), sep="\n")
