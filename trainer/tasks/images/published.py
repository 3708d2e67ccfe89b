"""Published shapes of denoisers, for `base_model: random:SHAPE`: the real architecture with random weights.

They are in published_shapes.yaml.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainer.config.yaml_core import plain, read_yaml

PREFIX = "random:"
SHAPES_FILE = Path(__file__).with_name("published_shapes.yaml")


@dataclass(frozen=True)
class Published:
    """The settings of a denoiser and its scheduler, and the shapes of its inputs."""

    family: str
    settings: dict[str, Any]
    scheduler: dict[str, Any]
    channels: int
    """Channels of the latents."""
    text: dict[str, Sequence[int]]
    """Shapes of a caption's conditions."""


@cache
def load_shapes() -> dict[str, Published]:
    """Return all shapes by name."""
    shapes = read_yaml(SHAPES_FILE).tree
    return {name: Published(**shape) for name, shape in shapes.items()}


def published_shape(base_model: str) -> tuple[Published, dict[str, Any]] | None:
    """Return the shape named by `random:SHAPE,key=value,...` and its changed settings, or None for another name."""
    if not base_model.startswith(PREFIX):
        return None
    name, *changes = base_model.removeprefix(PREFIX).split(",")
    shape = load_shapes().get(name)
    if shape is None:
        return None
    values = dict(change.partition("=")[::2] for change in changes)
    return shape, shape.settings | {key: plain(value) for key, value in values.items()}
