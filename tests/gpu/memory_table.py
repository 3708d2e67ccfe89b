"""Predicted and measured peak memory, over shapes, formats of the base, recomputation and ZeRO stages.

python -m tests.gpu.memory_table [--gpus 1] [--shape NAME ...] [--json FILE]      for docs/lab/memory.md
python -m tests.gpu.memory_table --shape llama3.1-8b --batch-size 4 key=value ...   other settings

The product itself trains for a few steps, on random weights drawn on the card and text that fills every sequence. Each
shape has its own processes, which run in parallel: what torch counts is per process.
"""

import argparse
import gc
import json
import os
import random
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPES = ("smollm2-135m", "tinyllama-1.1b", "llama2-7b", "llama3.1-8b")
ADAPTERS = ("lora", "qlora")
RECOMPUTATION = ("none", "non_reentrant")
STAGES = (2, 3)
STEPS = 3
ALLOWED = (0.97, 1.10)
"""Predicted over measured: never below by more than 3 %, never above by more than 10 %."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--shape", action="append", help=f"may be repeated; default: {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.worker:
        return work(arguments)
    with tempfile.TemporaryDirectory(prefix="zerolora-memory-") as scratch:
        return drive(arguments, Path(scratch))


def drive(arguments: argparse.Namespace, folder: Path) -> int:
    """Start the workers of every shape, wait, print lines and the table; 1 if one failed or missed the bounds."""
    write_text(folder / "text.jsonl", arguments.length)
    print(f"CUDA context: {context_mib()} MiB", flush=True)
    shapes = arguments.shape or list(SHAPES)
    workers = []
    for index, shape in enumerate(shapes):
        own = folder / shape
        own.mkdir()
        launcher = [
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={arguments.gpus}",
            f"--master-port={29600 + index}",
        ]
        settings = [f"--batch-size={arguments.batch_size}", f"--length={arguments.length}", f"--rank={arguments.rank}"]
        command = [sys.executable, *launcher, "-m", "tests.gpu.memory_table", f"--worker={own}", f"--shape={shape}"]
        log = (own / "log").open("w")
        process = subprocess.Popen([*command, *settings, *arguments.overrides], stdout=log, stderr=log)
        workers.append((shape, own, process))
    results: list[dict[str, Any]] = []
    failed = False
    for shape, own, process in workers:
        code = process.wait()
        lines = (own / "results.jsonl").read_text().splitlines() if (own / "results.jsonl").exists() else []
        results += [json.loads(line) for line in lines]
        if code:
            failed = True
            print(f"{shape}: exit code {code}\n" + "".join(f"  {line}\n" for line in tail(own / "log")))
    for result in results:
        print(line_of(result))
    print("\n" + markdown(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 1 if failed or any(outside(result) for result in results) else 0


def work(arguments: argparse.Namespace) -> int:
    """All cases of one shape in this process, one after the other."""
    import torch

    shape = arguments.shape[0]
    main_rank = os.environ.get("RANK", "0") == "0"
    for adapter in ADAPTERS:
        for recompute in RECOMPUTATION:
            for stage in STAGES:
                case = {"shape": shape, "adapter": adapter, "recompute": recompute, "stage": stage}
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                measured = measure(arguments, case)
                if main_rank:
                    with (arguments.worker / "results.jsonl").open("a") as file:
                        file.write(json.dumps(case | measured) + "\n")
    from trainer.parallel.ranks.group import leave_process_group

    leave_process_group()
    return 0


def measure(arguments: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps; bytes predicted and measured."""
    import torch
    import yaml
    from rich.console import Console

    from benchmarks.compare.measured_run import MeasuredRun
    from trainer.config import load_config
    from trainer.parallel.ranks.group import Ranks
    from trainer.parallel.ranks.signals import StopRequest
    from trainer.setup.preflight import prepare

    before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    name = f"{case['adapter']}-{case['recompute']}-{case['stage']}"
    config = {
        "base_model": f"random:{case['shape']}",
        "output_dir": str(arguments.worker / name),
        "adapter": case["adapter"],
        "lora": {"r": arguments.rank, "alpha": 2 * arguments.rank},
        "dataset": {
            "path": str(arguments.worker.parent / "text.jsonl"),
            "max_length": arguments.length,
            "packing": True,
            "cache_dir": str(arguments.worker.parent / "cache"),
        },
        "training": {
            "batch_size": arguments.batch_size,
            "max_steps": STEPS,
            "precision": "bf16",
            "gradient_checkpointing": case["recompute"],
            "ignore_memory_check": True,
        },
        "zero": {"stage": case["stage"]},
        "logging": {"report_to": "none"},
    }
    ranks = Ranks.from_environment()
    file = arguments.worker / f"{name}-{ranks.rank}.yaml"  # one each: another rank may read while this one writes
    file.write_text(yaml.safe_dump(config))
    loaded = load_config(file, arguments.overrides)
    with (arguments.worker / f"{name}-{ranks.rank}.txt").open("w") as console:
        # Without checkpoints and a report, which cost time and no memory on the card; nothing is held out here.
        prepared = prepare(loaded.config)
        run = MeasuredRun(loaded, prepared, ranks, Console(file=console), StopRequest())
        run.measure(evaluate=lambda _: 0.0, at_the_end=lambda _: None)
        run.train()
    found = run.memory.estimate
    assert found is not None, run.memory.notes
    resident = ("base model", "quantization state", "adapter", "optimizer", "workspaces", "communication buffers")
    return {
        "predicted": found.peak,
        "measured": run.peak,
        "reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        "before": before,
        "static_predicted": sum(found.terms.get(term, 0) for term in resident),
        "static_measured": run.resident,
        "moment": found.moment,
        "terms": found.terms,
    }


