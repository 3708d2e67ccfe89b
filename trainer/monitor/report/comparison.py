"""Write a page that compares several runs: overlaid curves, results, and settings that differ."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.contract.output_files import check_output_file
from trainer.contract.whole_files import write_text_atomic
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.charts import Chart, build_charts, render_chart, render_template
from trainer.monitor.report.curves import HeldOutLosses, detect_batch_unit
from trainer.monitor.report.recorded import flatten, format_value, read_answers, read_settings
from trainer.monitor.report.write import (
    ANSWERS,
    TEMPLATE,
    compute_median_rate,
    extract_metric_values,
    sum_training_seconds,
)

PAGE = "runs.html"
MAX_RUNS = 8
"""Maximum number of runs on a page, limited by distinguishable colors."""
IGNORED_DIFFERENCES = ("output_dir", "logging.run_name")
RESULT_HEADERS = ("run", "steps", "held-out loss", "lowest", "training loss", "speed of a rank", "peak memory", "time")


@dataclass(frozen=True)
class RunData:
    name: str
    records: list[Record]
    settings: dict[str, Any]
    answers: dict[str, dict[str, str]]


def write_comparison_page(folders: Sequence[Path], page: Path) -> Path:
    """Write an HTML comparison to `page`, and return `page`. Raises UserError if `page` exists and is not HTML."""
    if len(folders) > MAX_RUNS:
        raise UserError(f"zerolora report: {len(folders)} runs, but at most {MAX_RUNS} fit on a page; pass fewer runs")
    runs = [_read_run(folder, name) for folder, name in zip(folders, _name_runs(folders), strict=True)]
    check_output_file(page, str(page))
    if page.is_file() and page.stat().st_size and b"<html" not in page.read_bytes()[:1000]:
        raise UserError(f"--output {page}: already exists with other content; use another file, or remove this one")
    runs.sort(key=_sort_key)
    text = render_template(
        TEMPLATE,
        title=f"{len(runs)} runs",
        subtitle=" · ".join(run.name for run in runs),
        result_heads=RESULT_HEADERS,
        results=[_build_result_row(run) for run in runs],
        figures=[render_chart(chart) for chart in overlay_charts(runs)],
        answers=_collect_answers(runs),
        setting_heads=("setting", *(run.name for run in runs)),
        differences=_list_differences(runs),
    )
    write_text_atomic(page, text)
    return page


def _sort_key(run: RunData) -> tuple[bool, float]:
    """Return a key that sorts runs by final held-out loss; runs without one follow, by training loss."""
    held_out, losses = HeldOutLosses.from_records(run.records), extract_metric_values(run.records, "train/loss")
    return held_out is None, held_out.after if held_out else _compute_final_loss(losses) if losses else math.inf


def _compute_final_loss(losses: list[float]) -> float:
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _read_run(folder: Path, name: str) -> RunData:
    records = read_metrics(folder)
    if not records:
        raise UserError(f"{folder}: metrics.jsonl is empty, because no step has finished yet; wait for the first step")
    return RunData(name, records, read_settings(folder), read_answers(folder / ANSWERS))


def _name_runs(folders: Sequence[Path]) -> list[str]:
    """Name folders by their paths relative to the common parent."""
    resolved = [Path(os.path.realpath(folder)) for folder in folders]
    if repeated := [folder for folder, real in zip(folders, resolved, strict=True) if resolved.count(real) > 1]:
        raise UserError(f"{repeated[-1]}: is listed twice; list each run once")
    parent = os.path.commonpath([folder.parent for folder in resolved])
    return [str(folder.relative_to(parent)) for folder in resolved]


def overlay_charts(runs: Sequence[RunData]) -> list[Chart]:
    overlays: dict[str, Chart] = {}
    for index, run in enumerate(runs):
        for chart in build_charts(run.records):
            kept = [curve for curve in chart.curves if curve.kind != "pale"]
            labels = [run.name if curve.kind == "line" and chart.is_wide else "" for curve in kept]
            curves = [replace(curve, color=f"run{index}", label=name) for curve, name in zip(kept, labels, strict=True)]
            before = overlays.get(chart.title, replace(chart, curves=()))
            unit = chart.unit if chart.unit == before.unit else "in each run's unit"
            overlays[chart.title] = replace(before, curves=(*before.curves, *curves), unit=unit)
    return [
        replace(chart, unit=f"{chart.unit}, held out dashed") if chart.is_wide else chart for chart in overlays.values()
    ]


def _build_result_row(run: RunData) -> list[str]:
    held_out, losses = HeldOutLosses.from_records(run.records), extract_metric_values(run.records, "train/loss")
    rate, unit = compute_median_rate(run.records), detect_batch_unit(run.records)
    memory = extract_metric_values(run.records, "memory/peak_gib")
    return [
        run.name,
        f"{max(record['step'] or 0 for record in run.records):,.0f}",
        f"{held_out.before:.4f} → {held_out.after:.4f}" if held_out else "",
        f"{held_out.lowest:.4f}" if held_out else "",
        f"{_compute_final_loss(losses):.4f}" if losses else "",
        f"{rate:,.{unit.digits}f} {unit.name}/s" if rate else "",
        f"{max(memory):.2f} GiB" if memory else "",
        str(timedelta(seconds=round(sum_training_seconds(run.records)))),
    ]


def _list_differences(runs: Sequence[RunData]) -> list[list[str]]:
    settings = [flatten(run.settings) for run in runs]
    rows = [
        [name, *(format_value(values_by_name[name]) if name in values_by_name else "" for values_by_name in settings)]
        for name in dict.fromkeys(name for values_by_name in settings for name in values_by_name)
        if name not in IGNORED_DIFFERENCES
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


def _collect_answers(runs: Sequence[RunData]) -> dict[str, dict[str, str]]:
    """Return {prompt: {run: answer after training}}, and the base model's answer as "before" if all runs share it."""
    answers = {}
    for prompt in dict.fromkeys(prompt for run in runs for prompt in run.answers):
        after = {run.name: run.answers[prompt]["after"] for run in runs if "after" in run.answers.get(prompt, {})}
        before = {run.answers[prompt]["before"] for run in runs if "before" in run.answers.get(prompt, {})}
        if after:
            answers[prompt] = ({"before": before.pop()} if len(before) == 1 else {}) | after
    return answers
