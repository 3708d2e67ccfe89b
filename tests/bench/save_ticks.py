"""How long a checkpoint that is being written keeps training waiting: `python -m tests.bench.save_ticks OUT`.

On a CPU: a real engine with an adapter of as many factors and elements as that of llama3.1-8b at rank 16 (448, 42 M),
on a narrow base. While the checkpoint is written, the main thread does what launching kernels is to Python,
small operations of torch one after another, and counts the time in which it gave up its core to wait for something:
Python's lock, or the memory map. Time that another process took is not counted, but for what it took from the writer
while that held the lock: run it where little else does.
"""

import argparse
import resource
import shutil
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from tests.engine import adapted_engine_of, one_rank
from trainer.checkpoint.checkpoint import Position
from trainer.checkpoint.checkpoint_manager import CheckpointManager
from trainer.checkpoint.run_folder import RunFolder
from trainer.config import LoraSection, RunConfig
from trainer.monitor.console import Output
from trainer.parallel.ranks.group import Ranks

RANK = 256
SHAPE = {
    "hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 32, "vocab_size": 384,
}  # fmt: skip
"""A sixteenth of llama3.1-8b's widths at sixteen times the rank."""
OPERATIONS_A_TICK, TICKS_A_LOOK = 4, 50


def engine_of_8b_adapter() -> Any:
    """After one step, so that it has moments."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    engine = adapted_engine_of(model, LoraSection(r=RANK, alpha=RANK), "bf16", 2, torch.device("cpu"), flat=True)
    ids = torch.arange(3, 35)[None]
    logits = engine(input_ids=ids, use_cache=False).logits.float()
    engine.backward(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    engine.step()
    return engine


def waited_until(there: Path) -> tuple[float, float]:
    """Tick until a path exists; return the seconds waited and the longest wait."""
    small, waited, longest = torch.zeros(16), 0.0, 0.0
    last, gave_up = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    while not there.exists():
        for _ in range(TICKS_A_LOOK):
            for _ in range(OPERATIONS_A_TICK):
                small.add_(1.0)
            now, before = time.perf_counter(), gave_up
            gave_up = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            if gave_up != before:
                waited, longest = waited + now - last, max(longest, now - last)
            last = now
        last = time.perf_counter()
    return waited, longest


class Folder(RunFolder):
    """A run's folder without its record."""

    def restore_record(self) -> None:
        """Write none."""


def manager_of(run_dir: Path) -> CheckpointManager:
    """A run with one checkpoint at a time, and without data."""
    task: Any = SimpleNamespace(prepare_companion_files=lambda: lambda folder: None)
    log, ranks = Output(Console(), is_main=True, verbose=True), Ranks(0, 1, 0)
    config = RunConfig(
        base_model="none",
        output_dir=str(run_dir),
        dataset={"path": "none"},
        training={"save_steps": 1, "save_total_limit": 1},
    )
    folder = Folder(config, task, ranks, Console(), log, None)
    manager = CheckpointManager(config, None, ranks, "bf16", log, folder)  # type: ignore[arg-type]
    manager._identity = {}
    return manager


def main() -> None:
    """Save and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--saves", type=int, default=8)
    arguments = parser.parse_args()
    run_dir = arguments.out.absolute() / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    rows = []
    with one_rank(arguments.out):
        engine = engine_of_8b_adapter()
        saves = manager_of(run_dir)
        schedule: Any = SimpleNamespace(last_epoch=0, base_lrs=[0.0])
        for step in range(1, arguments.saves + 1):
            begun = time.perf_counter()
            saves.capture(engine)
            saves.save(engine, Position(step=step), schedule, None, None)  # type: ignore[arg-type]
            in_begin = time.perf_counter() - begun
            waited, longest = waited_until(run_dir / f"checkpoint-{step}")
            saves.finish_save()
            rows.append((in_begin, waited, longest))
            whole = time.perf_counter() - begun
            print(
                f"save {step}: its own call {in_begin * 1e3:7.1f} ms; then waited {waited * 1e3:7.1f} ms, "
                f"at most {longest * 1e3:5.1f} at once; whole after {whole:.2f} s"
            )
    calls, waits, _ = zip(*rows, strict=True)
    for name, of in (("median", statistics.median), ("least", min)):
        print(f"{name}: own call {of(calls) * 1e3:.1f} ms, waited {of(waits) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