def write_text(path: Path, length: int) -> None:
    """Documents that are cut at the longest sequence: a token is a byte here."""
    draw = random.Random(0)
    letters = string.ascii_lowercase + "     "
    with path.open("w") as file:
        for _ in range(64):
            file.write(json.dumps({"text": "".join(draw.choices(letters, k=length + 8))}) + "\n")


def context_mib() -> int:
    """What the driver counts for a process that has computed one product, beyond what torch has reserved."""
    program = (
        "import torch, sys; torch.cuda.is_available() or sys.exit(print(0)); free, _ = torch.cuda.mem_get_info(); "
        "a = torch.ones(256, 256, device='cuda'); (a @ a).sum().item(); torch.cuda.synchronize(); "
        "left, total = torch.cuda.mem_get_info(); print((total - left - torch.cuda.memory_reserved()) >> 20)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


def outside(result: dict[str, Any]) -> bool:
    return not ALLOWED[0] <= result["predicted"] / result["measured"] <= ALLOWED[1]


def line_of(result: dict[str, Any]) -> str:
    case = f"{result['shape']:<15} {result['adapter']:<6} {result['recompute']:<14} ZeRO-{result['stage']}"
    gib = {name: result[name] / 2**30 for name in ("predicted", "measured", "reserved", "static_predicted", "before")}
    static = f"static {gib['static_predicted']:.2f}/{result['static_measured'] / 2**30:.2f}"
    ratio = result["predicted"] / result["measured"]
    mark = "  <-- outside" if outside(result) else ""
    terms = " ".join(f"{name.replace(' ', '_')}={size / 2**30:.3f}" for name, size in result["terms"].items())
    return (
        f"{case}  predicted {gib['predicted']:7.3f} measured {gib['measured']:7.3f} ratio {ratio:.3f}  "
        f"reserved {gib['reserved']:7.3f}  {static} before {gib['before']:.3f}  {result['moment']}: {terms}{mark}"
    )


def markdown(results: list[dict[str, Any]]) -> str:
    lines = [
        "| model | base | recomputed | ZeRO | predicted GiB | measured GiB | predicted / measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        base = "NF4" if result["adapter"] == "qlora" else "bf16"
        recompute = "nothing" if result["recompute"] == "none" else "every layer"
        predicted, measured = result["predicted"] / 2**30, result["measured"] / 2**30
        lines.append(
            f"| {result['shape']} | {base} | {recompute} | {result['stage']} | {predicted:.2f} | {measured:.2f} | "
            f"{predicted / measured:.3f} |"
        )
    return "\n".join(lines)


def tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-12:]


if __name__ == "__main__":
    sys.exit(main())
