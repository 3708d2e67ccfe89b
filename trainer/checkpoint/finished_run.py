"""Load the configuration, tokenizer and adapter of a finished run from its folder."""

import argparse
import json
import logging
import os
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ValidationError

from trainer.checkpoint.adapter_files import describe_adapter_damage
from trainer.checkpoint.checkpoint_files import list_checkpoints
from trainer.checkpoint.identity import ALLOW_MISMATCH_OPTION, check_unchanged
from trainer.checkpoint.run_record import CONFIG, PROMPT_TEXT, RUN, STARTED_IN, find_run_dir
from trainer.config import RunConfig, UserError
from trainer.config.errors import describe_first_error
from trainer.config.files import read_json, read_json_or_default, read_safetensors_header, read_value
from trainer.contract.object_store import open_run
from trainer.data.records import PLAIN_PROMPT, PLAIN_TEXT
from trainer.model.base import load_base_model, load_tokenizer, resize_to_vocabulary
from trainer.model.saved_adapter import load_adapter
from trainer.parallel.engine.deepspeed_engine import DTYPES, resolve_precision
from trainer.parallel.ranks.group import set_seed
from trainer.patches.fake_quantized_lora import install_fake_quantization
from trainer.patches.packed_attention import choose_attention, copy_heads_without_flash

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
INPUTS = ("base_model", "tokenizer", "path", "adapter_path", "reference")
"""Settings, in any section, that may contain the path of an input."""
BASE_MODEL_HELP = "location of the base model, if it was moved"


def _check_prompt_format(text: str) -> str:
    with suppress(AttributeError, IndexError, KeyError, ValueError):
        if "\0" in text.format(system="", prompt="\0"):
            return text
    raise ValueError("must contain {prompt}, and no other placeholder except {system}")


PromptFormat = Annotated[str, AfterValidator(_check_prompt_format)]


@dataclass(frozen=True)
class FinishedRun:
    """A finished run. `folder` contains the adapter and is `run_dir` or a checkpoint in it."""

    folder: Path
    run_dir: Path
    config: RunConfig
    allow_mismatch: bool = False
    """Whether the base model, data and files may differ from those used in training."""


def add_run_arguments(parser: argparse.ArgumentParser, base_model_help: str) -> None:
    parser.add_argument("run", type=open_run, metavar="RUN", help="output folder of the run, or a checkpoint in it")
    parser.add_argument("--base-model", metavar="MODEL", help=base_model_help)
    parser.add_argument(
        ALLOW_MISMATCH_OPTION, action="store_true", help="accept a base model, data or files that differ from training"
    )


def find_run(
    folder: Path, base_model: str | None = None, *, needs_base: bool = True, allow_mismatch: bool = False
) -> FinishedRun:
    """Return the run in `folder`, an output folder or checkpoint. `base_model` replaces the recorded base model.

    Raises UserError if the folder contains no run or adapter, its configuration cannot be read, the base model's folder
    is missing (with `needs_base`), or anything differs from training (without `allow_mismatch`).
    """
    run_dir = find_run_dir(folder)
    config = _read_config(run_dir)
    if config.adapter == "none":
        raise UserError(
            f"{folder}: trained with adapter: none, so it is a full model; use it with "
            "AutoModelForCausalLM.from_pretrained, vLLM or `hf upload`"
        )
    if missing := [name for name in ADAPTER_FILES if not (folder / name).is_file()]:
        checkpoints = list_checkpoints(run_dir)
        fix = f"use its newest checkpoint, {checkpoints[-1]}" if checkpoints else "train it first"
        raise UserError(f"{folder}: {missing[0]} is missing: the run did not finish, or the file was deleted; {fix}")
    if problem := describe_adapter_damage(folder):
        others = [path for path in list_checkpoints(run_dir) if path.resolve() != folder.resolve()]
        newest = f"; its newest checkpoint is {others[-1]}" if others else ""
        raise UserError(f"{folder}: {problem}{newest}")
    if base_model is not None:
        # The recorded revision belongs to the recorded base model.
        if Path(base_model).is_file() and Path(base_model).suffix != Path(config.base_model).suffix:
            raise UserError(f"--base-model={base_model}: is a file; pass a model folder or a Hub ID")
        section = config.model.model_copy(update={"revision": None})
        config = config.model_copy(update={"base_model": base_model, "model": section})
    is_path = config.base_model.startswith(("/", ".", "~"))
    if needs_base and is_path and not Path(config.base_model).expanduser().exists():
        raise UserError(f"base_model={config.base_model}: does not exist; pass its new location with --base-model")
    try:
        check_unchanged(config, folder, needs_base=needs_base)
    except UserError as error:
        if not allow_mismatch:
            raise
        for mistake in getattr(error, "mistakes", (error,)):
            print(f"note: {str(mistake).rpartition('; ')[0]}; allowed by {ALLOW_MISMATCH_OPTION}", file=sys.stderr)
        _report_layers_without_adapter(folder, config.base_model)
    # The saved tokenizer has the template used in training; the template file may have changed since.
    config = config.model_copy(update={"dataset": config.dataset.model_copy(update={"chat_template": None})})
    return FinishedRun(folder, run_dir, config, allow_mismatch)


