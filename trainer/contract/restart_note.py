"""The note of a rank that ran out of memory, which asks the launcher for a restart with a smaller micro-batch.

The launcher chooses the checkpoint to resume from (launcher/supervision/restarts.py).
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.files import Count, read_json
from trainer.contract.whole_files import write_json

MOST_HALVINGS = 3
_FILE = "out_of_memory.json"


@dataclass(frozen=True)
class RestartNote:
    """The step that did not fit, and the settings to restart with."""

    step: Count
    batch_size: Count
    gradient_accumulation_steps: Count
    stage: Count
    larger: tuple[tuple[int, int], ...] = ()
    """Micro-batch and accumulation before each current halving, first to last, to which the run may return."""
    grown: tuple[int, ...] = ()
    """Micro-batches that the run has returned to before."""

    def write(self, logs: Path) -> None:
        """Write the note; ranks that fail together write the same."""
        logs.mkdir(parents=True, exist_ok=True)
        write_json(logs / _FILE, asdict(self))

    @staticmethod
    def exists(logs: Path) -> bool:
        """Return whether a rank has written a note since the last `take`."""
        return (logs / _FILE).exists()

    @classmethod
    def take(cls, logs: Path) -> "RestartNote | None":
        """Read and remove the note; None if there is none. Raises UnreadableFile."""
        try:
            note: RestartNote = read_json(logs / _FILE, cls)
        except FileNotFoundError:
            return None
        (logs / _FILE).unlink()
        return note

    def settings(self) -> dict[str, str]:
        """Return the settings to restart with."""
        return {
            "training.batch_size": str(self.batch_size),
            "training.gradient_accumulation_steps": str(self.gradient_accumulation_steps),
            "training.global_batch_size": "null",  # follows from the two above
            "zero.stage": str(self.stage),
        }
