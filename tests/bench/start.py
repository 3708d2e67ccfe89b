"""Seconds from `zerolora train` to its first line, to the ranks' first line and to the first step.

python -m tests.bench.start [--shape SHAPE] [--runs N] [--ranks N] [--length TOKENS] [--tree CHECKOUT] [--functions]
                            [key=value ...]

A first run, which is not counted, tokenises and builds operators. Another checkout's command is timed with --tree.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
POLL_S = 0.01
# Python imports a module of this name first of all.
PROFILED = """
import sys
if "--prestarted" in sys.orig_argv:
    import tests.bench.profiled_rank
"""
COLUMNS = ("first line", "ranks", "first step")


@dataclass
class Start:
    """When what was seen, in seconds; and all lines with theirs."""

    seen: dict[str, float] = field(default_factory=dict)
    lines: list[tuple[float, str]] = field(default_factory=list)


def write_run(folder: Path, shape: str, length: int) -> None:
    """A configuration and 200 conversations."""
    chats = [
        [{"role": "user", "content": f"What comes after {at}?"}, {"role": "assistant", "content": f"It is {at + 1}."}]
        for at in range(200)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    settings = {
        "base_model": f"random:{shape}",
        "output_dir": "run",
        "output": {"overwrite": "delete"},
        "dataset": {"path": "chats.jsonl", "max_length": length, "packing": True, "cache_dir": "cache"},
        "training": {"max_steps": 2, "batch_size": 1, "logging_steps": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))


def start_once(folder: Path, tree: Path, arguments: list[str]) -> Start:
    """One run until its first step is recorded; it is then stopped."""
    metrics, found = folder / "run" / "metrics.jsonl", Start()
    metrics.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "launcher.cli", "train", "run.yaml", *arguments]
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                found.lines.append((time.monotonic() - began, line.rstrip()))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        while process.poll() is None and time.monotonic() - began < PATIENCE_S:
            if metrics.exists() and b"train/loss" in metrics.read_bytes():
                found.seen["first step"] = time.monotonic() - began
                break
            time.sleep(POLL_S)
        time.sleep(0.5)  # its lines come by another way
        process.send_signal(signal.SIGTERM)
        process.wait()
        reader.join(timeout=5.0)
    for when, line in found.lines:
        found.seen.setdefault("first line", when)
        if line.startswith("world "):
            found.seen.setdefault("ranks", when)
    if "first step" not in found.seen:
        raise SystemExit("\n".join(["no first step was recorded", *(line for _, line in found.lines)]))
    return found


def profile_once(folder: Path, arguments: list[str]) -> str:
    """What tests/bench/profiled_rank.py finds in one more start."""
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(PROFILED)
    os.environ["PYTHONPATH"] = f"{folder / 'first'}:{os.environ.get('PYTHONPATH', '')}"
    start_once(folder, ROOT, arguments)
    return (folder / "profile").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--profile", action="store_true", help="print where the last start's time went")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--functions", action="store_true", help="one more start, and what its parts were spent on")
    options = parser.parse_args()
    arguments = [*options.settings, f"--num-gpus={options.ranks}", *["--verbose"] * options.profile]
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name), options.shape, options.length)
        starts = [start_once(Path(name), options.tree, arguments) for _ in range(options.runs + 1)]
        if options.functions:
            profile = profile_once(Path(name), arguments)
    print(f"{options.shape}, {options.ranks} rank(s), seconds   " + "".join(f"{name:>12}" for name in COLUMNS))
    for label, start in zip(["(first)", *map(str, range(1, len(starts)))], starts, strict=True):
        print(f"{label:<34}" + "".join(f"{start.seen.get(name, float('nan')):12.2f}" for name in COLUMNS), flush=True)
    if len(starts) > 1:
        medians = [statistics.median(start.seen.get(name, float("nan")) for start in starts[1:]) for name in COLUMNS]
        print(f"{'median':<34}" + "".join(f"{median:12.2f}" for median in medians))
    for when, line in starts[-1].lines if options.profile else []:
        print(f"{when:7.2f}  {line}")
    if options.functions:
        print(profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
