"""The note by which a rank that ran out of memory asks the launcher to start the run again with a smaller micro-batch.

Ranks and launcher share nothing but the run's folder, and the launcher does not import torch. From which checkpoint
the run goes on is the launcher's to see (launcher/supervision/restarts.py).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.contract.whole_files import write_json

MOST_HALVINGS = 3
_FILE = "out_of_memory.json"


@dataclass(frozen=True)
class RestartNote:
    """The step that did not fit, and what to run it with."""

    step: int
    batch_size: int
    gradient_accumulation_steps: int
    stage: int
    larger: tuple[tuple[int, int], ...] = ()
    """Micro-batch and accumulation before each halving that holds, first to last: to where the run may grow again."""
    grown: tuple[int, ...] = ()
    """Micro-batches that the run has grown to before."""

    def write(self, logs: Path) -> None:
        """Leave the note; ranks that fail together write the same."""
        logs.mkdir(parents=True, exist_ok=True)
        write_json(logs / _FILE, asdict(self))

    @staticmethod
    def is_left(logs: Path) -> bool:
        """True if a rank has left a note since the last `take`."""
        return (logs / _FILE).exists()

    @classmethod
    def take(cls, logs: Path) -> "RestartNote | None":
        """Read the note and remove it; None if there is none, or the folder cannot be read."""
        try:
            note = cls.of(json.loads((logs / _FILE).read_text()))
        except OSError:
            return None
        (logs / _FILE).unlink()
        return note

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "RestartNote":
        """From what `asdict` and JSON have made of one."""
        larger = tuple((size, accumulation) for size, accumulation in entry["larger"])
        return cls(**entry | {"larger": larger, "grown": tuple(entry["grown"])})

    def settings(self) -> dict[str, str]:
        """What to start again with, by the names of the settings."""
        return {
            "training.batch_size": str(self.batch_size),
            "training.gradient_accumulation_steps": str(self.gradient_accumulation_steps),
            "training.global_batch_size": "null",  # the two above are it
            "zero.stage": str(self.stage),
        }
