"""Whole training runs of one rank in the process of the test: a second each once the libraries are loaded."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import yaml
from rich.console import Console

import trainer.loop
import trainer.memory.image_models
import trainer.memory.planner
from tests.engine import one_rank
from tests.tiny import make_model, write_chats
from trainer.config import load_config
from trainer.entry.joint_run import JointRun
from trainer.memory.model_widths import read_shapes
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.signals import StopRequest
from trainer.run import Run
from trainer.setup.preflight import prepare


def make_ground(folder: Path) -> Path:
    """A tiny model, data, and base.yaml for runs in `folder`."""
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", 40)
    write_chats(folder / "held_out.jsonl", 6, seed=1)
    training = {"batch_size": 4, "max_steps": 4, "learning_rate": 1e-3, "precision": "fp32", "save_steps": 2}
    base = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / "run"),
        "lora": {"r": 4, "alpha": 8},
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
        "training": training,
        "logging": {"report_to": "none", "progress": "lines"},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    return folder


def _once(measure: Callable[..., Any]) -> Callable[..., Any]:
    """A function of models and settings that caches its results by their text."""
    known: dict[str, Any] = {}

    @wraps(measure)
    def measure_once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, options))
        if key not in known:
            known[key] = measure(*arguments, **options)
        return known[key]

    return measure_once


# What the estimate of memory knows of a model: it makes an empty one for each, a quarter of a tiny image run's time.
_KNOWN = [
    (trainer.memory.planner, "read_shapes", _once(read_shapes)),
    (trainer.memory.image_models, "read_image_shapes", _once(trainer.memory.image_models.read_image_shapes)),
    (trainer.memory.image_models, "observe_activations", _once(trainer.memory.image_models.observe_activations)),
]


@contextmanager
def as_one_of_many() -> Iterator[None]:
    """Runs do not look at every object that libraries made, and estimate the same model once.

    Two thirds of a tiny run's time, and a quarter of what is left.
    """
    garbage = (trainer.loop, "exclude_from_garbage_collection", nullcontext)
    with ExitStack() as changes:
        for module, name, function in (garbage, *_KNOWN):
            changes.enter_context(patch.object(module, name, function))
        yield


def train(ground: Path, **overrides: Any) -> str:
    """One run with `training__max_steps=6` and the like, as one of many; what the console showed."""
    with as_one_of_many():
        return train_alone(ground, **overrides)


def train_alone(ground: Path, **overrides: Any) -> str:
    """The same, with everything that a run does."""
    settings = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in overrides.items()]
    loaded = load_config(ground / "base.yaml", settings)
    shown = ground / "console.txt"
    with shown.open("w") as file, TemporaryDirectory() as store, one_rank(Path(store)):
        kind = JointRun if loaded.config.runs else Run
        run = kind(loaded, prepare(loaded.config), Ranks(0, 1, 0), Console(file=file, width=200), StopRequest())
        try:
            run.train()
        finally:
            run.close()
    return shown.read_text()
