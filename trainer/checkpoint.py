"""Checkpoints: written beside and renamed when whole, without frozen weights, for any stage and number of ranks.

checkpoint-N/
  adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format (or the whole model for adapter: none)
  training_state.safetensors                       master weights and AdamW moments by parameter name, fp32
  rank-00000.safetensors ...                       random states of each rank, and its 8-bit moments
  state.json                                       step, position in the data, loss scale, best loss, SCU
  COMPLETE                                         written last
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from trainer.config import UserError
from trainer.deepspeed_workarounds import loss_scale_state, loss_scaler
from trainer.engine_state import EngineState
from trainer.liveness.progress import phase
from trainer.ranks import Ranks

MARKER = "COMPLETE"
FORMAT = 1


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints of a run that were written to the end, oldest first."""
    found = [path for path in run_dir.glob("checkpoint-*") if path.name[11:].isdigit() and (path / MARKER).exists()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def find_checkpoint(setting: str | None, run_dir: Path) -> Path | None:
    """The checkpoint that `training.resume_from_checkpoint` means; UserError if it is not there or not whole."""
    if setting is None:
        return None
    if setting in ("latest", "auto"):
        whole = whole_checkpoints(run_dir)
        if not whole and setting == "latest":
            raise UserError(
                f"training.resume_from_checkpoint=latest: no whole checkpoint in {run_dir}; "
                "remove the setting, or use auto"
            )
        return whole[-1] if whole else None
    path = Path(setting)
    if not (path / "state.json").exists():
        raise UserError(f"training.resume_from_checkpoint={setting}: not the folder of a checkpoint; use latest")
    if not (path / MARKER).exists():
        raise UserError(f"training.resume_from_checkpoint={setting}: was not written to the end; use latest")
    return path


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise UserError(f"{checkpoint}: written in format {state.get('format')}, this version reads {FORMAT}")
    return state


def save_checkpoint(
    run_dir: Path,
    engine: Any,
    ranks: Ranks,
    position: dict[str, Any],
    save_weights: Callable[[Path], None],
    *,
    keep: int | None,
    protect: tuple[int, ...] = (),
) -> Path:
    """Write `checkpoint-<position["step"]>` and remove the oldest beyond `keep`; every rank must call it.

    `save_weights(folder)` writes the adapter or model (called on every rank, since gathering is collective).
    """
    final = run_dir / f"checkpoint-{position['step']}"
    folder = run_dir / f".writing-{final.name}"
    if ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    _barrier()
    engine_state = EngineState(engine)
    save_weights(folder)
    with phase("gather"):
        tensors = engine_state.collect()
    save_file(_rank_tensors(engine_state), folder / f"rank-{ranks.rank:05d}.safetensors", _rank_metadata())
    if ranks.is_main:
        save_file(tensors, folder / "training_state.safetensors")
        state = {
            "format": FORMAT,
            **position,
            "optimizer_steps": engine_state.steps_taken(),
            "world_size": ranks.world_size,
            "zero_stage": engine.zero_optimization_stage(),
            "loss_scale": _loss_scale(engine),
            "skipped_steps": engine.skipped_steps,
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1))
    del tensors
    _barrier()
    if ranks.is_main:
        _publish(folder, final)
        _remove_oldest(run_dir, keep, protect=(*protect, position["step"]))
    _barrier()
    return final


def restore_checkpoint(checkpoint: Path, engine: Any, ranks: Ranks) -> dict[str, Any]:
    """Bring a fresh engine to where the checkpoint was written; returns `state.json`.

    To the bit on the same stage and number of ranks. On others the random states are seeded anew from the step, and
    8-bit moments are quantised again.
    """
    state = read_state(checkpoint)
    tensors = load_file(checkpoint / "training_state.safetensors")
    engine_state = EngineState(engine)
    engine_state.restore(tensors, int(state["optimizer_steps"]))
    same_layout = (state["world_size"], state["zero_stage"]) == (ranks.world_size, engine.zero_optimization_stage())
    own = checkpoint / f"rank-{ranks.rank:05d}.safetensors"
    if same_layout and own.exists():
        _restore_rank(own, engine_state)
    else:
        torch.manual_seed(hash((int(state["step"]), ranks.rank)) % 2**31)
    _restore_loss_scale(engine, state["loss_scale"])
    engine.skipped_steps = int(state["skipped_steps"])
    engine.global_steps = int(state["step"])
    return state


def _publish(folder: Path, final: Path) -> None:
    """Rename when everything is on the disk: a checkpoint is whole or it is not there."""
    (folder / MARKER).write_text("")
    for path in folder.rglob("*"):  # a tokenizer with several chat templates has a folder of them
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    if final.exists():
        shutil.rmtree(final)
    os.replace(folder, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _remove_oldest(run_dir: Path, keep: int | None, protect: tuple[int, ...]) -> None:
    if keep is None:
        return
    for checkpoint in whole_checkpoints(run_dir)[:-keep]:
        if step_of(checkpoint) not in protect:
            shutil.rmtree(checkpoint)


def _rank_tensors(engine_state: EngineState) -> dict[str, torch.Tensor]:
    _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    tensors = {
        "rng/torch": torch.get_rng_state(),
        "rng/numpy": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
        "rng/numpy_rest": torch.tensor([float(position), float(has_gauss), float(cached)], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    return tensors | {f"moments/{name}": value for name, value in engine_state.raw().items()}


def _rank_metadata() -> dict[str, str]:
    return {"python_rng": json.dumps(random.getstate())}


def _restore_rank(path: Path, engine_state: EngineState) -> None:
    from safetensors import safe_open

    tensors = load_file(path)
    with safe_open(str(path), framework="pt") as handle:
        version, internal, gauss = json.loads(handle.metadata()["python_rng"])
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(tensors["rng/torch"])
    position, has_gauss, cached = tensors["rng/numpy_rest"].tolist()
    keys = tensors["rng/numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if torch.cuda.is_available() and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])
    moments = {name.removeprefix("moments/"): value for name, value in tensors.items() if name.startswith("moments/")}
    engine_state.restore_raw(moments)


def _loss_scale(engine: Any) -> dict[str, float] | None:
    """The state of fp16's dynamic loss scale."""
    if not engine.fp16_enabled():
        return None
    scaler = loss_scaler(engine.optimizer)
    return {name: float(getattr(scaler, name)) for name in loss_scale_state(scaler)}


def _restore_loss_scale(engine: Any, saved: dict[str, float] | None) -> None:
    if saved and engine.fp16_enabled():
        scaler = loss_scaler(engine.optimizer)
        for name, value in saved.items():
            if name in loss_scale_state(scaler):  # it may be fixed now
                setattr(scaler, name, type(getattr(scaler, name))(value))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
