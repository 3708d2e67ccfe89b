"""Write the figures of docs/lab/data into README and guides: `python -m scripts.figures`."""

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.commands.estimate import build_planner
from trainer.config import load_config

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "lab" / "data"
NUMBER = r"\d[\d,.]*(?<=\d)"


def read_columns() -> dict[str, Any]:
    """Return docs/lab/data/figures.yaml."""
    found: dict[str, Any] = yaml.safe_load((DATA / "figures.yaml").read_text())
    return found


def measured_values() -> dict[str, str]:
    """Return the measured figures by name, and those that follow from them and from other records."""
    values: dict[str, str] = {}
    for page in read_columns()["measured"].values():
        values |= page
    values["ratio"] = f"{_number(values['bf16']) / _number(values['bf16_unsloth']):.2f}"
    values["demo_minutes"] = f"{_number(values['demo_seconds']) / 60:.0f}"
    rows = [row for run in json.loads((DATA / "memory_h200.json").read_text()) for row in run["rows"]]
    values["runs"] = str(len(rows))
    families = yaml.safe_load((DATA / "families.yaml").read_text())["families"]
    values["families"] = str(sum(cells["lora"].startswith("equal") for cells in families.values()))
    records = map(json.loads, (DATA / "faults" / "results.jsonl").read_text().splitlines())
    values["faults"] = str(len({(record["place"], record["fault"], record["phase"]) for record in records}))
    return values


def estimated_values() -> dict[str, str]:
    """Return the GiB that models need by name, which takes a minute."""
    values = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        training = {"batch_size": 1, "gradient_checkpointing": True, "precision": "bf16"}
        data = {"path": "unread.jsonl", "max_length": 2048}
        settings = {"output_dir": "run", "lora": {"r": 16}, "dataset": data, "training": training}
        for name, (shape, adapter) in read_columns()["fits"].items():
            file.write_text(yaml.safe_dump({**settings, "base_model": f"random:{shape}", "adapter": adapter}))
            config = load_config(file).config
            needed = build_planner(config, 1)[0].estimate(config).needed
            values[name] = f"{needed / 2**30:.1f}"
    return values


def quote(text: str, template: str, values: Mapping[str, str]) -> str:
    """Return a page with the figures of the one place that reads like the template; those without a value stay.

    Raises ValueError unless the page has exactly one such place.
    """
    parts = re.split(r"\{(\w+)\}", template)
    literals = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts[::2]]
    pattern = "(" + f")({NUMBER})(".join(literals) + ")"
    places = list(re.finditer(pattern, text))
    if len(places) != 1:
        raise ValueError(f"{len(places)} places read like: {template}")
    (place,) = places
    groups = list(place.groups())
    for at, name in enumerate(parts[1::2]):
        groups[2 * at + 1] = values.get(name, groups[2 * at + 1])
    return text[: place.start()] + "".join(groups) + text[place.end() :]


def quoted(page: str, values: Mapping[str, str]) -> str:
    """Return a page with all its figures."""
    text = (ROOT / page).read_text()
    for template in read_columns()["quotes"][page]:
        text = quote(text, template, values)
    return text


def main() -> int:
    """Write the pages."""
    values = measured_values() | estimated_values()
    for page in read_columns()["quotes"]:
        (ROOT / page).write_text(quoted(page, values))
    return 0


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    sys.exit(main())
