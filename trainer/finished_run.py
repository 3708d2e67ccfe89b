"""A run as training left it: its configuration, tokenizer and adapter, found again from the run's folder."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from trainer.adapt import changes_base_weights
from trainer.attention import resolve_attention
from trainer.checkpoint import whole_checkpoints
from trainer.config import RunConfig, UserError
from trainer.data.chat import chat_template_of
from trainer.model import load_base_model, load_tokenizer, match_vocabulary
from trainer.zero import DTYPES, resolve_precision

CONFIG = "training_config.json"
WEIGHTS = "adapter_model.safetensors"
# Two documents of a batch are rows of their own after training: the mask of padding is all that keeps them apart.
_UNPACKED = False


@dataclass(frozen=True)
class FinishedRun:
    """`folder` holds the adapter: the run's own folder, or one of its checkpoints in `run_dir`."""

    folder: Path
    run_dir: Path
    config: RunConfig


def find_run(folder: Path, base_model: str | None = None) -> FinishedRun:
    """The run whose output folder, or checkpoint, `folder` is; `base_model` replaces the base it was trained on.

    Raises UserError if it is no such folder, holds no adapter, or cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the output_dir of a run, or a checkpoint-N in it")
    run_dir = next((path for path in (folder, folder.resolve().parent) if (path / CONFIG).is_file()), None)
    if run_dir is None:
        raise UserError(f"{folder}: not a run, for it has no {CONFIG}; name the output_dir of a run")
    config = _read_config(run_dir / CONFIG)
    if config.adapter == "none":
        raise UserError(
            f"{folder}: adapter is none in this run, so there is no adapter; the folder itself is a whole model, for "
            "AutoModelForCausalLM.from_pretrained"
        )
    if not (folder / WEIGHTS).is_file() or not (folder / "adapter_config.json").is_file():
        whole = whole_checkpoints(run_dir)
        way_out = f"name its newest checkpoint, {whole[-1]}" if whole else "train it first"
        raise UserError(f"{folder}: holds no {WEIGHTS}, the run has not come to its end; {way_out}")
    if folder != run_dir and changes_base_weights(config.lora) and not (run_dir / "initial_adapter").is_dir():
        raise UserError(f"{folder}: lora.init={config.lora.init} needs {run_dir / 'initial_adapter'}, which is gone")
    if base_model is not None:
        config = config.model_copy(
            update={"base_model": base_model, "model": config.model.model_copy(update={"revision": None})}
        )
    return FinishedRun(folder, run_dir, config)


def _read_config(path: Path) -> RunConfig:
    try:
        return RunConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: {where}: {first['msg']}; was it written by another version?") from None
