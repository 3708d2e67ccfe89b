"""The launcher's record of restarts, OUTPUT_DIR/logs/restarts.json."""

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
    """A restart: why the ranks had stopped, and where they resumed."""

    time: float
    """Seconds since 1970."""
    reason: str
    """As printed: "rank 1 on gpu-a was killed by signal 9 (SIGKILL) (step 41, phase backward)"."""
    step: Count
    """The last step that was started; 0 before the first."""
    checkpoint: str
    """Name of its folder; empty for a start from scratch."""
    ranks: int
    """Number of ranks that were started."""
    note: RestartNote | None = None
    """The note of a rank that ran out of memory."""


def read_restarts(run_dir: Path) -> list[Restart]:
    """Return all restarts of a run in order; none if the record cannot be read."""
    restarts: list[Restart] = find_json(run_dir / "logs" / _FILE, list[Restart], [])
    return restarts


def last_note(run_dir: Path) -> RestartNote | None:
    """Return the note of the last restart with a smaller micro-batch, or None."""
    notes = [restart.note for restart in read_restarts(run_dir) if restart.note]
    return notes[-1] if notes else None


def note_restart(run_dir: Path, restart: Restart) -> None:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "logs" / _FILE, [asdict(entry) for entry in (*read_restarts(run_dir), restart)])


def forget_restarts(run_dir: Path) -> None:
    """Delete the record, for a run that starts from scratch."""
    (run_dir / "logs" / _FILE).unlink(missing_ok=True)


def complete_checkpoints(run_dir: Path) -> dict[str, int]:
    """Return the complete checkpoints in the folder with their times in nanoseconds."""
    markers = run_dir.glob("checkpoint-*/COMPLETE")
    named = {marker.parent.name: marker for marker in markers if _NUMBERED.fullmatch(marker.parent.name)}
    return {name: marker.stat().st_mtime_ns for name, marker in named.items()}


def newest_checkpoint(names: Iterable[str]) -> str:
    """Return the checkpoint with the highest step, or an empty string."""
    return max(names, key=lambda name: int(name.rpartition("-")[2]), default="")
