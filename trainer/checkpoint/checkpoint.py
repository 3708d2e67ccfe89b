"""Capture the contents of a checkpoint from an engine, and restore them for any ZeRO stage and number of ranks.

checkpoint-N/
  adapter_model.safetensors, adapter_config.json   the adapter in PEFT's format (with adapter: none, the full model)
  training_state-00000.safetensors ...             each rank's shard of master weights and moments, fp32
  rank-00000.safetensors ...                       each rank's RNG states and 8-bit moments
  state.json                                       step, data position, loss scale, best loss, SCU state, identity of
                                                   the run (trainer/checkpoint/identity.py)
  COMPLETE                                         checksums, written last (trainer/checkpoint/checkpoint_files.py)

Frozen weights are not saved. trainer/checkpoint/background.py writes checkpoints while training continues.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer.checkpoint.checkpoint_files import FORMAT_VERSION, read_state
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.tensor_writer import write_tensors
from trainer.config import UserError
from trainer.config.files import read_safetensors_header
from trainer.parallel.engine.optimizer_state import EngineState, StatePieces, assemble_state
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.patches.deepspeed_workarounds import get_loss_scaler, list_loss_scale_attributes


@dataclass(frozen=True)
class RankState:
    """State that one rank saves in addition to the weights, copied to host memory."""

    rank: int
    pieces: StatePieces | None
    rank_tensors: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    """The content of `state.json`, which rank 0 writes."""

    @classmethod
    def capture(cls, engine: Engine, ranks: Ranks, copies: HostCopies) -> "RankState":
        """Queue copies of everything except `state`; they are valid after `copies.wait()`."""
        engine_state = EngineState(engine)
        pieces = engine_state.collect_pieces()
        if pieces is not None:
            tensors = {name: copies.copy(name, tensor) for name, tensor in pieces.tensors.items()}
            pieces = StatePieces(tensors, pieces.shards, pieces.shapes)
        raw = {"rng/torch": torch.get_rng_state()}  # a step uses neither Python's nor NumPy's generator
        if torch.cuda.is_available():
            raw["rng/cuda"] = torch.cuda.get_rng_state()
        raw |= {f"moments/{name}": value for name, value in engine_state.collect_8bit_moments().items()}
        rank_tensors = {name: copies.copy(name, value) for name, value in raw.items()}
        return cls(ranks.rank, pieces, rank_tensors, {})

    def fill_state(self, position: dict[str, Any], engine: Engine, ranks: Ranks) -> "RankState":
        """Return a copy with `state` filled in. Call it only after the device has finished the step being saved."""
        state = {
            "format": FORMAT_VERSION,
            **position,
            "optimizer_steps": EngineState(engine).count_steps_taken(),
            "averages": EngineState(engine).read_averaging_state(),
            "world_size": ranks.world_size,
            "zero_stage": engine.zero_optimization_stage(),
            "loss_scale": _read_loss_scale(engine),
            "skipped_steps": engine.skipped_steps,
        }
        return replace(self, state=state)

    def write(self, folder: Path) -> list[Path]:
        files = [folder / f"rank-{self.rank:05d}.safetensors"]
        write_tensors(files[0], self.rank_tensors, {})
        if self.pieces is not None:
            files.append(folder / f"training_state-{self.rank:05d}.safetensors")
            write_tensors(files[-1], self.pieces.tensors, self.pieces.build_metadata())
        if self.rank == 0:
            files.append(folder / "state.json")
            files[-1].write_text(json.dumps(self.state, indent=1))
        return files


def restore_checkpoint(checkpoint: Path, engine: Engine, ranks: Ranks) -> dict[str, Any]:
    """Load a checkpoint into a fresh engine; return its `state.json` with an additional key `requantized`.

    The result is bitwise exact for the same ZeRO stage and number of ranks. Otherwise the RNGs are seeded from the
    step, and 8-bit moments are requantized.
    """
    state = read_state(checkpoint)
    files = sorted(checkpoint.glob("training_state-*.safetensors"))
    tensors = assemble_state(StatePieces.read(_load_tensors(file), read_safetensors_header(file)[1]) for file in files)
    engine_state = EngineState(engine)
    if mismatch := engine_state.find_mismatch(tensors):
        fix = f"use the settings of that run, or start a new run with lora.adapter_path: {checkpoint}"
        raise UserError(f"{checkpoint}: {mismatch}, so it was saved with another model, adapter or optimizer; {fix}")
    exact = engine_state.restore(tensors, int(state["optimizer_steps"]))
    engine_state.restore_averaging_state(state.get("averages", []))
    same_layout = (state["world_size"], state["zero_stage"]) == (ranks.world_size, engine.zero_optimization_stage())
    rank_file = checkpoint / f"rank-{ranks.rank:05d}.safetensors"
    if same_layout and rank_file.exists():
        saved = _load_tensors(rank_file)
        torch.set_rng_state(saved["rng/torch"])
        if torch.cuda.is_available() and "rng/cuda" in saved:
            torch.cuda.set_rng_state(saved["rng/cuda"])
        moments = {name.removeprefix("moments/"): value for name, value in saved.items() if name.startswith("moments/")}
        exact = engine_state.restore_8bit_moments(moments) or exact
    else:
        torch.manual_seed(hash((int(state["step"]), ranks.rank)) % 2**31)
    state["requantized"] = not exact
    if state["loss_scale"] and engine.fp16_enabled():
        scaler = get_loss_scaler(engine.optimizer)
        for name, value in state["loss_scale"].items():
            if name in list_loss_scale_attributes(scaler):  # the loss scale may be static now
                setattr(scaler, name, type(getattr(scaler, name))(value))
    engine.skipped_steps = int(state["skipped_steps"])
    engine.global_steps = int(state["step"])
    return state


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a file. Raises UserError if this rank cannot read it, even if rank 0 could."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); check the disk, or use another checkpoint") from None


def _read_loss_scale(engine: Engine) -> dict[str, float] | None:
    if not engine.fp16_enabled():
        return None
    scaler = get_loss_scaler(engine.optimizer)
    return {name: float(getattr(scaler, name)) for name in list_loss_scale_attributes(scaler)}


@dataclass
class Position:
    """Progress of a run, saved in every checkpoint."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    """Number of samples used in this epoch so far, across all ranks."""
    tokens: int = 0
    target_tokens: int = 0
    last_evaluation: float | None = None
    evaluated_at: int = -1
    """Step of the last evaluation."""
    best_metric: str = "loss"
    """Value of `training.best_metric`; `best_loss` is the metric's best value, negated if higher is better."""
    best_loss: float = math.inf
    best_step: int = 0
    worse_in_a_row: int = 0
    nonfinite_in_a_row: int = 0
    nonfinite_steps: int = 0
    """Number of steps that changed no weight or had a non-finite loss."""
    spikes: int = 0
    latest_losses: list[float] = field(default_factory=list)
    """Losses of the last steps, for detecting spikes; only rank 0 keeps this and `spikes`."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, in which None replaces an infinite or NaN `best_loss` and `last_evaluation`."""
        losses = {"best_loss": self.best_loss, "last_evaluation": self.last_evaluation}
        finite = {name: loss if loss is not None and math.isfinite(loss) else None for name, loss in losses.items()}
        return asdict(self) | finite

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Position":
        """Undo `to_dict`, ignoring unknown keys."""
        fields = {key: state[key] for key in cls.__dataclass_fields__ if key in state}
        if fields.get("best_loss") is None:
            fields["best_loss"] = math.inf
        return cls(**fields)
