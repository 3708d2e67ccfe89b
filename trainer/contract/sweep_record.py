"""The record of a sweep's runs, OUTPUT_DIR/sweep.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainer.config.errors import UserError
from trainer.config.files import UnreadableFile, read_json
from trainer.contract.whole_files import write_json

RECORD = "sweep.json"


@dataclass(frozen=True)
class SweptRun:
    """The run of a combination of values."""

    folder: str
    digest: str = ""
    """Digest of its configuration."""
    exit_code: int | None = None
    settings: list[str] = field(default_factory=list)


def read_sweep(folder: Path) -> list[SweptRun]:
    """Return the recorded runs of a folder; raises UserError if the record is damaged."""
    try:
        runs: list[SweptRun] = read_json(folder / RECORD, dict[str, list[SweptRun]]).get("runs", [])
    except FileNotFoundError:
        return []
    except UnreadableFile as error:
        raise UserError(f"{error.path}: {error.problem}; remove it") from None
    return runs


def write_sweep(folder: Path, runs: Sequence[SweptRun]) -> None:
    """Add or replace these runs in the record; other runs are kept."""
    ours = {run.folder for run in runs}
    others = [run for run in read_sweep(folder) if run.folder not in ours]
    write_json(folder / RECORD, {"runs": [asdict(run) for run in (*others, *runs)]})
