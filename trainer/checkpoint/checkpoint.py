"""What a checkpoint holds: taken from the engine, and brought back into one of any stage and number of ranks.

checkpoint-N/
  adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format (or the whole model for adapter: none)
  training_state-00000.safetensors ...             each rank's part of master weights and AdamW moments, fp32
  rank-00000.safetensors ...                       random states of each rank, and its 8-bit moments
  state.json                                       step, position in the data, loss scale, best loss, SCU, what decides
                                                   the run (trainer/checkpoint/identity.py)
  COMPLETE                                         written last: the checksums (trainer/checkpoint/checkpoint_files.py)

Frozen weights are not in it. How it is written while training goes on: trainer/checkpoint/background.py.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer.checkpoint.checkpoint_files import FORMAT, damage, read_state
from trainer.checkpoint.host_copies import HostCopies, Size
from trainer.checkpoint.tensor_writer import write_tensors
from trainer.config import UserError
from trainer.config.files import read_safetensors_header
from trainer.parallel.engine.flat_adapter import trained_parameters
from trainer.parallel.engine.optimizer_state import EngineState
from trainer.parallel.engine.partitioned import whole_size
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.engine.state_pieces import Pieces, whole_state
from trainer.parallel.ranks.group import Ranks
from trainer.patches.deepspeed_workarounds import loss_scale_state, loss_scaler


@dataclass(frozen=True)
class RankState:
    """What one rank puts into a checkpoint beside the weights: copies in host memory."""

    rank: int
    pieces: Pieces | None
    own: Mapping[str, torch.Tensor]
    own_metadata: dict[str, str]
    state: dict[str, Any]
    """Of `state.json`, which rank 0 writes."""

    @classmethod
    def of(cls, engine: Engine, ranks: Ranks, copies: HostCopies) -> "RankState":
        """The engine's state behind what the device has been given, but for `state`; nothing is waited for.

        `copies` are valid once they have been waited for.
        """
        engine_state = EngineState(engine)
        pieces = engine_state.pieces()
        if pieces is not None:
            tensors = {name: copies.copy(name, tensor) for name, tensor in pieces.tensors.items()}
            pieces = Pieces(tensors, pieces.shards, pieces.shapes, pieces.offsets, pieces.layout)
        raw = {f"moments/{name}": value for name, value in engine_state.raw().items()}
        own = {name: copies.copy(name, value) for name, value in (_random_states() | raw).items()}
        return cls(ranks.rank, pieces, own, {"python_rng": json.dumps(random.getstate())}, {})

    def at(self, position: dict[str, Any], engine: Engine, ranks: Ranks) -> "RankState":
        """The same with `state`, once the device has made what was copied."""
        state = {
            "format": FORMAT,
            **position,
            "optimizer_steps": EngineState(engine).steps_taken(),
            "world_size": ranks.world_size,
            "zero_stage": engine.zero_optimization_stage(),
            "loss_scale": _loss_scale(engine),
            "skipped_steps": engine.skipped_steps,
        }
        return replace(self, state=state)

    def write(self, folder: Path) -> list[Path]:
        """This rank's files; returns them."""
        files = [folder / f"rank-{self.rank:05d}.safetensors"]
        write_tensors(files[0], self.own, self.own_metadata)
        if self.pieces is not None:
            files.append(folder / f"training_state-{self.rank:05d}.safetensors")
            write_tensors(files[-1], self.pieces.tensors, self.pieces.metadata())
        if self.rank == 0:
            files.append(folder / "state.json")
            files[-1].write_text(json.dumps(self.state, indent=1))
        return files


def sizes_of(engine: Engine, ranks: Ranks) -> list[Size]:
    """What this rank will copy for a checkpoint of an adapter, but for a few small things."""
    weights = trained_parameters(engine.module) if ranks.is_main else []
    of_weights = [(whole_size(value) * value.element_size(), value.device) for _, value in weights]
    return EngineState(engine).sizes() + of_weights


def agreed_damage(checkpoint: Path, ranks: Ranks) -> str | None:
    """What rank 0 finds wrong with a checkpoint, told to all; every rank must call it."""
    answer = [damage(checkpoint) if ranks.is_main else None]
    if dist.is_initialized() and ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0, device=ranks.device())
    return answer[0]


def restore_checkpoint(checkpoint: Path, engine: Engine, ranks: Ranks) -> dict[str, Any]:
    """Bring a fresh engine to where the checkpoint was written; returns `state.json`.

    To the bit on the same stage and number of ranks. On others the random states are seeded again from the step, and
    8-bit moments are quantised again.
    """
    state = read_state(checkpoint)
    tensors = _load_state(checkpoint)
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


def _load_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return complete master weights and moments by name."""
    parts = sorted(checkpoint.glob("training_state-*.safetensors"))
    return whole_state(Pieces.read(_load(part), read_safetensors_header(part)[1]) for part in parts)


def _random_states() -> dict[str, torch.Tensor]:
    _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    tensors = {
        "rng/torch": torch.get_rng_state(),
        "rng/numpy": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
        "rng/numpy_rest": torch.tensor([float(position), float(has_gauss), float(cached)], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore_rank(path: Path, engine_state: EngineState) -> bool:
    tensors = _load(path)
    version, internal, gauss = json.loads(read_safetensors_header(path)[1]["python_rng"])
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
