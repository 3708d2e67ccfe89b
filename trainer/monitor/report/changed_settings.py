"""The settings of a run that differ from their defaults."""

import json
from collections.abc import Mapping
from typing import Any

from trainer.config import RunConfig
from trainer.config.yaml_core import dump
from trainer.monitor.report.page import Changed, Settings


def settings_of(config: Mapping[str, Any]) -> Settings | None:
    """Return the settings for the report, given training_config.json (`auto` resolved); None if it is empty."""
    if not config:
        return None
    given, defaults = flat(config), _defaults(config)
    changed = [
        Changed(name, as_text(value), as_text(defaults[name]) if name in defaults else "no default")
        for name, value in given.items()
        if name not in defaults or value != defaults[name]
    ]
    return Settings(changed, dump(dict(config)))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into {dotted name: value}."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return found


def as_text(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    # The SCU's law and measure determine some of the other defaults.
    scu = {name: config["scu"][name] for name in ("law", "measure") if name in config.get("scu", {})}
    least = {"base_model": "", "output_dir": "", "dataset": {"path": "x"}, "scu": scu}
    defaults = flat(RunConfig.model_validate(least).model_dump(mode="json"))
    return {name: value for name, value in defaults.items() if name not in ("base_model", "output_dir", "dataset.path")}
