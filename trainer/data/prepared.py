"""What the checks before training have found: tokenizer, model configuration, data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.data.samples import Samples, SampleStream


@dataclass(frozen=True)
class Prepared:
    """What the checks found on the way."""

    tokenizer: Any
    model_config: Any
    data: Any
    """PreparedData, or what an image model has instead (trainer/images/data.py)."""
    notes: tuple[str, ...] = ()
    """What is worth a line on the console."""
    reference: Samples | None = None
    """The texts of scu.reference."""


def share_stream(prepared: Prepared, folder: Path) -> Prepared:
    """The same, with a stream whose blocks the ranks of all hosts find in `folder`."""
    train = prepared.data.train
    if not isinstance(train, SampleStream):
        return prepared
    return replace(prepared, data=replace(prepared.data, train=replace(train, shared=folder / train.name)))


def samples_of(prepared: Prepared) -> int | None:
    """Training samples of one epoch; None for a stream."""
    return None if isinstance(prepared.data.train, SampleStream) else len(prepared.data.train)
