"""The figures of docs/lab/scu.md from what its runs measured.

    python -m tests.bench.scu_figures publish RUNS FILE.json.gz    every run below the folder RUNS, in one file
    python -m tests.bench.scu_figures show FILE.json.gz            tables and statements, as `zerolora compare` has them
    python -m tests.bench.scu_figures draw FILE.json.gz FOLDER     its plots, in FOLDER/EXPERIMENT

A file holds, for each run: its settings, the loss sum (nats, to a thousandth) of each held-out document at each
evaluation and at each scale of the finished adapter, loss and KL sums of the texts, and the controller's records to
five digits.
"""

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.measured_run import DOCUMENTS_FILE
from benchmarks.compare.plots import draw_comparison
from benchmarks.compare.report import write_results
from benchmarks.compare.results import TRAINING_MEAN_OVER, Comparison, Result
from benchmarks.compare.trials import Setting, Trial
from trainer.config import RunConfig, ScuSection

CURVE = ("step", "data_bpt", "param_bpt", "s_smoothed", "kl_bits", "kl_smoothed", "lambda", "error", "reg_loss")
SIGMA = float(ScuSection().sigma)
LAST = 50
"""Steps over which K of the steps' own reference text is averaged."""
ORDER = ("none", "fixed", "linear", "cosine", "pi")


def publish(runs: Path, file: Path) -> None:
    found = []
    for documents in sorted(runs.glob(f"*/*/{DOCUMENTS_FILE}")):
        folder = documents.parent
        written = json.loads(documents.read_text(encoding="utf-8"))
        for entry in [*written["evaluations"], *written["scaled"], *written["texts"]]:
            for name in ("loss_sums", "kl_sums"):
                if name in entry:
                    entry[name] = [round(value, 3) for value in entry[name]]
        records = json.loads((folder / "scu_metrics.json").read_text(encoding="utf-8"))
        curve = [{name: float(f"{record[name]:.5g}") for name in CURVE if name in record} for record in records]
        config = json.loads((folder / "training_config.json").read_text(encoding="utf-8"))
        for name in ("base_model", "output_dir"):
            config[name] = Path(config[name]).name
        for source in (config["dataset"], config["dataset"]["evaluation"]):
            source["path"] = "/".join(Path(source["path"]).parts[-2:])
        config["dataset"]["cache_dir"] = "cache"
        fitted = json.loads((folder / "scu_config.json").read_text(encoding="utf-8")).get("fitted")
        found.append({"experiment": folder.parent.name, "config": config, "fitted": fitted, "curve": curve, **written})
    with gzip.open(file, "wt", encoding="utf-8", compresslevel=9) as out:
        json.dump(found, out, separators=(",", ":"))
    print(f"{file}: {len(found)} runs, {file.stat().st_size / 2**20:.2f} MiB")


