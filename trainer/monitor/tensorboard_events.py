"""TensorBoard events of a run: its curves, its configuration as text, and its row under HPARAMS."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch.utils.tensorboard import SummaryWriter, summary

TENSORBOARD_FOLDER = "tensorboard"
# TensorBoard's page sorts groups by name, capitals first: it opens on these, and not on eval/bpt.
ON_TOP = {"train/loss": "Loss/training", "eval/loss": "Loss/held out"}
CHARTS = {"Loss": {"training and held out": ["Multiline", ["train/loss", "eval/loss"]]}}
COMPARED = (
    *("base_model", "adapter", "seed", "lora.r", "lora.alpha", "lora.dropout", "lora.init", "dataset.max_length"),
    *("dataset.packing", "zero.stage"),
    *(
        f"training.{name}"
        for name in (
            *("learning_rate", "lr_scheduler", "warmup_ratio", "batch_size", "gradient_accumulation_steps"),
            *("epochs", "max_steps", "optimizer", "weight_decay", "max_grad_norm", "precision"),
        )
    ),
)


class Events:
    """A `SummaryWriter` in the folder of a run that survives a full disk: it then continues in a new event file."""

    def __init__(self, run_dir: Path, name: str, settings: Mapping[str, Any] | None) -> None:
        self._folder = run_dir / TENSORBOARD_FOLDER / (re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "run")
        self._settings = settings
        self._writer: SummaryWriter | None = None

    def open(self, step: int) -> SummaryWriter:
        """Start an event file; TensorBoard hides what earlier files have from `step` on. Raises OSError."""
        writer = SummaryWriter(str(self._folder), purge_step=step)
        writer.add_custom_scalars(CHARTS)
        if self._settings:
            text = yaml.safe_dump(dict(self._settings), sort_keys=False, allow_unicode=True)
            writer.add_text("configuration", textwrap.indent(text, "    "), step)  # in Markdown, four spaces make code
            values = {name: _find_value(self._settings, name) for name in COMPARED}
            compared = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
            # `add_hparams` would show them as a run of their own, in a folder below.
            for part in summary.hparams(compared, {"eval/loss": 0.0, "train/loss": 0.0}):
                writer.file_writer.add_summary(part, step)  # type: ignore[attr-defined]  # torch declares it as None
        writer.flush()
        self._writer = writer
        return writer

    def add_scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the scalars of a step; raises OSError."""
        shown = {**numbers, **{ON_TOP[name]: number for name, number in numbers.items() if name in ON_TOP}}
        with self._flushed(step) as writer:
            for tag, number in shown.items():
                writer.add_scalar(tag, number, step)

    def add_image(self, step: int, tag: str, image: Any) -> None:
        """Write an image (PIL) of a step; raises OSError."""
        with self._flushed(step) as writer:
            writer.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """Stop the writer's thread; all events are flushed already."""
        if self._writer is not None:
            self._writer.close()

    @contextmanager
    def _flushed(self, step: int) -> Iterator[SummaryWriter]:
        writer = self._writer if self._folder.is_dir() else None
        # The thread of a writer dies of its first OSError, which every later call raises again.
        self._writer = None
        writer = writer or self.open(step)
        yield writer
        writer.flush()
        self._writer = writer


def _find_value(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
