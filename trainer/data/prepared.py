"""What the checks before training have found: tokenizer, model configuration, data."""

from dataclasses import dataclass
from typing import Any

from trainer.data import PreparedData, Samples


@dataclass(frozen=True)
class Prepared:
    """What the checks found on the way."""

    tokenizer: Any
    model_config: Any
    data: PreparedData
    notes: tuple[str, ...] = ()
    """What is worth a line on the console."""


def samples_of(prepared: Prepared) -> int | None:
    """Training sequences of one epoch; None for a stream."""
    return len(prepared.data.train) if isinstance(prepared.data.train, Samples) else None
