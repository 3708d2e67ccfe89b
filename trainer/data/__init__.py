"""Data: from files and hub datasets to masked, packed and deterministic micro-batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data.batches import Batches, MicroBatch, StreamBatches, evaluation_batches
    from trainer.data.cache import PreparedData, prepare_data
    from trainer.data.grouping import DataStats
    from trainer.data.samples import Sample, Samples, SampleStream

__all__ = [
    "Batches",
    "DataStats",
    "MicroBatch",
    "PreparedData",
    "Sample",
    "SampleStream",
    "Samples",
    "StreamBatches",
    "evaluation_batches",
    "prepare_data",
]


def __getattr__(name: str) -> Any:
    """Import a name on first use: most modules here import torch, which check_early must not load."""
    for module in ("batches", "cache", "grouping", "samples") if name in __all__ else ():
        if hasattr(imported := import_module(f"{__name__}.{module}"), name):
            return getattr(imported, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
