"""Time and memory of several adapters in one run, against one adapter: of a step alone, and of as many tokens.

python -m tests.gpu.many_adapters                                                   8 adapters, Llama-3.1-8B's shape
python -m tests.gpu.many_adapters --device cpu --shape FOLDER --adapters 3 --steps 4 --length 64

The product itself trains, on random weights and text that fills every sequence, each case in its own process. `speedup`
compares a step of all adapters with one step of each alone, one after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.memory_table import write_text

BASES = {"nf4": ("qlora", 512), "bf16": ("lora", 2048)}
"""Format of the base -> `adapter` and tokens of each adapter in a step."""
WARM_UP = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", default="llama3.1-8b", help="a published shape, or the folder of a model")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--base", action="append", choices=list(BASES), help="may be repeated; default: all")
    parser.add_argument("--length", type=int, help="tokens of each adapter, instead of those of the base's format")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.worker:
        work(arguments)
        return 0
    with tempfile.TemporaryDirectory(prefix="zerolora-adapters-") as scratch:
        return drive(arguments, Path(scratch))


def drive(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the cases one after the other, print a line for each and the table; 1 if one failed."""
    results: dict[tuple[str, str], dict[str, float]] = {}
    environment = os.environ | ({"DS_ACCELERATOR": "cpu"} if arguments.device == "cpu" else {})
    for base in arguments.base or BASES:
        for case in ("one", "together", "as many tokens"):
            given = [word for word in sys.argv[1:] if word != "--base" and word not in BASES]
            own = [f"--worker={folder}", f"--case={case}", f"--base={base}"]
            command = [sys.executable, "-m", "tests.gpu.many_adapters", *given, *own]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            file = folder / f"{base}-{case}.json"
            if done.returncode or not file.exists():
                print(f"{base}, {case}: exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
                return 1
            results[base, case] = json.loads(file.read_text())
            print(f"{base}, {case}: {results[base, case]}", flush=True)
    print("\n" + table(results, arguments.adapters))
    return 0


def work(arguments: argparse.Namespace) -> None:
    """Train one case in this process, and write its median time of a step and its peak memory."""
    import torch
    import yaml
    from rich.console import Console

    from tests.engine import one_rank
    from trainer.config import load_config
    from trainer.joint_run import JointRun
    from trainer.parallel.ranks.group import Ranks
    from trainer.parallel.ranks.signals import StopRequest
    from trainer.run import Run
    from trainer.setup.preflight import prepare

    [base], folder = arguments.base, arguments.worker
    adapter, length = BASES[base][0], arguments.length or BASES[base][1]
    text = folder / f"text-{length}.jsonl"
    if not text.exists():
        write_text(text, length)
    config: dict[str, Any] = {
        "base_model": arguments.shape if Path(arguments.shape).exists() else f"random:{arguments.shape}",
        "output_dir": str(folder / f"{base}-{arguments.case}".replace(" ", "-")),
        "adapter": adapter,
        "lora": {"r": arguments.rank, "alpha": 2 * arguments.rank},
        "dataset": {"path": str(text), "max_length": length, "packing": True, "cache_dir": str(folder / "cache")},
        "training": {"max_steps": arguments.steps, "save_steps": 0, "ignore_memory_check": True},
        "logging": {"report_to": "none", "progress": "off"},
    }
    names = [f"a{number}" for number in range(arguments.adapters)]
    if arguments.case == "together":
        config["adapters"] = [{"name": name, "seed": number} for number, name in enumerate(names)]
    elif arguments.case == "as many tokens":
        config["training"]["batch_size"] = arguments.adapters
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    loaded = load_config(file, arguments.overrides)
    kind = JointRun if loaded.config.runs else Run
    with (folder / "console.txt").open("w") as console, one_rank(folder):
        run = kind(loaded, prepare(loaded.config), Ranks(0, 1, 0), Console(file=console), StopRequest())
        run.train()
    own = Path(config["output_dir"]) / (names[0] if loaded.config.runs else "")
    lines = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/step_ms" in line]
    # The run without the saves at its end, which copy to the host and need no memory on the GPU.
    found = {
        "step_ms": statistics.median(line["perf/step_ms"] for line in steps[min(WARM_UP, len(steps) - 1) :]),
        "peak_gib": max(line["memory/peak_gib"] for line in steps),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    (folder / f"{base}-{arguments.case}.json").write_text(json.dumps(found))
    (folder / "store").unlink(missing_ok=True)


def table(results: dict[tuple[str, str], dict[str, float]], adapters: int) -> str:
    lines = [
        f"| base | one, ms | {adapters} together, ms | speedup | one with as many tokens, ms "
        "| one, GiB | together, GiB | as many tokens, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for base in dict.fromkeys(base for base, _ in results):
        one, both, many = (results[base, case] for case in ("one", "together", "as many tokens"))
        speedup = adapters * one["step_ms"] / both["step_ms"]
        lines.append(
            f"| {base} | {one['step_ms']:.1f} | {both['step_ms']:.1f} | {speedup:.2f} | {many['step_ms']:.1f} | "
            f"{one['peak_gib']:.2f} | {both['peak_gib']:.2f} | {many['peak_gib']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
