"""What a report reads of a run's own records: each file in the shape it was written in, or a line that names it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from trainer.config import RunConfig, UserError
from trainer.contract.whole_files import write_json


class RunRecord(BaseModel):
    """Of run.json what the page shows."""

    started: str
    command: list[str]
    world_size: int
    device: str
    device_name: str
    precision: str | None = None
    """What `auto` came to; older versions did not write it."""
    python: str
    packages: dict[str, str]
    commit: str | None


_SETTINGS = TypeAdapter(RunConfig)
_RECORD = TypeAdapter(RunRecord)
_ANSWERS = TypeAdapter(dict[str, dict[str, str]])
_TIMES = TypeAdapter(dict[str, float])
TIMES = "time_by_phase.json"


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Every setting of training_config.json; nothing if there is no such file. Raises UserError."""
    config: RunConfig | None = _read(run_dir / "training_config.json", _SETTINGS)
    return config.model_dump(mode="json") if config else {}


def read_run(run_dir: Path) -> dict[str, Any]:
    """What run.json says the run ran on; nothing if there is no such file. Raises UserError."""
    record: RunRecord | None = _read(run_dir / "run.json", _RECORD)
    return record.model_dump() if record else {}


def read_answers(path: Path) -> dict[str, dict[str, str]]:
    """Prompt -> before, after -> answer; nothing if there is no such file. Raises UserError."""
    return _read(path, _ANSWERS) or {}


def read_times(run_dir: Path) -> dict[str, float]:
    """Phase -> seconds of rank 0; nothing if there is no such file. Raises UserError."""
    return _read(run_dir / TIMES, _TIMES) or {}


def keep_times(run_dir: Path, seconds: Mapping[str, float], *, goes_on: bool) -> None:
    """Note the seconds of each phase; those of the starts before are added where the run `goes_on`."""
    before = read_times(run_dir) if goes_on else {}
    names = list(dict.fromkeys([*before, *seconds]))
    write_json(run_dir / TIMES, {name: round(before.get(name, 0.0) + seconds.get(name, 0.0), 3) for name in names})


def _read(path: Path, shape: TypeAdapter[Any]) -> Any:
    if not path.is_file():
        return None  # the metrics alone make a report
    try:
        return shape.validate_json(path.read_bytes())
    except OSError as error:
        reason = error.strerror
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
    raise UserError(f"{path}: cannot be read ({reason}); put back what the run wrote, or remove it")
