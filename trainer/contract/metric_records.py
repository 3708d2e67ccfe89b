"""One line of metrics.jsonl: a step and its numbers, as a run's report and `zerolora status` read it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainer.config.files import UnreadableFile, parse_json

MOST_METRICS_BYTES = 1 << 34
Record = dict[str, int | float | None]
_Whole = Annotated[int, Field(strict=True, gt=-(2**63), lt=2**63)]
_Number = Annotated[float, Field(strict=True, gt=-1e300, lt=1e300)]
_Shape = dict[str, _Whole | _Number | None]


def parse_record(line: bytes, path: Path) -> Record:
    """Return the numbers of one step. Raises UnreadableFile for anything else."""
    record: Record = parse_json(line, path, _Shape)
    if record.get("step") is None:
        raise UnreadableFile(path, "has a record without a step")
    return record
