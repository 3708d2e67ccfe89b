"""`zerolora estimate --max-length auto`: the longest sequence fits, and a slightly longer one does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_decisions import planner
from trainer.commands.estimate import main
from trainer.commands.longest_sequence import find_longest
from trainer.config import RunConfig
from trainer.memory.bytes import GIB
from trainer.memory.decisions import Machine
from trainer.memory.planner import Lengths, Planner, apply_changes

SETTINGS: dict[str, Any] = {
    "base_model": "random:tiny",
    "output_dir": "unset",
    "dataset": {"path": "unset.jsonl", "packing": True},
    "training": {"gradient_checkpointing": "non_reentrant", "offload_activations": True},
    "zero": {"stage": 0},
}


def needed(llama: Planner, config: RunConfig, length: int) -> int:
    lengths = replace(llama, lengths=Lengths(length, length))
    changed = apply_changes(config, {"dataset.max_length": length, "training.recompute_attention": True})
    return lengths.estimate(changed).needed


def test_the_longest_fits_and_a_longer_one_does_not() -> None:
    llama = planner("llama", Machine.assumed(2, "bf16"), vocab_size=512)
    config = RunConfig.model_validate(SETTINGS)
    memory = 2 * GIB
    longest = find_longest(llama, config, memory, None)
    assert list(longest) == [1, 2] and 1.9 < longest[2] / longest[1] < 2.1
    assert needed(llama, config, longest[1]) <= memory < needed(llama, config, longest[1] + longest[1] // 20)


def test_a_short_sequence_is_found_to_256_tokens() -> None:
    llama = planner("llama", vocab_size=512)
    config = RunConfig.model_validate(SETTINGS)
    assert find_longest(llama, config, needed(llama, config, 2400), None) == {1: 2304}


def test_host_memory_bounds_what_is_kept_there() -> None:
    """Two layers of 256 in 16 bits: 1,024 bytes per token; attention is then computed again."""
    llama = planner("llama", vocab_size=512)
    config = RunConfig.model_validate(SETTINGS)
    found = find_longest(llama, config, 2 * GIB, 2**25)[1]
    assert 2**15 * 63 / 64 < found <= 2**15
    assert find_longest(llama, config, 2 * GIB, 2**10) == {1: 0}


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(SETTINGS | {"output_dir": str(tmp_path / "run")}))
    arguments = [str(file), "--gpus", "1", "--gpu-memory", "2GiB"]
    assert main([*arguments, "--max-length", "auto", "--json"]) == 0
    (length,) = json.loads(capsys.readouterr().out).values()
    assert length > 1024
    assert main([*arguments, "--max-length", "auto"]) == 0
    assert f"longest sequence with parallel.sequence=1: {length:,} tokens" in capsys.readouterr().out
    assert main([*arguments, "--host-memory", "8GiB"]) == 2
    assert capsys.readouterr().err.startswith("error: --host-memory 8GiB: has no effect without --max-length auto")
