"""Starts a run again whose ranks ran out of GPU memory at ZeRO stage 2 or 3, with half the micro-batch.

At stages 0 and 1 the ranks see to it themselves (trainer/memory/oom_recovery.py); at 2 and 3 the one that failed leaves
a note and ends, since the others wait in a collective for it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.supervision.terminal import say
from trainer.contract.restart_note import EXIT_RESTART, MOST_HALVINGS, RestartNote

EXIT_FAILED = 1


def run_with_halvings(start: Callable[[Sequence[str]], int], logs: Path) -> int:
    """`start(overrides)` until it ends otherwise than by a note, at most MOST_HALVINGS times more; the exit code."""
    RestartNote.take(logs)  # of a run that had no launcher to read it
    overrides: list[str] = []
    for _ in range(MOST_HALVINGS):
        code = start(overrides)
        note = RestartNote.take(logs)
        if code != EXIT_RESTART or note is None:
            return EXIT_FAILED if code == EXIT_RESTART else code
        overrides = note.overrides()
        say(
            f"out of memory in step {note.step}: going on from {note.checkpoint or 'the start'} with "
            f"batch_size {note.batch_size}, accumulation {note.gradient_accumulation_steps}"
        )
    code = start(overrides)
    note = RestartNote.take(logs)
    if note is not None:
        say(
            f"out of memory in step {note.step} after {MOST_HALVINGS} halvings; use "
            "training.gradient_checkpointing=true, a shorter dataset.max_length or adapter=qlora"
        )
    return EXIT_FAILED if code == EXIT_RESTART else code
