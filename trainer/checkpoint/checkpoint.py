"""Checkpoints: written beside and renamed when whole, without frozen weights, for any stage and number of ranks.

checkpoint-N/
  adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format (or the whole model for adapter: none)
  training_state.safetensors                       master weights and AdamW moments by parameter name, fp32
  rank-00000.safetensors ...                       random states of each rank, and its 8-bit moments
  state.json                                       step, position in the data, loss scale, best loss, SCU, what decides
                                                   the run (trainer/checkpoint/resume_comparison.py)
  COMPLETE                                         written last: the checksums (trainer/checkpoint/checkpoint_files.py)
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.checkpoint.checkpoint_files import FORMAT, damage, oldest_beyond, publish, read_state
from trainer.config import UserError
from trainer.contract.full_disk import disk_errors_into
from trainer.engine.optimizer_state import EngineState
from trainer.engine.protocol import Engine
from trainer.patches.deepspeed_workarounds import loss_scale_state, loss_scaler
from trainer.ranks.group import Ranks
from trainer.ranks.progress import phase


class SaveFailed(UserError):
    """The disk refused a checkpoint, on whatever rank; all ranks know, and the older ones are as they were."""

    exit_code = 1


def save_checkpoint(
    run_dir: Path,
    engine: Engine,
    ranks: Ranks,
    position: dict[str, Any],
    save_weights: Callable[[Path], None],
    *,
    before_publishing: Callable[[], None] = lambda: None,
    keep: int | None,
    protect: tuple[int, ...] = (),
    later: list[Path],
) -> list[Path]:
    """Write `checkpoint-<position["step"]>` and remove the oldest beyond `keep`; every rank must call it.

    `save_weights(folder)` writes the adapter or model (called on every rank, since gathering is collective). The
    checkpoints `later` belong to a course that this run has left: they step aside when this one is whole, and rank 0
    gets their new names. `before_publishing` is asked on rank 0 when all is written; its error leaves what was there
    before. Raises SaveFailed, on every rank, if the disk is full.
    """
    final = run_dir / f"checkpoint-{position['step']}"
    folder = run_dir / f".writing-{final.name}"
    failures: list[str] = []
    aside: list[Path] = []
    with disk_errors_into(failures, run_dir):
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    _agree(failures, folder, ranks)
    engine_state = EngineState(engine)
    with disk_errors_into(failures, run_dir):
        save_weights(folder)
    # A collective, so that a rank whose disk is full takes part all the same.
    with phase("gather"):
        tensors = engine_state.collect()
    with disk_errors_into(failures, run_dir):
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
    _agree(failures, folder, ranks)
    with disk_errors_into(failures, run_dir):
        if ranks.is_main:
            before_publishing()
            aside = publish(folder, final, later)
    _agree(failures, folder, ranks)
    if ranks.is_main:
        for checkpoint in list(oldest_beyond(run_dir, keep, (*protect, position["step"]))):
            shutil.rmtree(checkpoint)
    _barrier()
    return aside


def _agree(failures: list[str], folder: Path, ranks: Ranks) -> None:
    """Wait for all ranks; if the disk of any was full, remove what was written and raise SaveFailed on all."""
    everyones: list[list[str]] = [failures]
    if dist.is_initialized() and ranks.world_size > 1:
        everyones = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(everyones, failures)
    told = [reason for reasons in everyones for reason in reasons]
    if not told:
        return
    if ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    name = folder.name.removeprefix(".writing-")
    raise SaveFailed(f"{name} was not saved: {told[0]}; make room; the older checkpoints are as they were")


def agreed_damage(checkpoint: Path, ranks: Ranks) -> str | None:
    """What rank 0 finds wrong with a checkpoint, told to all; every rank must call it."""
    answer = [damage(checkpoint) if ranks.is_main else None]
    if dist.is_initialized() and ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0, device=ranks.device())
    return answer[0]


def restore_checkpoint(checkpoint: Path, engine: Engine, ranks: Ranks) -> dict[str, Any]:
    """Bring a fresh engine to where the checkpoint was written; returns `state.json`.

    To the bit on the same stage and number of ranks. On others the random states are seeded anew from the step, and
    8-bit moments are quantised again.
    """
    state = read_state(checkpoint)
    tensors = _load(checkpoint / "training_state.safetensors")
    engine_state = EngineState(engine)
    if misfit := engine_state.misfit(tensors):
        raise UserError(
            f"{checkpoint}: {misfit}, so it is of another model or adapter; take the settings that it was trained "
            f"with, or begin a new run with lora.adapter_path: {checkpoint}"
        )
    exact = engine_state.restore(tensors, int(state["optimizer_steps"]))
    same_layout = (state["world_size"], state["zero_stage"]) == (ranks.world_size, engine.zero_optimization_stage())
    own = checkpoint / f"rank-{ranks.rank:05d}.safetensors"
    if same_layout and own.exists():
        exact = _restore_rank(own, engine_state) or exact
    else:
        torch.manual_seed(hash((int(state["step"]), ranks.rank)) % 2**31)
    state["rounded_anew"] = not exact
    _restore_loss_scale(engine, state["loss_scale"])
    engine.skipped_steps = int(state["skipped_steps"])
    engine.global_steps = int(state["step"])
    return state


def _load(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file; UserError if it cannot be read, although rank 0 has found it whole."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); look at the disk, or use another checkpoint") from None


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


def _restore_rank(path: Path, engine_state: EngineState) -> bool:
    from safetensors import safe_open

    tensors = _load(path)
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
    return engine_state.restore_raw(moments)


def _loss_scale(engine: Engine) -> dict[str, float] | None:
    """The state of fp16's dynamic loss scale."""
    if not engine.fp16_enabled():
        return None
    scaler = loss_scaler(engine.optimizer)
    return {name: float(getattr(scaler, name)) for name in loss_scale_state(scaler)}


def _restore_loss_scale(engine: Engine, saved: dict[str, float] | None) -> None:
    if saved and engine.fp16_enabled():
        scaler = loss_scaler(engine.optimizer)
        for name, value in saved.items():
            if name in loss_scale_state(scaler):  # it may be fixed now
                setattr(scaler, name, type(getattr(scaler, name))(value))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
