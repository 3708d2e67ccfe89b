"""TensorBoard's event file of a run: its curves, its configuration as text, and its row under HPARAMS.

The events are those of torch's SummaryWriter, but without its thread: what a full disk refuses is known at once, and
nothing of it is lost.
"""

import io
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from trainer.monitor.metric_files import AppendedFile

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
    """Events for `file`, which writes them."""

    def __init__(self, run_dir: Path, name: str, *, first_step: int, settings: Mapping[str, Any] | None) -> None:
        """After a resume TensorBoard shows no more what an earlier start recorded after `first_step`."""
        folder = run_dir / TENSORBOARD_FOLDER / (re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "run")
        beginning = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = AppendedFile(folder / beginning)
        self._record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:
            self._record(
                Event(wall_time=time.time(), step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
            )
        for part in (summary.custom_scalars(CHARTS), *(_of_settings(settings) if settings else ())):
            self._record(Event(wall_time=time.time(), step=first_step, summary=part))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """The scalars of a step."""
        shown = {**numbers, **{ON_TOP[name]: number for name, number in numbers.items() if name in ON_TOP}}
        for tag, number in shown.items():
            self._record(Event(wall_time=time.time(), step=step, summary=summary.scalar(tag, number)))

    def add_picture(self, step: int, tag: str, picture: Any) -> None:
        """A picture (PIL) of a step."""
        pixels = np.asarray(picture.convert("RGB"))
        self._record(Event(wall_time=time.time(), step=step, summary=summary.image(tag, pixels, dataformats="HWC")))

    def _record(self, event: Any) -> None:
        framed = io.BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        self.file.add(framed.getvalue())


def _of_settings(settings: Mapping[str, Any]) -> list[Any]:
    """The configuration as text, and its main settings for the comparison of runs by their last losses."""
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    # Markdown: four spaces in front make it code.
    shown = summary.text("configuration", "\n".join(f"    {line}" for line in text.splitlines()))
    values = {name: _value(settings, name) for name in COMPARED}
    compared = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
    return [shown, *summary.hparams(compared, {"eval/loss": 0.0, "train/loss": 0.0})]


def _value(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
