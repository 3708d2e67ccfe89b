"""Published shapes of models, for `base_model: random:SHAPE`: the real architecture with random weights.

They are in published_shapes.yaml. `random:SHAPE,key=value,...` overrides settings of the configuration:
`random:llama3.1-8b,num_hidden_layers=4`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.yaml_core import plain, read_yaml

PREFIX = "random:"
SHAPES_FILE = Path(__file__).with_suffix(".yaml")


@cache
def load_shapes() -> dict[str, dict[str, Any]]:
    """Return the settings of all shapes by name."""
    return read_yaml(SHAPES_FILE).tree


def is_random(base_model: str) -> bool:
    """Return whether the name has the form `random:SHAPE`."""
    return base_model.startswith(PREFIX)


def parse_shape_settings(base_model: str) -> dict[str, Any]:
    """Return the configuration settings of `random:SHAPE[,key=value...]`. Raises UserError for an unknown shape."""
    name, changes = parse_name(base_model)
    if name not in load_shapes():
        raise UserError(f"base_model={base_model}: unknown shape; use one of {', '.join(load_shapes())}")
    return load_shapes()[name] | changes


def parse_name(base_model: str) -> tuple[str, dict[str, Any]]:
    """Return SHAPE and the changed settings of `random:SHAPE[,key=value...]`. Raises UserError for another form."""
    name, *changes = base_model.removeprefix(PREFIX).split(",")
    settings: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise UserError(f"base_model={base_model}: {change!r} is not key=value, such as num_hidden_layers=4")
        settings[key.strip()] = plain(value)
    return name, settings


def find_shape(base_model: str) -> str | None:
    """Return the shape that a model's name begins with, ignoring case and punctuation, or None."""
    if is_random(base_model):
        return base_model.removeprefix(PREFIX)
    name = _letters(base_model.rstrip("/").rpartition("/")[2])
    return next((shape for shape in load_shapes() if shape != "tiny" and name.startswith(_letters(shape))), None)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
