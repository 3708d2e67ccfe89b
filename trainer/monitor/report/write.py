"""Write the report of a run, RUN/report.html."""

import math
import shlex
import statistics
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Template
from rich.markup import escape

from trainer.config import UserError
from trainer.config.errors import format_count
from trainer.config.yaml_core import read_yaml
from trainer.contract.output_files import check_output_file
from trainer.contract.restart_record import read_restarts
from trainer.contract.whole_files import write_json, write_text_atomic
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.charts import build_charts, render_chart, render_template
from trainer.monitor.report.curves import HeldOutLosses, detect_batch_unit, extract_scores, extract_series
from trainer.monitor.report.recorded import (
    list_changed_settings,
    read_answers,
    read_examples,
    read_run,
    read_settings,
    read_times,
    read_warnings,
    shorten_cache_path,
)
from trainer.monitor.report.sample_images import embed_sample_images

PAGE, TEMPLATE = "report.html", "page.html.jinja"
SUMMARY: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("summary.yaml")).tree
ANSWERS = "answers.json"
"""File with {prompt: {"before" or "after": answer}}."""
ANSWER_LABELS = ("before", "after")
DIFFUSERS = "pytorch_lora_weights.safetensors"
RESULTS = DIFFUSERS, "README.md", "adapter_model.safetensors"
FILES = (*RESULTS, "training_config.json", "run.json", "metrics.jsonl", "logs")
MAX_AVERAGED_RECORDS = 10
PAUSE_FACTOR, PAUSE_SLACK_S = 10.0, 600.0
MIN_PHASE_FRACTION = 0.01
"""Phases below this fraction of the total time are combined."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. Raises UserError if the run has no metrics."""
    records = read_metrics(run_dir)
    if not records:
        raise UserError(f"{run_dir}: metrics.jsonl is empty, because no step has finished yet; wait for the first step")
    check_output_file(run_dir / PAGE, str(run_dir / PAGE))
    config, run = read_settings(run_dir), read_run(run_dir)
    scu = config.get("scu", {})
    # The deadband of other laws is a ratio, and too narrow to be visible.
    is_drawn = scu.get("controller") == "pi" and scu.get("law", "published") == "published"
    charts = build_charts(records, deadband=scu.get("deadband") if is_drawn else None)
    restarts = [
        (f"step {restart.step}", f"{restart.reason}; resumed from {restart.checkpoint or 'the start'}")
        for restart in read_restarts(run_dir)
    ]
    next_commands = suggest_commands(str(run_dir), config) if config else []
    tables = [*build_summary_tables(records, config, run), ("Restarts", restarts), ("Next", next_commands)]
    changed, settings = list_changed_settings(config)
    page = render_template(
        TEMPLATE,
        title=config.get("logging", {}).get("run_name") or run_dir.resolve().name,
        subtitle=_format_subtitle(config, run),
        tiles=build_tiles(records, run),
        figures=[render_chart(chart) for chart in charts if chart.is_wide or chart.is_leading],
        answers={
            prompt: {when: texts[when] for when in ANSWER_LABELS}
            for prompt, texts in read_answers(run_dir / ANSWERS).items()
            if set(ANSWER_LABELS) <= set(texts)
        },
        sample_images=embed_sample_images(run_dir),
        changed=changed,
        settings=settings,
        warnings=read_warnings(run_dir, records),
        examples=read_examples(run_dir),
        details=[render_chart(chart) for chart in charts if not (chart.is_wide or chart.is_leading)],
        tables=[(title, rows) for title, rows in tables if rows],
        times=_combine_short_phases(read_times(run_dir)),
        files=[name for name in FILES if (run_dir / name).exists()],
    )
    write_text_atomic(run_dir / PAGE, page)
    return run_dir / PAGE


