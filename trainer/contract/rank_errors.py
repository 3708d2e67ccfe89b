"""Errors from ranks: rank N writes logs/error-N.json before it exits, and the launcher reads it.

A rank without this file was killed, or failed before it had read the configuration; its log may have a traceback.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config import UserError
from trainer.config.files import Count, read_json_or_default
from trainer.contract.whole_files import write_json


class OtherRankError(Exception):
    """Base class of errors that a rank raises because another rank has failed."""


@dataclass(frozen=True)
class RankErrorRecord:
    rank: Count
    text: str
    """The message of a user error; `type: message` for other errors."""
    is_user_error: bool = False
    """Whether the user must change something, so that a restart would fail in the same way."""
    is_consequence: bool = False
    """Whether another rank caused the error."""

    @classmethod
    def from_exception(cls, rank: int, error: Exception) -> "RankErrorRecord":
        is_user_error = isinstance(error, UserError)
        text = str(error) if is_user_error else f"{type(error).__name__}: {error}"
        return cls(rank, text, is_user_error, isinstance(error, OtherRankError))

    def write(self, logs: Path) -> None:
        """Write the file; ignore disk errors, because the log also contains the error."""
        with suppress(OSError):
            write_json(logs / f"error-{self.rank}.json", asdict(self))


def read_errors(logs: Path) -> dict[int, RankErrorRecord]:
    errors = (read_json_or_default(path, RankErrorRecord) for path in logs.glob("error-*.json"))
    return {error.rank: error for error in errors if error is not None}