def _report_layers_without_adapter(folder: Path, base_model: str) -> None:
    """Print a note if the base model has layers above the adapter's last layer."""
    header, _, _ = read_safetensors_header(folder / ADAPTER_FILES[0])
    last = max((int(match[1]) for name in header if (match := re.search(r"\.layers\.(\d+)\.", name))), default=-1)
    config = read_json_or_default(Path(base_model).expanduser() / "config.json", dict[str, Any], {})
    layers = config.get("num_hidden_layers", 0)
    if isinstance(layers, int) and 0 <= last < layers - 1:
        unchanged = f"has {layers} layers, but the adapter covers only {last + 1}; the others are unchanged"
        print(f"note: base_model={base_model}: {unchanged}", file=sys.stderr)


def _read_config(run_dir: Path) -> RunConfig:
    """Return the run's settings. Relative paths that exist in its working directory become absolute."""
    path = run_dir / CONFIG
    settings, started_in = read_json(path), None
    with suppress(FileNotFoundError):  # reported by `check_unchanged`, unless it is allowed
        read_value(run_dir / RUN, PROMPT_TEXT, PromptFormat | None)
        started_in = read_value(run_dir / RUN, STARTED_IN, str | None)
    if started_in and os.path.isdir(started_in):
        settings = _resolve_paths(settings, Path(started_in))
    try:
        return RunConfig.model_validate_json(json.dumps(settings))
    except ValidationError as error:
        raise UserError(
            f"{path}: {describe_first_error(error)}; restore it, or use the version of zerolora that wrote it"
        ) from None


def _resolve_paths(value: Any, folder: Path, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _resolve_paths(inner, folder, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve_paths(inner, folder, name) for inner in value]
    is_input = name in INPUTS and isinstance(value, str) and "\n" not in value and os.path.exists(folder / value)
    return str(folder / value) if is_input else value


def load_saved_tokenizer(run: FinishedRun) -> Any:
    update = {"tokenizer": str(run.folder), "revision": None, "added_tokens": (), "pad_token": None}
    return load_tokenizer(str(run.folder), run.config.model.model_copy(update=update))


def find_prompt_format(run: FinishedRun, tokenizer: Any, *, raw: bool = False, chat: bool = False) -> str | None:
    """Return the prompt format for plain text, or None for the chat template. `raw` and `chat` override run.json."""
    prompt_format: str | None = PLAIN_TEXT if raw else None
    with suppress(FileNotFoundError):
        if not raw and not chat:
            prompt_format = read_value(run.run_dir / RUN, PROMPT_TEXT, PromptFormat | None)
    return prompt_format if prompt_format is not None or tokenizer.chat_template else PLAIN_PROMPT


def choose_default_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_trained_model(run: FinishedRun, tokenizer: Any, device: torch.device) -> Any:
    """Load the PEFT model in the run's precision, with weights quantized as in training (QLoRA, `training.qat`).

    Raises UserError if the base model is missing or does not match the adapter.
    """
    config = run.config
    dtype = DTYPES[resolve_precision(config.training.precision, device)]
    copy_heads_without_flash(device, dtype)
    base = load_base_model(
        config.base_model,
        config.model,
        dtype=dtype,
        device=device,
        attention=choose_attention(config.model),
        quantization=config.quantization if config.adapter == "qlora" else None,
    )
    model = attach_adapter(base, tokenizer, run)
    if config.training.qat:
        install_fake_quantization(model, config.training.qat, dtype)
    return model


def load_full_base(run: FinishedRun, dtype: torch.dtype) -> Any:
    """Load the run's base model, unquantized, in `dtype` on the CPU."""
    base, cpu = run.config.base_model, torch.device("cpu")
    return load_base_model(base, run.config.model, dtype=dtype, device=cpu, attention="eager", unpack=True)


def attach_adapter(base: Any, tokenizer: Any, run: FinishedRun, *, in_fp32: bool = False) -> Any:
    """Resize the embedding of `base` for added tokens and attach the run's adapter for inference.

    The adapter keeps the dtype it was trained in, unless `in_fp32` is set.
    """
    set_seed(run.config.seed)  # so that rows of added tokens get the same random values in every command
    resize_to_vocabulary(base, tokenizer)
    if run.config.model.has_score:
        base.config.pad_token_id = tokenizer.pad_token_id  # transformers uses it to find the end of a sequence
    error_prefix = f"{run.folder}: its adapter does not match base_model={run.config.base_model}"
    return load_adapter(base, str(run.folder), error_prefix=error_prefix, in_fp32=in_fp32)


def silence_libraries() -> None:
    for name in ("bitsandbytes", "datasets", "peft", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)  # torchao warns about kernels for other GPUs

    import transformers

    for module in ("transformers", "peft"):
        warnings.filterwarnings("ignore", module=rf"{module}\.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
