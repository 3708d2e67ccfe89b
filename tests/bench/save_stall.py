"""What a checkpoint costs a run: `python -m tests.bench.save_stall OUT [--root CHECKOUT] [--base random:llama3.1-8b]`.

One rank trains for 45 steps and saves after 20 and 40. From the times of the records: how much longer the step after a
save and the nine that follow it took together than ten steps without one, so that a thread that is in the way counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import yaml

STEPS, EVERY, AFTER = 45, 20, 10


def train(root: Path, out: Path, base: str, more: list[str]) -> None:
    """A run of the checkout at `root`, with random weights and no operators to build."""
    out.mkdir(parents=True, exist_ok=True)
    words = "red green blue seven eight nine runs jumps sleeps".split()
    texts = [" ".join(words[(i * j) % len(words)] for j in range(700)) for i in range(64)]
    (out / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {
        "base_model": base,
        "output_dir": str(out / "run"),
        "lora": {"r": 16, "target_modules": ["all-linear"]},
        "dataset": {"path": str(out / "train.jsonl"), "max_length": 1024, "cache_dir": str(out / "cache")},
        "training": {"max_steps": STEPS, "save_steps": EVERY, "save_total_limit": 1, "hang_timeout": 0},
        "ops": {"backend": "reference", "elementwise": "off"},
        "logging": {"report_to": "none", "progress": "off"},
        "output": {"overwrite": "delete"},
    }
    (out / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "trainer.train", str(out / "config.yaml"), *more]
    with (out / "log.txt").open("w") as log:
        subprocess.run(command, cwd=root, stdout=log, stderr=log, check=True)


def table(run: Path) -> list[str]:
    """Milliseconds that each save has cost, of those that were written while training went on."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = {int(line["step"]): line for line in lines if "train/loss" in line}
    at = {step: record["time"] for step, record in records.items()}
    usual = [at[step] - at[step - 1] for step in range(5, EVERY)]
    step_s = statistics.median(usual)
    rows = [f"median step {step_s * 1e3:8.1f} ms"]
    for save in range(EVERY, STEPS - 1, EVERY):
        # A record is written while the next step runs: the save stands between those of its step and of the next one.
        end = min(save + AFTER, STEPS - 1)
        cost = at[end] - at[save - 1] - (end - save + 1) * step_s
        begun = max(records[step].get("perf/save_ms") or 0.0 for step in (save, save + 1) if step in records)
        rows.append(
            f"save at {save:3d}  {cost * 1e3:8.1f} ms, {cost / (EVERY * step_s):7.2%} of {EVERY} steps; "
            f"the save's own call {begun:6.1f} ms"
        )
    return rows


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--base", default="random:llama3.1-8b")
    parser.add_argument("more", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    train(arguments.root, arguments.out.absolute(), arguments.base, arguments.more)
    for row in table(arguments.out / "run"):
        print(row)


if __name__ == "__main__":
    main()
