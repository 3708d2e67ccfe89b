"""Read the records of a run, and find the settings that differ from their defaults.

All readers raise a UserError that names the file if it is invalid.
"""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.config import RunConfig, UserError
from trainer.config.errors import sanitize
from trainer.config.files import Seconds, UnreadableFileError, read_json
from trainer.config.yaml_core import dump
from trainer.contract.json_records import Record
from trainer.contract.whole_files import write_json
from trainer.data.image_parts import THUMBNAIL_START


class RunRecord(BaseModel):
    started: str
    command: list[str]
    world_size: int
    device: str
    device_name: str
    precision: str | None = None
    """Precision, with `auto` resolved."""
    python: str
    packages: dict[str, str]
    commit: str | None


Example = tuple[str, list[tuple[float, str]]]
"""A training example: its heading, and its parts with their weights in the loss."""
TIMES, EXAMPLES = "time_by_phase.json", "examples.json"
HEAD, TAIL = 600, 300
"""Number of characters kept at each end of a long part of an example."""
WARNING, LOG_HEADER = "warning: ", re.compile(r"== (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  rank 0  ")


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings of training_config.json, or an empty dict if the file does not exist."""
    config: RunConfig | None = _read_if_exists(run_dir / "training_config.json", RunConfig)
    return config.model_dump(mode="json") if config else {}


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return the content of run.json, or an empty dict if the file does not exist."""
    record: RunRecord | None = _read_if_exists(run_dir / "run.json", RunRecord)
    return record.model_dump() if record else {}


def read_answers(path: Path) -> dict[str, dict[str, str]]:
    """Return {prompt: {"before" or "after": answer}}, or an empty dict if the file does not exist."""
    return _read_if_exists(path, dict[str, dict[str, str]]) or {}


def read_times(run_dir: Path) -> dict[str, float]:
    """Return the seconds that rank 0 spent in each phase, or an empty dict if the file does not exist."""
    return _read_if_exists(run_dir / TIMES, dict[str, Seconds]) or {}


def record_times(run_dir: Path, seconds: Mapping[str, float], *, resumes: bool) -> None:
    """Record the seconds spent in each phase, including those from earlier attempts if the run resumes."""
    before = read_times(run_dir) if resumes else {}
    names = list(dict.fromkeys([*before, *seconds]))
    write_json(run_dir / TIMES, {name: round(before.get(name, 0.0) + seconds.get(name, 0.0), 3) for name in names})


def record_examples(run_dir: Path, examples: Sequence[Example]) -> None:
    shortened = [(name, [(weight, _shorten(text)) for weight, text in parts]) for name, parts in examples]
    write_json(run_dir / EXAMPLES, shortened)


def read_examples(run_dir: Path) -> list[Example]:
    return _read_if_exists(run_dir / EXAMPLES, list[Example]) or []


def read_warnings(run_dir: Path, records: list[Record]) -> list[str]:
    """Return the distinct warnings in rank 0's log, except those from earlier runs in the folder."""
    warnings: list[str] = []
    first = min((record.get("time") or math.inf for record in records), default=0.0)
    log = run_dir / "logs" / "rank-0.log"
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else ():
        header = LOG_HEADER.match(line)
        if header and time.mktime(time.strptime(header[1], "%Y-%m-%d %H:%M:%S")) <= first:
            warnings = []  # from an earlier run in the folder
        if line.startswith(WARNING):
            warnings.append(sanitize(line.removeprefix(WARNING)))
    return list(dict.fromkeys(warnings))


def _shorten(text: str) -> str:
    is_short = len(text) <= HEAD + TAIL or text.startswith(THUMBNAIL_START)
    return text if is_short else f"{text[:HEAD]} … {text[-TAIL:]}"


def _read_if_exists(path: Path, type_: Any) -> Any:
    try:
        return read_json(path, type_)
    except FileNotFoundError:
        return None  # a report needs only the metrics
    except UnreadableFileError as error:
        raise UserError(f"{path}: {error.problem}; restore the original file, or remove it") from None


# Settings that do not change the result; `logging.progress` is replaced in runs with several adapters.
HIDDEN_SETTINGS = ("dataset.cache_dir", "logging.progress")


def list_changed_settings(config: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], str]:
    """Return (name, value, default) for each changed setting, and all non-null settings as YAML."""
    if not config:
        return [], ""
    values, defaults = flatten(config), _collect_defaults(config)
    changed = [
        (name, format_value(_prepare_for_display(value)), format_value(defaults.get(name, "required")))
        for name, value in values.items()
        if value != defaults.get(name) and name not in HIDDEN_SETTINGS
    ]
    return changed, dump(_prepare_for_display(dict(config)))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return flat


def shorten_cache_path(name: str) -> str:
    """Return the Hub ID for a path in the Hub's cache; strip zerolora's cache folder from other paths."""
    cached = re.search(r"(?:models|datasets)--([^/]+?)--([^/]+)", name)
    return f"{cached[1]}/{cached[2]}" if cached else name.rpartition("/.cache/zerolora/")[2]


def format_value(value: Any) -> str:
    """Format a value as on the command line; null becomes `none`."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _prepare_for_display(value: Any) -> Any:
    if isinstance(value, list):
        return [_prepare_for_display(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _prepare_for_display(entry) for name, entry in value.items() if entry is not None}
    return shorten_cache_path(value) if isinstance(value, str) else value


def _collect_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    # The SCU's law and measure determine some other defaults.
    scu = {name: config["scu"][name] for name in ("law", "measure") if name in config.get("scu", {})}
    data = {"path": "x"} | ({"evaluation": {"path": "x"}} if config.get("dataset", {}).get("evaluation") else {})
    minimal = {"base_model": "", "output_dir": "", "dataset": data, "scu": scu}
    defaults = flatten(RunConfig.model_validate(minimal).model_dump(mode="json"))
    required = ("base_model", "output_dir", "dataset.path", "dataset.evaluation.path")
    return {name: value for name, value in defaults.items() if name not in required}
