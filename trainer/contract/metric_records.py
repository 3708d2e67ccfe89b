"""Parse the lines of metrics.jsonl for a run's report and `zerolora status`."""

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
    """Return the numbers of a step; raises UnreadableFile for an invalid line."""
    record: Record = parse_json(line, path, _Shape)
    if record.get("step") is None:
        raise UnreadableFile(path, "has a record without a step")
    return record
