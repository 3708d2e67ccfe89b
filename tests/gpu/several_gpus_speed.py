"""Speed of sequences that GPUs share, and of a frozen base that is sharded within hosts.

python -m tests.gpu.several_gpus_speed sequences [--lengths 65536,131072] [key=value ...]     1 GPU, then all
python -m tests.gpu.several_gpus_speed hosts [key=value ...]     1 GPU, then all, each as a host of its own
python -m tests.gpu.several_gpus_speed halves [key=value ...]     each half of the GPUs as a host (4 GPUs or more)
python -m tests.gpu.several_gpus_speed pairs [key=value ...]     DPO on 1 GPU, then on all
python -m tests.gpu.several_gpus_speed large [--shape llama3.1-70b] [key=value ...]     NF4 at ZeRO-3 on all GPUs
A line for each case. Models have random weights, and Llama-3.1-8B's shape but for `large`, with r = 16 on all layers.
`--ranks 2 base_model=random:tiny dataset.max_length=64 training.precision=fp32` tries a case without GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.gpu.memory_table import write_text
from tests.gpu.preference_speed import write_data

APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""Traffic between ranks goes through sockets, as between hosts."""
LONG = {
    "adapter": "qlora", "training.gradient_checkpointing": "non_reentrant", "training.offload_activations": True,
    "training.batch_size": 1, "dataset.packing": True, "training.max_steps": 4, "zero.stage": 2,
}  # fmt: skip
SHARDED = {"zero.stage": 3, "training.batch_size": 4, "dataset.packing": True, "dataset.max_length": 2048}


def measure(
    folder: Path, name: str, gpus: int, settings: dict[str, Any], more: list[str], *,
    program: str = "trainer.train", variables: dict[str, str] | None = None, warm_up: int = 1,
) -> None:  # fmt: skip
    """Train a few steps and print tokens per second and GPU, milliseconds and peak GiB."""
    run = folder / name.replace(" ", "-").replace(",", "")
    whole = {
        "base_model": "random:llama3.1-8b", "output_dir": str(run), "dataset.cache_dir": str(folder / "cache"),
        "training.precision": "bf16", "training.save_steps": 0, "training.logging_steps": 1, "lora.r": 16,
        "training.ignore_memory_check": True, "logging.report_to": "none", **settings,
    }  # fmt: skip
    (folder / "base.yaml").write_text("{}\n")
    given = [f"{key}={json.dumps(value)}" for key, value in whole.items()]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}", "-m", program]
    command += [str(folder / "base.yaml"), *given, *more]
    log = folder / f"{run.name}.log"
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, **(variables or {})}, check=False)
    if done.returncode:
        said = log.read_text().partition("Traceback")[0]
        print(f"{name:40} exit code {done.returncode}\n{said[-1500:]}", flush=True)
        return
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/step_ms" in line][warm_up:]
    tokens, step_ms = (median(line[key] for line in steps) for key in ("perf/tokens_per_second", "perf/step_ms"))
    peak = max(line.get("memory/peak_gib", 0.0) for line in steps)
    losses = " ".join(f"{line['train/loss']:.5f}" for line in lines if "train/loss" in line)
    figures = f"{tokens / gpus:9,.0f} tokens/s per GPU {step_ms:9.1f} ms {peak:7.2f} GiB"
    print(f"{name:40} {figures}  losses {losses}", flush=True)


def sequences(folder: Path, cards: int, lengths: list[int], more: list[str]) -> None:
    for length in lengths:
        write_text(folder / f"{length}.jsonl", length)
        data = {"dataset.path": str(folder / f"{length}.jsonl"), "dataset.max_length": length}
        counts = (1, cards) if length < 500_000 else (cards,)
        for count in counts:
            settings = {**LONG, **data, "parallel.sequence": count}
            measure(folder, f"{length:,} tokens, {count} GPUs", count, settings, more)


def hosts(folder: Path, cards: int, more: list[str]) -> None:
    write_text(folder / "text.jsonl", 2048)
    data = {"dataset.path": str(folder / "text.jsonl"), "training.max_steps": 12}
    settings, program = {**SHARDED, **data}, "tests.gpu.named_host_rank"
    measure(folder, "1 GPU", 1, settings, more, warm_up=4)
    for within in ("host", "all"):
        settings = {**SHARDED, **data, "zero.shard_within": within}
        measure(folder, f"{within}, by sockets", cards, settings, more, program=program, variables=APART, warm_up=4)
    measure(folder, "all, by NVLink", cards, settings, more, warm_up=4)


def halves(folder: Path, cards: int, more: list[str]) -> None:
    """Compare a base sharded within each half, and over all GPUs, with one half alone."""
    write_text(folder / "text.jsonl", 2048)
    data = {**SHARDED, "dataset.path": str(folder / "text.jsonl"), "training.max_steps": 12}
    measure(folder, "one half", cards // 2, data, more, warm_up=4)
    apart = {**APART, "ZEROLORA_TEST_HOSTS": "2"}
    for within in ("host", "all"):
        settings, program = {**data, "zero.shard_within": within}, "tests.gpu.named_host_rank"
        measure(folder, f"{within}, by sockets", cards, settings, more, program=program, variables=apart, warm_up=4)


def pairs(folder: Path, cards: int, more: list[str]) -> None:
    write_data(folder, 200)
    settings = {
        "task": "preference", "dataset.path": str(folder / "pairs.jsonl"), "dataset.packing": True,
        "dataset.max_length": 2048, "training.batch_size": 1, "training.max_steps": 14, "zero.stage": 2,
    }  # fmt: skip
    for count in (1, cards):
        measure(folder, f"DPO, {count} GPUs", count, settings, more, warm_up=5)


def large(folder: Path, cards: int, shape: str, more: list[str]) -> None:
    write_text(folder / "text.jsonl", 2048)
    settings = {
        **SHARDED, "base_model": f"random:{shape}", "adapter": "qlora", "dataset.path": str(folder / "text.jsonl"),
        "training.gradient_checkpointing": "non_reentrant", "training.max_steps": 6,
    }  # fmt: skip
    measure(folder, shape, cards, settings, more, warm_up=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("sequences", "hosts", "halves", "pairs", "large"))
    parser.add_argument("--lengths", default="65536,131072")
    parser.add_argument("--shape", default="llama3.1-70b")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="default: the GPUs")
    arguments, more = parser.parse_known_args()
    ranks, card = arguments.ranks, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{ranks} x {card}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if arguments.what == "sequences":
            sequences(folder, ranks, [int(length) for length in arguments.lengths.split(",")], more)
        elif arguments.what == "large":
            large(folder, ranks, arguments.shape, more)
        else:
            {"hosts": hosts, "halves": halves, "pairs": pairs}[arguments.what](folder, ranks, more)


if __name__ == "__main__":
    main()
