"""What the launcher notes of each start of the ranks that it has made again: OUTPUT_DIR/logs/restarts.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.contract.restart_note import RestartNote
from trainer.contract.whole_files import write_json

_FILE = "restarts.json"


@dataclass(frozen=True)
class Restart:
    """One restart: what had ended the ranks, and from where they went on."""

    time: float
    """Seconds since 1970."""
    reason: str
    """As it was told, "rank 1 on gpu-a was killed by signal 9 (SIGKILL) (step 41, phase backward)"."""
    step: int
    """The furthest step that was under way; 0 before the first."""
    checkpoint: str
    """Its folder's name; empty for the start."""
    ranks: int
    """How many were started."""
    note: dict[str, Any] | None = None
    """Of a rank that ran out of memory, `RestartNote` as a dictionary."""


def read_restarts(run_dir: Path) -> list[Restart]:
    """All restarts of a run, in order."""
    try:
        return [Restart(**entry) for entry in json.loads((run_dir / "logs" / _FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def last_note(run_dir: Path) -> RestartNote | None:
    """What the last start with a smaller micro-batch was made by; None if there was none."""
    notes = [restart.note for restart in read_restarts(run_dir) if restart.note]
    return RestartNote.of(notes[-1]) if notes else None


def note_restart(run_dir: Path, restart: Restart) -> None:
    """Add a restart."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "logs" / _FILE, [asdict(entry) for entry in (*read_restarts(run_dir), restart)])


def forget_restarts(run_dir: Path) -> None:
    """A run that starts over has had none."""
    (run_dir / "logs" / _FILE).unlink(missing_ok=True)
