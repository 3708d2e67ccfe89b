"""The results of preparing a run: tokenizer, model configuration and data."""

from dataclasses import dataclass
from typing import Any

from trainer.data.batches import StreamBatches
from trainer.data.prompt_files import Prompt
from trainer.data.samples import Samples, SampleStream
from trainer.data.vision import ImageReader


@dataclass(frozen=True)
class PreparedRun:
    tokenizer: Any
    model_config: Any
    data: Any
    """PreparedData, or PreparedImages for image models; None if not yet read."""
    notes: tuple[str, ...] = ()
    """Lines to print to the console."""
    reference: Samples | None = None
    """Texts from `scu.reference`."""
    sample_prompts: tuple[Prompt, ...] = ()
    """Prompts from `logging.sample_prompts`, including those in files."""
    context_length: int | None = None
    """The model's context length in tokens; None if unknown or unlimited."""
    images: ImageReader | None = None
    """The image processor of a vision-language model."""
    adapters: "tuple[PreparedRun, ...]" = ()
    """Results for each adapter if several are trained together; the other fields then belong to the first one."""


def has_images(prepared: PreparedRun) -> bool:
    stats = prepared.data.stats
    return prepared.images is not None and bool(stats.with_images or (stats.evaluation or stats).with_images)


def count_skipped_records(prepared: PreparedRun, batches: Any) -> dict[str, int]:
    return batches.skipped if isinstance(batches, StreamBatches) else prepared.data.stats.skipped


def count_samples(prepared: PreparedRun) -> int | None:
    return None if isinstance(prepared.data.train, SampleStream) else len(prepared.data.train)
