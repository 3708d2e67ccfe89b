"""Data: from files and hub names to masked, packed, deterministic micro-batches."""

from trainer.data.batches import Batches, MicroBatch, StreamBatches, evaluation_batches
from trainer.data.cache import PreparedData, prepare_data
from trainer.data.grouping import DataStats
from trainer.data.samples import Sample, Samples, SampleStream
from trainer.data.sources import read_source

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
    "read_source",
]
