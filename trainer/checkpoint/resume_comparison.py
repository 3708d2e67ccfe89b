"""Comparison of a resuming run with its checkpoint, which must be of the same run.

All differences are reported together. `training.resume_changes` allows those that it names; changes that no optimizer
state can follow (the adapter's rank or layers) are always refused; harmless changes are only mentioned.
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.checkpoint_files import Choice, choose_checkpoint, read_state
from trainer.checkpoint.identity import Identity, check_start, differences, recorded_identity, run_identity
from trainer.config import RunConfig
from trainer.config.errors import UserErrors
from trainer.data.prepared import Prepared


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that a run resumes from, None for a fresh start; with warnings and notes for the user."""

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
    """Return the checkpoint to resume from, after verifying its checksums and that it is of the same run.

    `choice` is the result of an earlier `choose_checkpoint(..., read=True)`. Raises UserError with a line for each
    difference that is not allowed, also between the base and the adapter that training starts from.
    """
    training = config.training
    if choice is None:
        choice = choose_checkpoint(training.resume_from_checkpoint, Path(config.output_dir), read=True)
    warnings = () if choice.warning is None else (choice.warning,)
    checkpoint = choice.checkpoint
    if checkpoint is None:
        return Resumption(None, (*warnings, *check_start(config, prepared.data.origin)))
    state, then = read_state(checkpoint), recorded_identity(checkpoint)
    notes = []
    if then is not None:
        now = run_identity(config, prepared, world_size, precision)
        refused, note = compare(then, now, checkpoint, training.resume_changes)
        if refused:
            raise UserErrors(refused)
        notes += [note] if note else []
    else:
        notes.append(f"{checkpoint.name} has no record of its run: model, data and settings were not compared")
    if training.max_steps is not None and int(state["step"]) >= training.max_steps:
        notes.append(describe_finished(int(state["step"]), training.max_steps))
    return Resumption(checkpoint, warnings, tuple(notes))


def describe_finished(step: int, total_steps: int) -> str:
    """Return the note for a run that has already done all of its steps."""
    return (
        f"the checkpoint is of step {step}, and training.max_steps or epochs amount to {total_steps} steps: "
        "nothing is left to train; raise them to continue"
    )


def compare(then: Identity, now: Identity, checkpoint: Path, allowed: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Return a line for each refused difference, and one line for all others (None if there are none)."""
    refused, changed = [], []
    for found in differences(then, now, checkpoint.name):
        if found.fixed:
            weights = "base_model" if then.settings.get("adapter") == "none" else "lora.adapter_path"
            refused.append(
                f"{found.problem}, and its optimizer state fits nothing else; set it back, or start a new run with "
                f"{weights}: {checkpoint}"
            )
        elif found.group is None or found.group in allowed:
            changed.append(found.change)
        else:
            fix = f"set it back, or allow the change with training.resume_changes: [{found.group}]"
            refused.append(f"{found.problem}; {fix}")
    return refused, f"changed since {checkpoint.name}: {', '.join(changed)}" if changed else None
