"""Readers of the files that a run has recorded about itself; each raises a UserError that names an invalid file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.config import RunConfig, UserError
from trainer.config.files import Seconds, UnreadableFile, read_json
from trainer.contract.whole_files import write_json


class RunRecord(BaseModel):
    """The fields of run.json that the page shows."""

    started: str
    command: list[str]
    world_size: int
    device: str
    device_name: str
    precision: str | None = None
    """The value that `auto` was resolved to."""
    python: str
    packages: dict[str, str]
    commit: str | None


TIMES = "time_by_phase.json"


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings of training_config.json, or an empty dict if the file does not exist."""
    config: RunConfig | None = _read(run_dir / "training_config.json", RunConfig)
    return config.model_dump(mode="json") if config else {}


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return the content of run.json, or an empty dict if the file does not exist."""
    record: RunRecord | None = _read(run_dir / "run.json", RunRecord)
    return record.model_dump() if record else {}


def read_answers(path: Path) -> dict[str, dict[str, str]]:
    """Return {prompt: {before or after: answer}}, or an empty dict if the file does not exist."""
    return _read(path, dict[str, dict[str, str]]) or {}


def read_times(run_dir: Path) -> dict[str, float]:
    """Return {phase: seconds of rank 0}, or an empty dict if the file does not exist."""
    return _read(run_dir / TIMES, dict[str, Seconds]) or {}


def keep_times(run_dir: Path, seconds: Mapping[str, float], *, goes_on: bool) -> None:
    """Record the seconds of each phase, added to those of earlier starts if the run `goes_on`."""
    before = read_times(run_dir) if goes_on else {}
    names = list(dict.fromkeys([*before, *seconds]))
    write_json(run_dir / TIMES, {name: round(before.get(name, 0.0) + seconds.get(name, 0.0), 3) for name in names})


def _read(path: Path, shape: Any) -> Any:
    try:
        return read_json(path, shape)
    except FileNotFoundError:
        return None  # a report needs only the metrics
    except UnreadableFile as error:
        raise UserError(f"{path}: {error.problem}; restore the file that the run wrote, or delete it") from None
