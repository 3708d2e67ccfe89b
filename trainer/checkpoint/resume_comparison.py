"""Compare a run that resumes with its checkpoint: it must be the same run.

All differences are reported together. `training.resume_changes` allows those that it names; what no checkpoint can
follow (another rank or other layers of the adapter) is always refused; harmless changes are only mentioned.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpoint.checkpoint_files import Choice, choose_checkpoint, read_state
from trainer.checkpoint.identity import Identity, check_start, differences, recorded_identity, run_identity
from trainer.config import RunConfig, UserError
from trainer.config.errors import UserErrors
from trainer.data.prepared import Prepared
from trainer.parallel.ranks.group import Ranks


@dataclass(frozen=True)
class Resumption:
    """Where a run begins: at its start (None), or at a checkpoint; and what the user shall know of it."""

    checkpoint: Path | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_resumption(
    config: RunConfig,
    prepared: Prepared,
    *,
    world_size: int | None,
    precision: str | None = None,
    choice: Choice | None = None,
) -> Resumption:
    """Return the checkpoint to resume, every byte of it as it was written and of the same run.

    `choice` is what an earlier call of `choose_checkpoint` has found by reading. Raises UserError with a line for each
    thing that is different and must not be, also between the base and the adapter that training starts from.
    """
    training = config.training
    if choice is None:
        choice = choose_checkpoint(training.resume_from_checkpoint, Path(config.output_dir), read=True)
    warnings = () if choice.warning is None else (choice.warning,)
    checkpoint = choice.checkpoint
    if checkpoint is None:
        return Resumption(None, (*warnings, *check_start(config)))
    state, then = read_state(checkpoint), recorded_identity(checkpoint)
    notes = []
    if then is not None:
        now = run_identity(config, prepared, world_size, precision)
        refused, note = compare(then, now, checkpoint, training.resume_changes)
        if refused:
            raise UserErrors(refused)
        notes += [note] if note else []
    else:
        notes.append(
            f"{checkpoint.name} is of an older version, which kept nothing to compare: that model, data and settings "
            "are the same is taken on trust"
        )
    if training.max_steps is not None and int(state["step"]) >= training.max_steps:
        notes.append(nothing_left(int(state["step"]), training.max_steps))
    return Resumption(checkpoint, warnings, tuple(notes))


def nothing_left(step: int, total_steps: int) -> str:
    """For a run whose steps are done already."""
    return (
        f"the checkpoint is of step {step}, and training.max_steps or epochs come to {total_steps}: "
        "there is nothing left to train; raise them to go on"
    )


def agree_on_resumption(
    config: RunConfig, prepared: Prepared, ranks: Ranks, device: torch.device, precision: str
) -> Resumption:
    """Rank 0's `plan_resumption` for all ranks, all of which must call it; it alone reads the checkpoint's bytes."""
    answer: list[Resumption | list[str] | None] = [None]
    if ranks.is_main:
        try:
            answer[0] = plan_resumption(config, prepared, world_size=ranks.world_size, precision=precision)
        except UserError as error:
            answer[0] = error.messages if isinstance(error, UserErrors) else [str(error)]
    if dist.is_initialized() and ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0, device=device)
    found = answer[0]
    if isinstance(found, list):
        raise UserErrors(found)
    assert found is not None, "rank 0 sent no answer"
    return found


def compare(then: Identity, now: Identity, checkpoint: Path, allowed: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Return a line for each difference that is refused, and one for all that are not; None if there are none."""
    refused, changed = [], []
    for found in differences(then, now, checkpoint.name):
        if found.fixed:
            weights = "base_model" if then.settings.get("adapter") == "none" else "lora.adapter_path"
            refused.append(
                f"{found.problem}, and its optimizer state fits nothing else; set it back, or begin a new run with "
                f"{weights}: {checkpoint}"
            )
        elif found.group is None or found.group in allowed:
            changed.append(found.change)
        else:
            fix = f"set it back, or allow the change with training.resume_changes: [{found.group}]"
            refused.append(f"{found.problem}; {fix}")
    return refused, f"changed since {checkpoint.name}: {', '.join(changed)}" if changed else None
