"""Define JSON records shared by launcher and trainer: metrics.jsonl, sweep.json and `zerolora doctor`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.errors import UserError
from trainer.config.files import UnreadableFileError, parse_json, read_json
from trainer.contract.whole_files import write_json

MAX_METRICS_BYTES = 1 << 34
Record = dict[str, int | float | None]
_Integer = Annotated[int, Field(strict=True, gt=-(2**63), lt=2**63)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-1e300, lt=1e300)]
_Schema = dict[str, _Number | _Integer | None]

SWEEP_RECORD_FILE = "sweep.json"

RESULT_PREFIX = "zerolora-doctor: "
"""Prefix of the line of JSON with the results of a `zerolora doctor` subprocess."""
CheckState = Literal["OK", "WARN", "FAIL"]


def parse_record(line: bytes, path: Path) -> Record:
    """Parse a line of metrics.jsonl into the metrics of a step. Raises UnreadableFileError for an invalid line."""
    record: Record = parse_json(line, path, _Schema)
    step = record.get("step")
    if step is None or step < 0:
        raise UnreadableFileError(path, "has a record with a missing or negative step")
    return record


@dataclass(frozen=True)
class SweptRun:
    folder: str
    digest: str = ""
    """Digest of the run's configuration."""
    exit_code: int | None = None
    settings: list[str] = field(default_factory=list)


def read_sweep(folder: Path) -> list[SweptRun]:
    """Return the runs recorded in a sweep's folder. Raises UserError if the record is damaged."""
    try:
        return read_json(folder / SWEEP_RECORD_FILE, dict[str, list[SweptRun]]).get("runs", [])
    except FileNotFoundError:
        return []
    except UnreadableFileError as error:
        raise UserError(f"{error.path}: {error.problem}; remove it") from None


def update_sweep(folder: Path, runs: Sequence[SweptRun]) -> None:
    """Add runs to the sweep's record, replacing entries for the same folders."""
    folders = {run.folder for run in runs}
    others = [run for run in read_sweep(folder) if run.folder not in folders]
    write_json(folder / SWEEP_RECORD_FILE, {"runs": [asdict(run) for run in (*others, *runs)]})


@dataclass(frozen=True)
class CheckResult:
    """A row in the table that `zerolora doctor` prints."""

    name: str
    state: CheckState
    found: str
    fix: str = ""
    host: str = ""
