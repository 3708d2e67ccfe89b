"""`zerolora estimate --max-length auto`: the longest sequence fits, and a slightly longer one does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_decisions import planner
from trainer.commands.estimate import main
from trainer.commands.longest_sequence import find_longest_sequences
from trainer.config import RunConfig
from trainer.memory.bytes import GIB
from trainer.memory.decisions import Machine
from trainer.memory.planner import DataSize, Planner, apply_changes

SETTINGS: dict[str, Any] = {
    "base_model": "random:tiny",
    "output_dir": "unset",
    "dataset": {"path": "unset.jsonl", "packing": True},
    "training": {"gradient_checkpointing": "non_reentrant", "offload_activations": True},
    "zero": {"stage": 0},
}


def needed(llama: Planner, config: RunConfig, length: int) -> int:
    lengths = replace(llama, lengths=DataSize(length, length))
    changed = apply_changes(config, {"dataset.max_length": length, "training.recompute_attention": True})
    return lengths.estimate(changed).needed


def test_the_longest_fits_and_a_longer_one_does_not() -> None:
    llama = planner("llama", Machine.assume_gpus(2, "bf16"), vocab_size=512)
    config = RunConfig.model_validate(SETTINGS)
    memory = 2 * GIB
    longest = find_longest_sequences(llama, config, memory)
    assert list(longest) == [1, 2] and 1.9 < longest[2] / longest[1] < 2.1
    assert needed(llama, config, longest[1]) <= memory < needed(llama, config, longest[1] + longest[1] // 20)


def test_a_short_sequence_is_found_to_256_tokens() -> None:
    llama = planner("llama", vocab_size=512)
    config = RunConfig.model_validate(SETTINGS)
    assert find_longest_sequences(llama, config, needed(llama, config, 2400)) == {1: 2304}


def test_activations_without_room_on_the_host_stay_on_the_device() -> None:
    """Eight layers of 256 in 16 bits: 512 bytes per token and layer, of which two are on the device while copied."""
    llama = planner("llama", vocab_size=512, num_hidden_layers=8)
    config = RunConfig.model_validate(SETTINGS)
    room = 2**25

    def find(host: int | None) -> int:
        return find_longest_sequences(
            replace(llama, machine=replace(llama.machine, host_memory=host)), config, 2 * GIB
        )[1]

    bounded, unbounded = find(room), find(None)
    assert room / 4096 < bounded < unbounded
    of_length = replace(
        llama, lengths=DataSize(bounded, bounded), machine=replace(llama.machine, host_memory=room)
    )  # fmt: skip
    config = apply_changes(config, {"dataset.max_length": bounded})
    work = of_length.build_micro_step(config, of_length.build_decisions(config))
    one = 512 * bounded
    none, some, every = (of_length.estimate_activations(replace(work, host_memory=host)) for host in (0, room, None))
    assert (none.on_host, some.on_host, every.on_host) == (0, room // one * one, 8 * one)
    assert none.kept - some.kept == some.on_host - min(2 * one, some.on_host)
    assert none.kept - every.kept == 6 * one
    assert find(2**10) == 0  # too little to load the weights


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(SETTINGS | {"output_dir": str(tmp_path / "run")}))
    arguments = [str(file), "--gpus", "1", "--gpu-memory", "2GiB"]
    assert main([*arguments, "--max-length", "auto", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    length, seconds = found["tokens"], found["step_s"]
    assert length > 1024 and seconds > 0
    assert main([*arguments, "--max-length", "auto"]) == 0
    assert (
        f"longest sequence with parallel.sequence=1: {length:,} tokens; {seconds:,.1f} s per step on H100"
        in capsys.readouterr().out
    )
    assert main([*arguments, "--host-memory", "8TB/s"]) == 2
    assert capsys.readouterr().err.startswith("error: --host-memory 8TB/s: not an amount of memory")
