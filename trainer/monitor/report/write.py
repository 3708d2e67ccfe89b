"""The report of a run: the page RUN/report.html."""

import math
import shlex
import statistics
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.markup import escape

from trainer.config import UserError
from trainer.contract.output_files import check_output_file
from trainer.contract.restart_record import read_restarts
from trainer.contract.whole_files import write_json, write_whole
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.charts import charts, draw, render
from trainer.monitor.report.curves import IMAGES, TOKENS, BatchUnit, HeldOut, find_unit, series
from trainer.monitor.report.recorded import (
    changed_settings,
    hub_name,
    read_answers,
    read_examples,
    read_run,
    read_settings,
    read_times,
    read_warnings,
)
from trainer.monitor.report.sample_images import embed_sample_images

PAGE, TEMPLATE = "report.html", "page.html.jinja"
ANSWERS = "answers.json"
"""{prompt: {before or after: answer}}."""
WHEN = ("before", "after")
DIFFUSERS = "pytorch_lora_weights.safetensors"
RESULTS = DIFFUSERS, "README.md", "adapter_model.safetensors"
FILES = (*RESULTS, "training_config.json", "run.json", "metrics.jsonl", "logs")
SHOWN_MEAN = 10
PAUSE_FACTOR, PAUSE_SLACK_S = 10.0, 600.0
SHORT_PHASE = 0.01
"""Phases below this fraction of the time are shown as one."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. Raises UserError if the run has no metrics."""
    records = read_metrics(run_dir)
    if not records:
        raise UserError(f"{run_dir}: metrics.jsonl is empty, nothing was trained yet; wait for the first step")
    check_output_file(run_dir / PAGE, str(run_dir / PAGE))
    config, run = read_settings(run_dir), read_run(run_dir)
    scu = config.get("scu", {})
    # The other laws' deadband is a ratio, too narrow to be drawn.
    is_drawn = scu.get("controller") == "pi" and scu.get("law", "published") == "published"
    shown = charts(records, deadband=scu.get("deadband") if is_drawn else None)
    tables = summary_rows(records, config, run)
    restarts = [
        (f"step {restart.step}", f"{restart.reason}; resumed from {restart.checkpoint or 'the start'}")
        for restart in read_restarts(run_dir)
    ]
    tables.append(("Restarts", restarts))
    tables.append(("Next", next_commands(str(run_dir), config) if config else []))
    changed, settings = changed_settings(config)
    page = render(
        TEMPLATE,
        title=config.get("logging", {}).get("run_name") or run_dir.resolve().name,
        subtitle=_subtitle(config, run),
        tiles=tiles(records, run),
        figures=[draw(chart) for chart in shown if chart.wide],
        answers=_answers(run_dir),
        pictures=embed_sample_images(run_dir),
        changed=changed,
        settings=settings,
        warnings=read_warnings(run_dir, records),
        examples=read_examples(run_dir),
        details=[draw(chart) for chart in shown if not chart.wide],
        tables=[(title, rows) for title, rows in tables if rows],
        times=_long_phases(read_times(run_dir)),
        files=[name for name in FILES if (run_dir / name).exists()],
    )
    write_whole(run_dir / PAGE, page)
    return run_dir / PAGE


def next_commands(run_dir: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, command) pairs to run after training."""
    folder, commands = shlex.quote(run_dir), []
    if config["adapter"] != "none":
        held_out = config["dataset"]["evaluation"] or config["dataset"]["val_split"]
        if not (Path(run_dir) / DIFFUSERS).exists():
            if held_out:
                commands.append(("measure", f"zerolora eval {folder}"))
            commands.append(("try it", f"zerolora generate {folder} --base 'your question'"))
        qat = config["training"].get("qat")
        commands.append(("merge", f"zerolora merge {folder}" + (f" --quantize {qat}" if qat else "")))
    if "tensorboard" in config["logging"]["report_to"]:
        commands.append(("curves", f"tensorboard --logdir {shlex.quote(f'{run_dir}/tensorboard')}"))
    return commands


def end_summary(
    run_dir: Path, settings: Mapping[str, Any], report: Path | None, before: float | None, after: float | None
) -> list[str]:
    """Return the change of the held-out loss, the output paths, and commands to run next."""
    lines = []
    if before is not None and after is not None:
        lines.append(f"held-out loss [bold]{before:.4f} -> {after:.4f}[/bold] ({after / before - 1:+.1%})")
    lines.append(_row("model" if settings["adapter"] == "none" else "adapter", str(run_dir)))
    if report is not None:
        lines.append(_row("report", str(report)))
    commands = next_commands(str(run_dir), settings)
    return lines + [_row(name, command) for name, command in commands]


def _row(name: str, value: str) -> str:
    return f"{name:<12} {escape(value)}"


def record_answer(run_dir: Path, prompt: str, when: str, answer: str) -> None:
    """Record an answer to a sample prompt for the page; `when` is before or after."""
    path = run_dir / ANSWERS
    answers = read_answers(path)
    write_json(path, answers | {prompt: answers.get(prompt, {}) | {when: answer}})


def _answers(run_dir: Path) -> dict[str, dict[str, str]]:
    answers = read_answers(run_dir / ANSWERS).items()
    return {prompt: {when: at[when] for when in WHEN} for prompt, at in answers if set(WHEN) <= set(at)}


def _long_phases(times: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return (phase, seconds, fraction of the time), longest first, and the short ones as one."""
    whole = sum(times.values()) or 1.0
    found = sorted(times.items(), key=lambda item: -item[1])
    short = [seconds for _, seconds in found if seconds < SHORT_PHASE * whole]
    shown = [*found[: len(found) - len(short)], *([("others", sum(short))] if short else [])]
    return [(name, seconds, seconds / whole) for name, seconds in shown]


