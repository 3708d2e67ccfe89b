"""What a report reads of a run's own records: each file in the shape it was written in, or a line that names it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.config import RunConfig, UserError
from trainer.config.files import Seconds, UnreadableFile, read_json
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


TIMES = "time_by_phase.json"


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Every setting of training_config.json; nothing if there is no such file. Raises UserError."""
    config: RunConfig | None = _read(run_dir / "training_config.json", RunConfig)
    return config.model_dump(mode="json") if config else {}


def read_run(run_dir: Path) -> dict[str, Any]:
    """What run.json says the run ran on; nothing if there is no such file. Raises UserError."""
    record: RunRecord | None = _read(run_dir / "run.json", RunRecord)
    return record.model_dump() if record else {}


def read_answers(path: Path) -> dict[str, dict[str, str]]:
    """Prompt -> before, after -> answer; nothing if there is no such file. Raises UserError."""
    return _read(path, dict[str, dict[str, str]]) or {}


def read_times(run_dir: Path) -> dict[str, float]:
    """Phase -> seconds of rank 0; nothing if there is no such file. Raises UserError."""
    return _read(run_dir / TIMES, dict[str, Seconds]) or {}


def keep_times(run_dir: Path, seconds: Mapping[str, float], *, goes_on: bool) -> None:
    """Note the seconds of each phase; those of the starts before are added where the run `goes_on`."""
    before = read_times(run_dir) if goes_on else {}
    names = list(dict.fromkeys([*before, *seconds]))
    write_json(run_dir / TIMES, {name: round(before.get(name, 0.0) + seconds.get(name, 0.0), 3) for name in names})


def _read(path: Path, shape: Any) -> Any:
    try:
        return read_json(path, shape)
    except FileNotFoundError:
        return None  # the metrics alone make a report
    except UnreadableFile as error:
        raise UserError(f"{path}: {error.problem}; put back what the run wrote, or remove it") from None