def read(file: Path) -> dict[str, Comparison]:
    """Experiment -> its comparison."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        runs = json.load(text)
    found: dict[str, list[Result]] = {}
    for run in runs:
        targets = {
            other["config"]["scu"]["target"]
            for other in runs
            if other["experiment"] == run["experiment"] and other["config"]["scu"]["controller"] == "pi"
        }
        found.setdefault(run["experiment"], []).append(_result(run, several=len(targets) > 1))
    return {name: Comparison(sorted(results, key=_place), draws=2000) for name, results in found.items()}


def _place(result: Result) -> tuple[int, float, int]:
    setting = result.trial.setting
    return ORDER.index(setting.controller), setting.lambda_ or setting.target or 0.0, result.trial.seed


def _known_settings(values: dict[str, Any], section: Any) -> dict[str, Any]:
    """Leave out settings that were removed since."""
    kinds = {name: field.annotation for name, field in section.model_fields.items() if name in values}
    return {
        name: _known_settings(values[name], kind) if hasattr(kind, "model_fields") else values[name]
        for name, kind in kinds.items()
    }


def _result(run: dict[str, Any], *, several: bool) -> Result:
    config = RunConfig.model_validate(_known_settings(run["config"], RunConfig))
    scu = config.scu
    ends = {"fixed": float(scu.lambda_start), "linear": scu.lambda_max, "cosine": scu.lambda_max}
    target = scu.target if scu.controller == "pi" and scu.target != "auto" else None
    setting = Setting(scu.measure, scu.controller, ends.get(scu.controller), target, several and target is not None)
    trial = Trial(setting, config.seed, Path(), (), config)
    curve = [record | {"step": int(record["step"])} for record in run["curve"]]
    # What `_held` shows of scu.scale_to_target has no place of its own in a result.
    curve[-1]["kept"] = (run.get("fitted") or {}).get("factor", 1.0)
    sums = [
        np.array([entry["loss_sums"] for entry in run[name]], dtype=np.float64) for name in ("evaluations", "scaled")
    ]
    texts = None
    if run["texts"]:
        kl, losses = (np.array([entry[name] for entry in run["texts"]]) for name in ("kl_sums", "loss_sums"))
        texts = {"tokens": float(sum(run["text_tokens"])), "kl": kl, "losses": losses}
    steps = [entry["step"] for entry in run["evaluations"]]
    tokens_D = np.array(run["target_tokens"], dtype=np.float64)
    return Result(trial, steps, sums[0], tokens_D, curve, sums[1] if len(sums[1]) else None, texts)


def show(file: Path) -> None:
    for name, comparison in read(file).items():
        seeds = {result.trial.seed for result in comparison.results}
        print(
            f"## {name}: {len(comparison.results)} runs, seeds {sorted(seeds)}, {len(comparison.tokens_D)} documents\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            print(write_results(comparison, Path(folder))[0].read_text(encoding="utf-8"))
        print(_against_none(comparison))
        print(_by_sigma(comparison))
        print(_held(comparison))


def _against_none(comparison: Comparison) -> str:
    """At the end, every setting minus none, over documents and over seeds."""
    lines = []
    for none in comparison.find("none")[:1]:
        for setting in comparison.by_setting:
            found = comparison.difference(setting, none, "final")
            if setting != none and found is not None and found.over_seeds is not None:
                low, high = found.over_seeds
                lines.append(
                    f"- at the end, {setting.label} - none: {found.text('+')}, over seeds [{low:+.4f}, {high:+.4f}]"
                )
    return "\n".join(lines) + "\n"


def _by_sigma(comparison: Comparison) -> str:
    """What S and lambda of the same runs would be called with the sigma that is the default now."""
    lines = [
        f"Means of the last {TRAINING_MEAN_OVER} steps; lambda / sigma^2, which is what acts, is the same:",
        "",
        "| setting | seed | highest Ŝ | at step | sigma | λ | S | λ S | sigma now | λ | S | λ S |",
        f"| --- |{' ---: |' * 11}",
    ]
    for run in comparison.results:
        if "param_bpt" not in run.records[-1]:
            continue
        last, was = run.records[-TRAINING_MEAN_OVER:], float(run.trial.config.scu.sigma)
        data, held = (float(np.mean([record[name] for record in last])) for name in ("data_bpt", "param_bpt"))
        highest = max(run.records, key=lambda record: float(record["s_smoothed"]))
        cells = [run.trial.setting.label, str(run.trial.seed), f"{highest['s_smoothed']:.4f}", str(highest["step"])]
        for sigma in (was, SIGMA):
            lambda_, bits = last[-1]["lambda"] * (sigma / was) ** 2, held * (was / sigma) ** 2
            ratio = bits / (bits + data)
            cells += [f"{sigma:g}", f"{lambda_:.3g}", f"{ratio:.4f}", f"{lambda_ * ratio:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _held(comparison: Comparison) -> str:
    """K of each run under kl on text that it was not held on, at the end and where it would have been stopped.

    Compared with every fixed lambda: both stopped early, the difference paired.
    """
    runs = [run for run in comparison.results if run.trial.setting.measure == "kl" and run.trial.setting.target]
    if not runs:
        return ""
    lines = [
        f"| target | seed | of the update | K on unseen text | over the target | of the steps' own text (last {LAST}) "
        "| λ at its largest from step | other texts | best BPT | K there | over the target | other texts there |",
        f"| --- |{' ---: |' * 11}",
    ]
    for run in runs:
        at, target = run.index("best"), float(run.trial.setting.target or 0.0)
        kl, rise = run.forgetting(len(run.steps) - 1)
        kl_there, rise_there = run.forgetting(at)
        assert kl is not None and rise is not None and kl_there is not None and rise_there is not None
        own = float(np.mean([record["kl_bits"] for record in run.records[-LAST:]]))
        most = [record["step"] for record in run.records if record["lambda"] >= run.trial.config.scu.lambda_max]
        cells = [
            f"{target:g}",
            str(run.trial.seed),
            f"{run.records[-1]['kept']:.2f}",
            f"{kl:.4f}",
            f"{kl / target:.2f}",
        ]
        cells += [f"{own / target:.2f}", str(most[0]) if most else "", f"{rise:+.4f}", f"{run.bpt('best'):.4f}"]
        lines.append(
            "| " + " | ".join([*cells, f"{kl_there:.4f}", f"{kl_there / target:.2f}", f"{rise_there:+.4f}"]) + " |"
        )
    for setting, every in comparison.by_setting.items():
        there = np.array([run.forgetting(run.index("best")) for run in every], dtype=np.float64).mean(0)
        lines.append(f"- at the best evaluation, {setting.label}: K {there[0]:.4f}, other texts {there[1]:+.4f}")
    for setting in dict.fromkeys(run.trial.setting for run in runs):
        for other in comparison.find("fixed"):
            found = comparison.difference(setting, other, "stopped")
            if found is not None and found.over_seeds is not None:
                low, high = found.over_seeds
                seeds = f"over seeds [{low:+.4f}, {high:+.4f}]"
                lines.append(f"- stopped BPT, {setting.label} - {other.label}: {found.text('+')}, {seeds}")
    return "\n".join(lines) + "\n"


def draw(file: Path, folder: Path) -> None:
    for name, comparison in read(file).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        print("\n".join(map(str, draw_comparison(comparison, folder / name))))


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        publish(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] == "draw":
        draw(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        show(Path(sys.argv[2]))