def metric_values(records: list[Record], name: str) -> list[float]:
    """Return the finite values of a metric in the order of the steps; the last record of a step counts."""
    by_step = {record["step"] or 0: record[name] for record in records if name in record}
    return [value for _, value in sorted(by_step.items()) if value is not None]


def training_seconds(records: list[Record]) -> float:
    """Return the seconds from the first record to the last, without pauses between interruption and resumption.

    A gap is a pause if it exceeds ten times the duration of its steps by more than ten minutes.
    """
    seconds = 0.0
    for before, after in pairwise(record for record in records if record.get("time") is not None):
        gap = (after["time"] or 0.0) - (before["time"] or 0.0)
        steps = (after["step"] or 0.0) - (before["step"] or 0.0)
        expected = steps * (after.get("perf/step_ms") or 0.0) / 1e3
        if steps == 0 or gap <= PAUSE_FACTOR * expected + PAUSE_SLACK_S:
            seconds += gap
    return seconds


def tiles(records: list[Record], run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, value, note) of the most important numbers: losses, throughput, memory, time."""
    shown = []
    held_out, losses = HeldOut.from_records(records), metric_values(records, "train/loss")
    compared = [held_out.before, held_out.after] if held_out else []
    # The losses of single batches depend more on their texts than on the training.
    count = min(SHOWN_MEAN, len(losses) // 3) or 1
    means = [statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])] if len(losses) > 1 else []
    of = f", means of {count} records" if count > 1 else ""
    kept = f", kept: step {held_out.kept_step:,}" if held_out and len(series(records, "eval/kept_step")) else ""
    for label, values, note in (("held-out loss", compared, kept), ("training loss", means, of)):
        if len(values) > 1:
            shown.append((label, f"{values[0]:.3f} → {values[-1]:.3f}", _change(values[0], values[-1]) + note))
    rate, unit = median_rate(records), find_unit(records)
    if rate:
        ranks, digits = run.get("world_size", 1), unit.digits
        each = f"{rate:,.{digits}f} on each of {ranks}" if ranks > 1 else "median"
        shown.append((f"{unit.name}/s", f"{rate * ranks:,.{digits}f}", each))
    memory = metric_values(records, "memory/peak_gib")
    if memory:
        shown.append(("peak memory", f"{max(memory):.2f} GiB", "of rank 0"))
    steps = max(record["step"] or 0 for record in records)
    shown.append(("time", duration(training_seconds(records)), f"{steps:,.0f} steps"))
    return shown


def summary_rows(
    records: list[Record], config: Mapping[str, Any], run: Mapping[str, Any]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the summary tables as (title, rows of name and value), without what the run did not record."""
    groups = [
        ("Model and data", _model_rows(config, find_unit(records)) if config else []),
        ("Training", _training_rows(records, config, run)),
        ("Results", _result_rows(records)),
        ("Ran on", _machine_rows(run) if run else []),
    ]
    return [(title, rows) for title, rows in groups if rows]


def _model_rows(config: Mapping[str, Any], unit: BatchUnit) -> list[tuple[str, str]]:
    lora, data = config["lora"], config["dataset"]
    rows = [("model", hub_name(config["base_model"]))]
    if config["adapter"] == "none":
        rows.append(("adapter", "none: all weights trained"))
    else:
        kinds = [kind for kind in ("rslora", "dora") if lora[kind]]
        targets = ", ".join(lora["target_modules"])
        rows.append(
            ("adapter", " ".join([config["adapter"], *kinds, f"r={lora['r']}, alpha={lora['alpha']:g}, {targets}"]))
        )
    if config["adapter"] == "qlora":
        bits = config["quantization"]
        twice = ", double quantisation" if bits["double_quant"] else ""
        blocks = "a scale for each row" if bits["bits"] == 8 else f"blocks of {bits['block_size']}{twice}"
        rows.append((f"{bits['bits']}-bit base", f"{bits['quant_type']}, {blocks}"))
    rows.append(("data", _data_names(data)))
    if data["evaluation"]:
        rows.append(("held out", hub_name(str(data["evaluation"]["path"]))))
    elif data["val_split"]:
        split = data["val_split"]
        rows.append(("held out", f"{split:,.0f} records" if split >= 1 else f"{split:.1%} of the records"))
    if unit is not IMAGES:
        size = f"up to {data['max_length']:,} tokens" + ", packed" * data["packing"]
    else:
        size = f"{config['image']['resolution']} pixels" + ", buckets" * config["image"]["buckets"]
    rows.append((unit.samples, size))
    return rows


