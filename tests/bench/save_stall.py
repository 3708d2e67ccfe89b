"""What a checkpoint costs a run: `python -m tests.bench.save_stall OUT [--root CHECKOUT] [--base SHAPE] [--saves N]`.

One rank trains by plain operators and saves every 20 steps; `--as-configured` has 4 x 2048 tokens and what operators a
run takes by itself. From the times of the records: how much longer the step after a save and the nine that follow it
took together than ten steps without one, so that a thread that is in the way counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

EVERY, AFTER = 20, 10


AS_CONFIGURED = {
    "dataset": {"max_length": 2048, "packing": True},
    "training": {"batch_size": 4},
    "ops": {"backend": "auto", "elementwise": "auto"},
}


def train(root: Path, out: Path, base: str, saves: int, as_configured: bool, more: list[str]) -> None:
    """A run of the checkout at `root`, with random weights."""
    out.mkdir(parents=True, exist_ok=True)
    words = "red green blue seven eight nine runs jumps sleeps".split()
    texts = [" ".join(words[(i * j) % len(words)] for j in range(700)) for i in range(64)]
    (out / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings: dict[str, Any] = {
        "base_model": base,
        "output_dir": str(out / "run"),
        "lora": {"r": 16, "target_modules": ["all-linear"]},
        "dataset": {"path": str(out / "train.jsonl"), "max_length": 1024, "cache_dir": str(out / "cache")},
        "training": {"max_steps": saves * EVERY + 5, "save_steps": EVERY, "save_total_limit": 1, "hang_timeout": 0},
        "ops": {"backend": "reference", "elementwise": "off"},
        "logging": {"report_to": "none", "progress": "off"},
        "output": {"overwrite": "delete"},
    }
    for section, values in AS_CONFIGURED.items() if as_configured else ():
        settings[section] |= values
    (out / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "trainer.train", str(out / "config.yaml"), *more]
    with (out / "log.txt").open("w") as log:
        subprocess.run(command, cwd=root, stdout=log, stderr=log, check=True)


def table(run: Path, saves: int) -> list[str]:
    """Milliseconds that each save has cost, of those that were written while training went on."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = {int(line["step"]): line for line in lines if "train/loss" in line}
    at = {step: record["time"] for step, record in records.items()}
    last = saves * EVERY + 4
    # Steps that no save is near: what one costs is what it adds to these. The record of a step that ends in a save is
    # written before the next step runs, half a step earlier than the others: its time is the save's.
    usual = [at[step] - at[step - 1] for step in range(5, last) if (step - 1) % EVERY > AFTER and step % EVERY]
    step_s, costs = statistics.mean(usual), []
    rows = [f"mean step {step_s * 1e3:8.1f} ms"]
    for save in range(EVERY, last, EVERY):
        # A record is written while the next step runs: the save stands between those of its step and of the next one.
        end = min(save + AFTER, last)
        cost = at[end] - at[save - 1] - (end - save + 1) * step_s
        begun = max(records[step].get("perf/save_ms") or 0.0 for step in (save, save + 1) if step in records)
        costs.append(cost)
        rows.append(
            f"save at {save:3d}  {cost * 1e3:8.1f} ms, {cost / (EVERY * step_s):7.2%} of {EVERY} steps; "
            f"the save's own call {begun:6.1f} ms"
        )
    rows.append(f"median {statistics.median(costs) * 1e3:8.1f} ms, {statistics.median(costs) / (EVERY * step_s):7.2%}")
    return rows


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--base", default="random:llama3.1-8b")
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--as-configured", action="store_true")
    parser.add_argument("more", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    train(
        arguments.root,
        arguments.out.absolute(),
        arguments.base,
        arguments.saves,
        arguments.as_configured,
        arguments.more,
    )
    for row in table(arguments.out / "run", arguments.saves):
        print(row)


if __name__ == "__main__":
    main()
