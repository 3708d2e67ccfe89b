"""The note by which a rank that ran out of memory asks the launcher to start the run again with a smaller micro-batch.

Ranks and launcher share nothing but the run's folder, and the launcher does not import torch. From which checkpoint
the run goes on is the launcher's to see (launcher/supervision/restarts.py).
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.files import Count, read_json
from trainer.contract.whole_files import write_json

MOST_HALVINGS = 3
_FILE = "out_of_memory.json"


@dataclass(frozen=True)
class RestartNote:
    """The step that did not fit, and what to run it with."""

    step: Count
    batch_size: Count
    gradient_accumulation_steps: Count
    stage: Count
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
        """Read the note and remove it; None if there is none. Raises UnreadableFile."""
        try:
            note: RestartNote = read_json(logs / _FILE, cls)
        except FileNotFoundError:
            return None
        (logs / _FILE).unlink()
        return note

    def settings(self) -> dict[str, str]:
        """What to start again with, by the names of the settings."""
        return {
            "training.batch_size": str(self.batch_size),
            "training.gradient_accumulation_steps": str(self.gradient_accumulation_steps),
            "training.global_batch_size": "null",  # the two above are it
            "zero.stage": str(self.stage),
        }
