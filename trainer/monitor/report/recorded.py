"""Readers of the files that a run has recorded about itself, and its settings that differ from their defaults.

Each reader raises a UserError that names an invalid file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.config import RunConfig, UserError
from trainer.config.files import Seconds, UnreadableFile, read_json
from trainer.config.yaml_core import dump
from trainer.contract.whole_files import write_json
from trainer.monitor.report.page import Changed, Settings


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


def record_times(run_dir: Path, seconds: Mapping[str, float], *, resumes: bool) -> None:
    """Record the seconds of each phase, added to those of earlier starts if the run resumes."""
    before = read_times(run_dir) if resumes else {}
    names = list(dict.fromkeys([*before, *seconds]))
    write_json(run_dir / TIMES, {name: round(before.get(name, 0.0) + seconds.get(name, 0.0), 3) for name in names})


def _read(path: Path, shape: Any) -> Any:
    try:
        return read_json(path, shape)
    except FileNotFoundError:
        return None  # a report needs only the metrics
    except UnreadableFile as error:
        raise UserError(f"{path}: {error.problem}; restore the file that the run wrote, or delete it") from None


def changed_settings(config: Mapping[str, Any]) -> Settings | None:
    """Return the settings for the report, given training_config.json (`auto` resolved); None if it is empty."""
    if not config:
        return None
    given, defaults = flatten(config), _defaults(config)
    changed = [
        Changed(name, format_value(value), format_value(defaults[name]) if name in defaults else "no default")
        for name, value in given.items()
        if name not in defaults or value != defaults[name]
    ]
    return Settings(changed, dump(dict(config)))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into {dotted name: value}."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return found


def format_value(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    # The SCU's law and measure determine some of the other defaults.
    scu = {name: config["scu"][name] for name in ("law", "measure") if name in config.get("scu", {})}
    least = {"base_model": "", "output_dir": "", "dataset": {"path": "x"}, "scu": scu}
    defaults = flatten(RunConfig.model_validate(least).model_dump(mode="json"))
    return {name: value for name, value in defaults.items() if name not in ("base_model", "output_dir", "dataset.path")}
