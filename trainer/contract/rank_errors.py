"""Why ranks ended, in their own words: logs/error-N.json, written by rank N before it exits and read by the launcher.

A rank without such a file was killed, or failed before it knew the run's folder; its log then has a traceback, if any.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config import UserError
from trainer.config.files import Count, find_json
from trainer.contract.whole_files import write_json


class OtherRankFailed(Exception):
    """Base of errors that a rank raises because another one has failed."""


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank."""

    rank: Count
    text: str
    """Of a user error its message, of any other `type: message`."""
    is_user_error: bool = False
    """Whether the message says what to change: a restart would end the same way."""
    is_consequence: bool = False
    """Whether another rank has caused it."""

    @classmethod
    def of(cls, rank: int, error: Exception) -> "RankError":
        """Describe an exception."""
        is_mistake = isinstance(error, UserError)
        text = str(error) if is_mistake else f"{type(error).__name__}: {error}"
        return cls(rank, text, is_mistake, isinstance(error, OtherRankFailed))

    def write(self, logs: Path) -> None:
        """Write the file; a full disk or a lost folder is ignored, as the error is also in the log."""
        with suppress(OSError):
            write_json(logs / f"error-{self.rank}.json", asdict(self))


def read_errors(logs: Path) -> dict[int, RankError]:
    """Return the errors of all ranks that have written one, except damaged files."""
    found: list[RankError | None] = [find_json(path, RankError) for path in logs.glob("error-*.json")]
    return {error.rank: error for error in found if error is not None}
