"""A document of millions of characters: time and memory grow with its length, not faster, and a cut is reported."""

import json
import resource
import time
from pathlib import Path

import pytest

from trainer.config import DatasetSection
from trainer.data.cache import PreparedData, prepare_data
from trainer.model.random_weights import build_byte_tokenizer


def prepared(folder: Path, characters: int, max_length: int) -> tuple[PreparedData, float]:
    """Return the prepared data of one document, and the seconds that it took."""
    text = "The quick brown fox jumps over the lazy dog. " * (characters // 45 + 1)
    file = folder / f"{characters}.jsonl"
    file.write_text(json.dumps({"text": text[:characters]}) + "\n")
    settings = {"path": str(file), "max_length": max_length, "packing": True, "workers": 1}
    begin = time.perf_counter()
    data = prepare_data(
        DatasetSection.model_validate(settings), build_byte_tokenizer(), seed=0, cache_dir=folder / "cache",
        model_max_length=None,
    )  # fmt: skip
    return data, time.perf_counter() - begin


@pytest.mark.slow
def test_a_document_of_millions_of_characters_takes_linear_time_and_memory(tmp_path: Path) -> None:
    prepared(tmp_path, 1000, 1000)  # imports
    _, short = prepared(tmp_path, 1_000_000, 4_000_001)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data, long = prepared(tmp_path, 4_000_000, 4_000_001)
    assert data.stats.tokens >= 4_000_000 and data.stats.truncated == 0
    assert long < 12 * short + 5  # four times, and what a busy machine adds
    # In KiB: 300 bytes per character would do for Python's own lists of tokens.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4_000_000 * 300 / 1024


@pytest.mark.parametrize("length", [65_536])
def test_what_is_cut_is_reported(length: int, tmp_path: Path) -> None:
    data, _ = prepared(tmp_path, 300_000, length)
    assert data.stats.truncated == 1 and data.stats.tokens == length
    assert any("are truncated to fit dataset.max_length=65536" in warning for warning in data.stats.list_warnings())
