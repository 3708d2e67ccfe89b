"""Parse `base_model: random:SHAPE`, which selects a published architecture with random weights.

published_shapes.yaml lists the shapes. `random:SHAPE,key=value,...` overrides configuration settings, as in
`random:llama3.1-8b,num_hidden_layers=4`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.yaml_core import parse_scalar, read_yaml

PREFIX = "random:"
SHAPES_FILE = Path(__file__).with_suffix(".yaml")


@cache
def load_shapes() -> dict[str, dict[str, Any]]:
    return read_yaml(SHAPES_FILE).tree


def is_random(base_model: str) -> bool:
    return base_model.startswith(PREFIX)


def parse_shape_settings(base_model: str) -> dict[str, Any]:
    """Return the configuration settings for `random:SHAPE[,key=value...]`. Raises UserError for an unknown shape."""
    name, changes = parse_name(base_model)
    if name not in load_shapes():
        raise UserError(
            f"base_model={base_model}: unknown shape; use random:SHAPE with one of {', '.join(load_shapes())}"
        )
    return load_shapes()[name] | changes


def parse_name(base_model: str) -> tuple[str, dict[str, Any]]:
    """Split `random:SHAPE[,key=value...]` into SHAPE and the changed settings. Raises UserError for other formats."""
    name, *changes = base_model.removeprefix(PREFIX).split(",")
    settings: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise UserError(f"base_model={base_model}: {change!r} must be key=value, such as num_hidden_layers=4")
        settings[key.strip()] = parse_scalar(value)
    return name, settings


def find_shape(base_model: str) -> str | None:
    """Return the shape that a model name starts with, ignoring case and punctuation, or the text after `random:`."""
    if is_random(base_model):
        return base_model.removeprefix(PREFIX)
    name = _normalize(base_model.rstrip("/").rpartition("/")[2])
    return next((shape for shape in load_shapes() if shape != "tiny" and name.startswith(_normalize(shape))), None)


def _normalize(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
