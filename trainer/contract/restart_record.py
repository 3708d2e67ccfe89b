"""What the launcher notes of each start of the ranks that it has made again: OUTPUT_DIR/logs/restarts.json."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.files import Count, find_json
from trainer.contract.restart_note import RestartNote
from trainer.contract.whole_files import write_json

_FILE = "restarts.json"
_NUMBERED = re.compile(r"checkpoint-[0-9]{1,18}")


@dataclass(frozen=True)
class Restart:
    """One restart: what had ended the ranks, and from where they went on."""

    time: float
    """Seconds since 1970."""
    reason: str
    """As it was told, "rank 1 on gpu-a was killed by signal 9 (SIGKILL) (step 41, phase backward)"."""
    step: Count
    """The furthest step that was under way; 0 before the first."""
    checkpoint: str
    """Its folder's name; empty for the start."""
    ranks: int
    """How many were started."""
    note: RestartNote | None = None
    """Of a rank that ran out of memory."""


def read_restarts(run_dir: Path) -> list[Restart]:
    """Return all restarts of a run, in order; a record that cannot be read counts as none."""
    restarts: list[Restart] = find_json(run_dir / "logs" / _FILE, list[Restart], [])
    return restarts


def last_note(run_dir: Path) -> RestartNote | None:
    """Return what the last start with a smaller micro-batch was made by; None if there was none."""
    notes = [restart.note for restart in read_restarts(run_dir) if restart.note]
    return notes[-1] if notes else None


def note_restart(run_dir: Path, restart: Restart) -> None:
    """Add a restart."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "logs" / _FILE, [asdict(entry) for entry in (*read_restarts(run_dir), restart)])


def forget_restarts(run_dir: Path) -> None:
    """A run that starts over has had none."""
    (run_dir / "logs" / _FILE).unlink(missing_ok=True)


def whole_checkpoints(run_dir: Path) -> dict[str, int]:
    """Return the whole checkpoints in the folder, and when each was written."""
    markers = run_dir.glob("checkpoint-*/COMPLETE")
    named = {marker.parent.name: marker for marker in markers if _NUMBERED.fullmatch(marker.parent.name)}
    return {name: marker.stat().st_mtime_ns for name, marker in named.items()}


def newest_checkpoint(names: Iterable[str]) -> str:
    """Return the checkpoint of the highest step; empty if there is none."""
    return max(names, key=lambda name: int(name.rpartition("-")[2]), default="")
