"""The charts of a run, and their rendering as SVG for the page.

Lines are drawn in a square of 1000 x 1000 that is stretched to the chart while stroke widths are not; labels are HTML
text next to it. Colours are CSS variables of the page, so that charts follow its light or dark mode.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from trainer.monitor.metrics import Record
from trainer.monitor.report.curves import (
    SPREAD_FOR_LOG_SCALE,
    Series,
    choose_window,
    find_unit,
    held_out_label,
    running_mean,
    series,
)

SIDE = 1000
MAX_POINTS = 1200
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """A series and its style: `kind` is line, pale, dashed or dots, `colour` a CSS class; no label, no legend entry."""

    line: Series
    kind: str
    colour: str
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves over the steps; the axis includes `low` and `high`, and `low=0` also allows a logarithmic axis."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    low: float | None = None
    high: float | None = None
    band: tuple[float, float] | None = None
    wide: bool = False

    @property
    def logarithmic(self) -> bool:
        """Whether all values are positive and spread over more than a factor of `SPREAD_FOR_LOG_SCALE`."""
        values = np.concatenate([curve.line.finite().values for curve in self.curves])
        return self.low == 0.0 and values.min() > 0 and values.max() / values.min() > SPREAD_FOR_LOG_SCALE


def charts(records: list[Record], *, deadband: float | None = None) -> list[Chart]:
    """Return a chart for every metric that has values, in reading order."""
    training, held_out = series(records, "train/loss"), series(records, "eval/loss").finite()
    loss = _mean_curves(training, "blue", "training")
    if len(held_out):
        loss += (Curve(held_out, "dashed", "orange"), Curve(held_out, "dots", "orange", held_out_label(records)))
    if len(steps := series(records, "eval/kept_step").values):
        saved = Series(steps[-1:], series(records, "eval/kept_loss").values[-1:])
        loss += (Curve(saved, "dots", "green", f"kept: step {int(steps[-1]):,}"),)
    unit = find_unit(records)
    memory, rate = series(records, "memory/peak_gib"), series(records, unit.rate)
    norm = series(records, "train/grad_norm")
    found = [
        Chart("Loss", unit.loss, loss, wide=True),
        _reward_chart(records, "margins", "Reward margin", "chosen - rejected, nats"),
        _reward_chart(records, "accuracies", "Reward accuracy", "chosen > rejected"),
        Chart("Learning rate", "", _line(records, "train/learning_rate"), low=0.0),
        Chart("Gradient norm", "L2", _mean_curves(norm, "blue", "before clipping"), low=0.0),
        Chart("Throughput", f"{unit.name}/s per rank", _mean_curves(rate, "green", "per rank"), low=0.0),
        Chart("Peak memory", "GiB of rank 0", (Curve(memory, "line", "green"),), low=0.0),
        *_scu_charts(records, deadband),
    ]
    kept = [replace(chart, curves=tuple(curve for curve in chart.curves if len(curve.line))) for chart in found]
    return [chart for chart in kept if any(len(curve.line.finite()) for curve in chart.curves)]


def _reward_chart(records: list[Record], name: str, title: str, unit: str) -> Chart:
    training = _mean_curves(series(records, f"train/rewards/{name}"), "blue", "training")
    held_out = series(records, f"eval/rewards/{name}").finite()
    curves = (*training, Curve(held_out, "dashed", "orange"), Curve(held_out, "dots", "orange", "held out"))
    return Chart(title, unit, curves, high=1.0 if name == "accuracies" else None, wide=True)


def _scu_charts(records: list[Record], deadband: float | None) -> list[Chart]:
    s_ratio, s_smoothed, target = (series(records, f"scu/{name}") for name in ("s_ratio", "s_smoothed", "target"))
    bits, bits_smoothed = series(records, "scu/kl_bits"), series(records, "scu/kl_smoothed")
    goal = 100 * target.values[-1] if len(target) else None
    band = (goal - 100 * deadband, goal + 100 * deadband) if goal is not None and deadband else None
    s_series = (_scale(s_ratio, 100), _scale(s_smoothed, 100), _scale(target, 100))
    s_curves = _scu_curves(*s_series, "S") if len(s_ratio) else ()
    k_curves = _scu_curves(bits, bits_smoothed, target, "K") if len(bits) else ()
    data = _mean_curves(series(records, "scu/data_bpt"), "blue", "per step")
    return [
        Chart("SCU: S", "%", s_curves, low=0.0, band=band),
        Chart("SCU: K, adapter from base", "bits per token of reference text", k_curves, low=0.0),
        Chart("SCU: λ", "", _line(records, "scu/lambda"), low=0.0),
        Chart("SCU: DataBPT, information in the data", "bits per token", data),
        # Not in one chart with DataBPT: at an S of 1 or 2 % it would be a line along the bottom of the axis.
        Chart("SCU: ParamBPT, information in the adapter", "bits per token", _line(records, "scu/param_bpt"), low=0.0),
    ]


def _scu_curves(measured: Series, smoothed: Series, target: Series, name: str) -> tuple[Curve, ...]:
    return (
        Curve(measured, "pale", "blue", f"{name} of the step"),
        Curve(smoothed, "line", "blue", f"{name} smoothed"),
        Curve(target, "dashed", "orange", "target"),
    )


def _line(records: list[Record], name: str) -> tuple[Curve, ...]:
    return (Curve(series(records, name), "line", "blue"),)


def _mean_curves(line: Series, colour: str, label: str) -> tuple[Curve, ...]:
    """Return pale curves of the raw values and their running mean, or only the values if they are few."""
    window = choose_window(len(line))
    if window is None:
        return (Curve(line, "line", colour, label),)
    mean = Series(line.steps, running_mean(line.values, window))
    raw = Curve(line, "pale", colour, f"{label}, each record")
    return raw, Curve(mean, "line", colour, f"mean of {window}")


def draw(chart: Chart) -> str:
    """Render the chart as HTML."""
    steps = np.concatenate([curve.line.steps for curve in chart.curves])
    values = np.concatenate([curve.line.finite().values for curve in chart.curves])
    low, high = float(values.min()), float(values.max())
    logarithmic = chart.logarithmic
    if not logarithmic:
        bounds = [bound for bound in (chart.low, chart.high, *(chart.band or ())) if bound is not None]
        low, high = min([low, *bounds]), max([high, *bounds])
    marks = _powers_of_ten(low, high) if logarithmic else _round_marks(low, high)
    bottom, top = min(low, marks[0]), max(high, marks[-1])
    first, last = float(steps.min()), float(steps.max())

    def across(step: float) -> float:
        return 0.5 if last == first else (step - first) / (last - first)

    def down(value: float) -> float:
        if logarithmic:
            return 1 - math.log(value / bottom) / math.log(top / bottom) if top > bottom else 0.5
        return 1 - (value - bottom) / (top - bottom)

    def place(step: float, value: float) -> tuple[str | None, str, float, float]:
        if not math.isfinite(value):
            return None, "", step, value  # a gap
        return f"{SIDE * across(step):.1f}", f"{SIDE * down(value):.1f}", step, value

    ticks = [mark for mark in _round_marks(first, last, whole=True) if first <= mark <= last]
    return render(
        "chart.html.jinja",
        chart=chart,
        side=SIDE,
        unit=f"{chart.unit}, by optimizer step" if chart.wide else chart.unit,
        marks=[(number(mark), down(mark)) for mark in marks],
        steps=[(f"{mark:,.0f}", across(mark)) for mark in ticks],
        # A logarithmic axis does not reach down to a band that begins at 0 or below.
        band=[down(min(max(value, bottom), top)) for value in reversed(chart.band)] if chart.band else None,
        curves=[(curve, list(map(place, *_thin(curve.line)))) for curve in chart.curves],
    )


def render(template: str, **content: Any) -> str:
    """Return a template of this folder with its content, escaped in HTML."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=".html" in template, trim_blocks=True)
    return environment.get_template(template).render(content)


def _thin(line: Series) -> tuple[list[float], list[float]]:
    """Reduce the curve to about `MAX_POINTS` points, keeping the lowest and highest of each stretch."""
    if len(line) <= MAX_POINTS:
        return line.steps.tolist(), line.values.tolist()
    kept: set[int] = {0, len(line) - 1}
    for part in np.array_split(np.arange(len(line)), MAX_POINTS // 2):
        known = part[np.isfinite(line.values[part])]
        if len(known):
            kept |= {int(known[np.argmin(line.values[known])]), int(known[np.argmax(line.values[known])])}
        else:
            kept.add(int(part[0]))
    order = sorted(kept)
    return line.steps[order].tolist(), line.values[order].tolist()


def _round_marks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers from at or below `low` to at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    rough = span / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    size = max(size, 1.0) if whole else size
    begin, end = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [mark * size for mark in range(begin, max(end, begin + 1) + 1)]


def _powers_of_ten(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [10.0**exponent for exponent in exponents[:: max(1, len(exponents) // TICKS)]]


def number(value: float) -> str:
    """Format a number for an axis: 1,500, 0.25, 2e-4."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 0.01:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _scale(line: Series, factor: float) -> Series:
    return Series(line.steps, factor * line.values)
