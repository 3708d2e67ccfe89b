"""What the checks before training have found: tokenizer, model configuration, data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.data import Samples, SampleStream, StreamBatches
from trainer.data.prompt_files import Prompt


@dataclass(frozen=True)
class Prepared:
    """What the checks found on the way."""

    tokenizer: Any
    model_config: Any
    data: Any
    """PreparedData, or what an image model has instead (trainer/tasks/images/data.py)."""
    notes: tuple[str, ...] = ()
    """What is worth a line on the console."""
    reference: Samples | None = None
    """The texts of scu.reference."""
    sample_prompts: tuple[Prompt, ...] = ()
    """Those of logging.sample_prompts, read from files where it names any."""
    longest: int | None = None
    """The model's context in tokens."""


def fit_max_length(config: RunConfig, longest: int | None) -> RunConfig:
    """Return the configuration with `dataset.max_length` no longer than the model's context, unless it was given."""
    data = config.dataset
    if longest is None or data.max_length <= longest or "max_length" in data.model_fields_set:
        return config
    return config.model_copy(update={"dataset": data.model_copy(update={"max_length": longest})})


def share_stream(prepared: Prepared, folder: Path) -> Prepared:
    """The same, with a stream whose blocks the ranks of all hosts find in `folder`."""
    train = prepared.data.train
    if not isinstance(train, SampleStream):
        return prepared
    return replace(prepared, data=replace(prepared.data, train=replace(train, shared=folder / train.name)))


def skipped_records(config: RunConfig, prepared: Prepared, batches: Any) -> dict[str, int]:
    """Return how many records `dataset.on_bad_record: skip` left out so far, by source."""
    counts: dict[str, int] = batches.skipped if isinstance(batches, StreamBatches) else prepared.data.stats.skipped
    return counts if config.dataset.on_bad_record == "skip" else {}


def samples_of(prepared: Prepared) -> int | None:
    """Training samples of one epoch; None for a stream."""
    return None if isinstance(prepared.data.train, SampleStream) else len(prepared.data.train)