def suggest_commands(run_dir: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    folder, commands = shlex.quote(run_dir), []
    if config["adapter"] != "none":
        held_out = config["dataset"]["evaluation"] or config["dataset"]["val_split"]
        if not (Path(run_dir) / DIFFUSERS).exists():
            if held_out:
                commands.append(("evaluate", f"zerolora eval {folder}"))
            commands.append(("try it", f"zerolora generate {folder} --base 'your question'"))
        qat = config["training"].get("qat")
        commands.append(("merge", f"zerolora merge {folder}" + (f" --quantize {qat}" if qat else "")))
    if "tensorboard" in config["logging"]["report_to"]:
        commands.append(("curves", f"tensorboard --logdir {shlex.quote(f'{run_dir}/tensorboard')}"))
    return commands


def format_end_summary(
    run_dir: Path, settings: Mapping[str, Any], report: Path | None, before: float | None, after: float | None
) -> list[str]:
    lines = []
    if before is not None and after is not None:
        lines.append(f"held-out loss [bold]{before:.4f} -> {after:.4f}[/bold] ({after / before - 1:+.1%})")
    rows = [("model" if settings["adapter"] == "none" else "adapter", str(run_dir))]
    rows += [("report", str(report))] if report is not None else []
    rows += suggest_commands(str(run_dir), settings)
    return lines + [f"{name:<12} {escape(value)}" for name, value in rows]


def record_answer(run_dir: Path, prompt: str, when: str, answer: str) -> None:
    """Record an answer to a sample prompt for the report; `when` is "before" or "after" training."""
    path = run_dir / ANSWERS
    answers = read_answers(path)
    write_json(path, answers | {prompt: answers.get(prompt, {}) | {when: answer}})


def _combine_short_phases(times: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return (phase, seconds, fraction of the total), longest first, with short phases combined."""
    total = sum(times.values()) or 1.0
    phases = sorted(times.items(), key=lambda item: -item[1])
    short = [seconds for _, seconds in phases if seconds < MIN_PHASE_FRACTION * total]
    combined = [*phases[: len(phases) - len(short)], *([("others", sum(short))] if short else [])]
    return [(name, seconds, seconds / total) for name, seconds in combined]


def extract_metric_values(records: list[Record], name: str) -> list[float]:
    """Return the finite values of a metric in step order, using the last record of each step."""
    return list(map(float, extract_series(records, name).drop_nan().values))


def sum_training_seconds(records: list[Record]) -> float:
    """Return the seconds from the first record to the last, without pauses between a stop and a resume.

    A gap is a pause if it exceeds ten times the expected duration of its steps by more than ten minutes.
    """
    seconds = 0.0
    for before, after in pairwise(record for record in records if record.get("time") is not None):
        gap = (after["time"] or 0.0) - (before["time"] or 0.0)
        steps = (after["step"] or 0.0) - (before["step"] or 0.0)
        expected = steps * (after.get("perf/step_ms") or 0.0) / 1e3
        if steps == 0 or gap <= PAUSE_FACTOR * expected + PAUSE_SLACK_S:
            seconds += gap
    return seconds


def build_tiles(records: list[Record], run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, value, note) for the most important numbers: losses, throughput, memory and time."""
    tiles = []
    held_out, losses = HeldOutLosses.from_records(records), extract_metric_values(records, "train/loss")
    compared = [held_out.before, held_out.after] if held_out else []
    # A single batch's loss depends more on its text than on training.
    count = min(MAX_AVERAGED_RECORDS, len(losses) // 3) or 1
    means = [statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])] if len(losses) > 1 else []
    note_means = f", means of {count} records" if count > 1 else ""
    is_kept_known = len(extract_series(records, "eval/kept_step")) > 0
    kept_note = f", kept: step {held_out.kept_step:,}" if held_out and is_kept_known else ""
    for label, values, note in (("held-out loss", compared, kept_note), ("training loss", means, note_means)):
        if len(values) > 1:
            before, after = values
            change = f"{after / before - 1:+.1%}".replace("-", "−") if before else "from 0"  # noqa: RUF001
            tiles.append((label, f"{before:.3f} → {after:.3f}", change + note))
    rate, unit = compute_median_rate(records), detect_batch_unit(records)
    if rate:
        ranks, digits = run.get("world_size", 1), unit.digits
        note_rate = f"{rate:,.{digits}f} per rank, {ranks} ranks" if ranks > 1 else "median"
        tiles.append((f"{unit.name}/s", f"{rate * ranks:,.{digits}f}", note_rate))
    if memory := extract_metric_values(records, "memory/peak_gib"):
        tiles.append(("peak memory", f"{max(memory):.2f} GiB", "on rank 0"))
    steps = max(record["step"] or 0 for record in records)
    duration = timedelta(seconds=round(sum_training_seconds(records)))
    tiles.append(("time", str(duration), format_count(round(steps), "step")))
    return tiles


def build_summary_tables(
    records: list[Record], config: Mapping[str, Any], run: Mapping[str, Any]
) -> list[tuple[str, list[tuple[str, str]]]]:
    names = sorted({name for record in records for name in record})
    context: dict[str, Any] = {
        "config": config,
        "run": run,
        "unit": detect_batch_unit(records),
        "held_out": HeldOutLosses.from_records(records),
        "rate": compute_median_rate(records),
        "steps": max(record["step"] or 0 for record in records),
        "skipped": [name for name in names if name.startswith("data/skipped/")],
        "of": partial(extract_metric_values, records),
        "shorten_cache_path": shorten_cache_path,
        "data_names": _format_data_names,
        "quote": shlex.join,
        "LN_2": math.log(2),
    }
    recorded = {"Model and data": config, "Ran on": run}
    tables = []
    for title, templates in SUMMARY.items():
        present = templates.items() if recorded.get(title, True) else ()
        rows = [(Template(name).render(context), Template(text).render(context)) for name, text in present]
        if title == "Results":
            scores = extract_scores(records).items()
            rows += [(name, f"before {base:.4f}, after {series.values[-1]:.4f}") for name, (base, series) in scores]
        tables.append((title, [row for row in rows if row[1]]))
    return [(title, rows) for title, rows in tables if rows]


def _format_subtitle(config: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    model = f"{shorten_cache_path(config['base_model'])} on {_format_data_names(config['dataset'])}" if config else ""
    started = f"started {run['started'][:16].replace('T', ' ')}" if run else ""
    return " · ".join(filter(None, (model, started)))


def _format_data_names(data: Mapping[str, Any]) -> str:
    return ", ".join(shorten_cache_path(str(source["path"])) for source in data["mix"] or [data])


def compute_median_rate(records: list[Record]) -> float | None:
    """Return a rank's median throughput in tokens or images per second; None if it was not recorded."""
    rates = extract_metric_values(records, detect_batch_unit(records).rate)
    return statistics.median(rates) if rates else None