def _training_rows(records: list[Record], config: Mapping[str, Any], run: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    epochs, steps = metric_values(records, "train/epoch"), max(record["step"] or 0 for record in records)
    planned = metric_values(records, "train/stopped_early_of")
    early = f" of {planned[-1]:,.0f}, stopped early" if planned else ""
    rows.append(("optimizer steps", f"{steps:,.0f}{early}" + (f" ({epochs[-1]:.2f} epochs)" if epochs else "")))
    skipped = sorted({name for record in records for name in record if name.startswith("data/skipped/")})
    if skipped:
        counts = ", ".join(f"{metric_values(records, name)[-1]:,.0f} of {name.rpartition('/')[2]}" for name in skipped)
        rows.append(("skipped records", counts))
    tokens, targets = metric_values(records, "train/tokens"), metric_values(records, "train/target_tokens")
    if tokens:
        with_loss = f", {targets[-1]:,.0f} of them with loss" if targets else ""
        rows.append(("tokens", f"{tokens[-1]:,.0f}{with_loss}"))
    if config:
        training, ranks = config["training"], run.get("world_size", 1)
        size, micro = training["batch_size"], training["gradient_accumulation_steps"]
        what, shared = find_unit(records).samples, config["parallel"]["sequence"]
        among = f"{ranks} ranks" + f" / {shared} per sequence" * (shared > 1)
        rows.append(("batch", f"{size * micro * ranks // shared} {what} = {size} x {micro} micro-steps x {among}"))
        rows.append(("learning rate", f"{training['learning_rate']:g}, {training['lr_scheduler']}"))
        stage, precision = config["zero"]["stage"], run.get("precision") or training["precision"]
        rows.append(("optimizer", f"{training['optimizer']}, precision {precision}, ZeRO stage {stage}"))
    return rows


def _result_rows(records: list[Record]) -> list[tuple[str, str]]:
    rows = []
    losses, held_out, unit = metric_values(records, "train/loss"), HeldOut.from_records(records), find_unit(records)
    if losses:
        rows.append(("training loss", f"first {losses[0]:.4f}, last {losses[-1]:.4f}, lowest {min(losses):.4f}"))
    if held_out:
        lowest = f"lowest {held_out.lowest:.4f} at step {held_out.lowest_step}"
        after = f"after {held_out.after:.4f} (step {held_out.kept_step})"
        rows.append(("held-out loss", f"before {held_out.before:.4f}, {after}, {lowest}"))
        if unit is TOKENS:
            bits = [loss / math.log(2) for loss in (held_out.before, held_out.after)]
            rows.append(("bits per token", f"before {bits[0]:.4f}, after {bits[1]:.4f}"))
    for name in dict.fromkeys(key.removeprefix("base/") for record in records for key in record if key[:5] == "base/"):
        found = [metric_values(records, f"{kind}/{name}") for kind in ("base", "eval")]
        if all(found):
            rows.append((name, f"before {found[0][0]:.4f}, after {found[1][-1]:.4f}"))
    if rate := median_rate(records):
        rows.append((f"{unit.name}/s per rank", f"{rate:,.{unit.digits}f} (median)"))
    s, target = metric_values(records, "scu/s_ratio"), metric_values(records, "scu/target")
    if s:
        aim = f", target {target[-1]:.3%}" if target else ""
        rows.append(("SCU S", f"first {s[0]:.3%}, last {s[-1]:.3%}{aim}"))
    return rows


def _machine_rows(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    packages = {"python": run["python"], **run["packages"]}
    return [
        ("started", run["started"]),
        ("devices", f"{run['world_size']} x {run['device_name']} ({run['device']})"),
        ("versions", ", ".join(f"{name} {number}" for name, number in packages.items())),
        ("commit", run["commit"] or "not a checkout"),
        ("command", shlex.join(run["command"])),
    ]


def _subtitle(config: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    words = []
    if config:
        words.append(f"{hub_name(config['base_model'])} on {_data_names(config['dataset'])}")
    if run:
        words.append(f"started {run['started'][:16].replace('T', ' ')}")
    return " · ".join(words)


def _data_names(data: Mapping[str, Any]) -> str:
    return ", ".join(hub_name(str(source["path"])) for source in data["mix"] or [data])


def median_rate(records: list[Record]) -> float | None:
    """Return the median tokens or images per second of one rank, which the slow first step does not distort."""
    rates = metric_values(records, find_unit(records).rate)
    return statistics.median(rates) if rates else None


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}".replace("-", "−") if before else "from 0"  # noqa: RUF001


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{int(minutes)} min {int(seconds) % 60} s"
    return f"{int(hours)} h {int(minutes) % 60} min"
