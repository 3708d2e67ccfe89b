"""Records in a run's logs folder: restart notes, changes to adapters, and past restarts.

A rank that runs out of memory writes a restart note, which requests a restart with a smaller micro-batch.
The launcher chooses the checkpoint to resume from (launcher/supervision/restarts.py).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.files import Count, read_json, read_json_or_default
from trainer.contract.json_records import SWEEP_RECORD_FILE
from trainer.contract.whole_files import write_json

MAX_HALVINGS = 3
_NOTE_FILE = "out_of_memory.json"
_RESTARTS_FILE = "restarts.json"
_CHANGES_FILE = "adapters.json"
_CHECKPOINT_NAME = re.compile(r"checkpoint-[0-9]{1,18}")


@dataclass(frozen=True)
class RestartNote:
    """The step that ran out of memory, and the settings for the restart."""

    step: Count
    batch_size: Count
    gradient_accumulation_steps: Count
    stage: Count

    def write(self, logs: Path) -> None:
        """Write the note; ranks that fail in the same step write the same content."""
        logs.mkdir(parents=True, exist_ok=True)
        write_json(logs / _NOTE_FILE, asdict(self))

    @staticmethod
    def exists(logs: Path) -> bool:
        """Return whether a rank has written a note since the last `take`."""
        return (logs / _NOTE_FILE).exists()

    @classmethod
    def take(cls, logs: Path) -> "RestartNote | None":
        """Read and remove the note; return None if it does not exist. Raises UnreadableFileError if it is damaged."""
        try:
            note: RestartNote = read_json(logs / _NOTE_FILE, cls)
        except FileNotFoundError:
            return None
        (logs / _NOTE_FILE).unlink()
        return note

    def format_overrides(self) -> dict[str, str]:
        return {
            "training.batch_size": str(self.batch_size),
            "training.gradient_accumulation_steps": str(self.gradient_accumulation_steps),
            "training.global_batch_size": "null",  # follows from the two values above
            "zero.stage": str(self.stage),
        }


@dataclass(frozen=True)
class Restart:
    time: float
    """Seconds since 1970."""
    reason: str
    """As printed: "rank 1 on gpu-a was killed by signal 9 (SIGKILL) (step 41, phase backward)"."""
    step: Count
    """The last step that was started; 0 before the first."""
    checkpoint: str
    """Name of the checkpoint's folder; empty for a start from scratch."""
    ranks: int
    """Number of ranks that were started."""


@dataclass(frozen=True)
class AdapterChanges:
    """The arguments and folder of `zerolora train`, and the changes made with `zerolora adapters`."""

    arguments: list[str]
    working_directory: str
    added: list[dict[str, Any]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    @staticmethod
    def read(run_dir: Path) -> "AdapterChanges | None":
        return read_json_or_default(run_dir / "logs" / _CHANGES_FILE, AdapterChanges)

    def write(self, run_dir: Path) -> None:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_json(run_dir / "logs" / _CHANGES_FILE, asdict(self))


def apply_recorded_changes(run_dir: Path, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Apply the changes recorded by `zerolora adapters`. Keeps the order if `entries` already has them."""
    changes = AdapterChanges.read(run_dir) if entries else None
    if changes is None:
        return list(entries)
    kept = {entry["name"]: entry for entry in entries if entry["name"] not in changes.removed}
    changed = kept | {entry["name"]: entry for entry in changes.added if entry["name"] not in kept}
    return list(entries) if changed == {entry["name"]: entry for entry in entries} else list(changed.values())


def read_restarts(run_dir: Path) -> list[Restart]:
    return read_json_or_default(run_dir / "logs" / _RESTARTS_FILE, list[Restart], [])


def record_restart(run_dir: Path, restart: Restart) -> None:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "logs" / _RESTARTS_FILE, [asdict(entry) for entry in (*read_restarts(run_dir), restart)])


def delete_restarts(run_dir: Path) -> None:
    (run_dir / "logs" / _RESTARTS_FILE).unlink(missing_ok=True)


def list_complete_checkpoints(run_dir: Path) -> dict[str, int]:
    """Return the modification time (ns) of each complete checkpoint of the run, or of all its adapters, by name."""
    has_adapters = (run_dir / SWEEP_RECORD_FILE).is_file() and not (run_dir / "run.json").is_file()
    markers = run_dir.glob(f"{'*/' * has_adapters}checkpoint-*/COMPLETE")
    numbered = [marker for marker in markers if _CHECKPOINT_NAME.fullmatch(marker.parent.name)]
    return {marker.parent.relative_to(run_dir).as_posix(): marker.stat().st_mtime_ns for marker in numbered}


def find_newest_checkpoint(names: Iterable[str]) -> str:
    """Return the checkpoint with the highest step; an empty string if there is none."""
    return max(names, key=lambda name: int(name.rpartition("-")[2]), default="")
