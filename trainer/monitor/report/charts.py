"""Build the charts of a run, and render them as SVG.

Lines are drawn in a 1000 x 1000 square that is stretched to the chart, without stretching stroke widths. Labels are
HTML text. Colors are CSS variables, so that charts follow the page's light or dark mode.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from trainer.config.yaml_core import read_yaml
from trainer.monitor.metrics import Record
from trainer.monitor.report.curves import (
    SPREAD_FOR_LOG_SCALE,
    Series,
    compute_running_mean,
    detect_batch_unit,
    extract_scores,
    extract_series,
    format_held_out_label,
)

SIDE = 1000
MAX_POINTS = 1200
TICKS = 5
MEANS_PER_RUN = 40
MIN_RECORDS_FOR_MEAN, MIN_WINDOW = 12, 5
CHARTS: list[dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml")).tree["charts"]


@dataclass(frozen=True)
class Curve:
    """A series and its style: a `kind` (line, pale, dashed or dots), a CSS class `color` and a legend `label`."""

    line: Series
    kind: str
    color: str
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves over optimizer steps. The y-axis includes `low` and `high`; `low=0` also allows a logarithmic axis."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    low: float | None = None
    high: float | None = None
    band: tuple[float, float] | None = None
    is_wide: bool = False
    is_leading: bool = False
    """Whether this chart is at the beginning of the page, like wide charts."""

    @property
    def is_logarithmic(self) -> bool:
        values = np.concatenate([curve.line.drop_nan().values for curve in self.curves])
        return self.low == 0.0 and values.min() > 0 and values.max() / values.min() > SPREAD_FOR_LOG_SCALE


def build_charts(records: list[Record], *, deadband: float | None = None) -> list[Chart]:
    """Return the charts in charts.yaml for which there is data; `deadband` is drawn as a band around SCU's target."""
    unit, target = detect_batch_unit(records), extract_series(records, "scu/target")
    kept_steps = extract_series(records, "eval/kept_step").values
    labels = {"name": unit.name, "loss": unit.loss, "rate": unit.rate, "held_out": format_held_out_label(records)}
    labels["kept"] = f"kept: step {int(kept_steps[-1]):,}" if len(kept_steps) else ""
    charts = []
    for row in CHARTS:
        built = [_build_curves(records, curve, labels) for curve in row["curves"]]
        curves = tuple(curve for curves in built for curve in curves if len(curve.line))
        is_measured = "needs" not in row or len(extract_series(records, row["needs"]))
        if is_measured and any(len(curve.line.drop_nan()) for curve in curves):
            band = None
            if row.get("banded") and deadband and len(target):
                band = (100 * (target.values[-1] - deadband), 100 * (target.values[-1] + deadband))
            unit_text = row.get("unit", "").format(**labels)
            charts.append(Chart(row["title"], unit_text, curves, row.get("low"), row.get("high"), band, "wide" in row))
    for name, (base, scores) in extract_scores(records).items():
        level = Series(scores.steps, np.full_like(scores.values, base))
        label = f"adapter, {scores.values[-1]:.4g}"
        curves = Curve(level, "dashed", "orange", f"base, {base:.4g}"), Curve(scores, "line", "blue", label)
        charts.append(Chart(name, "", (*curves, Curve(scores, "dots", "blue")), is_leading=True))
    return charts


def _build_curves(records: list[Record], row: dict[str, Any], labels: dict[str, str]) -> tuple[Curve, ...]:
    name, label = row["of"].format(**labels), row.get("label", "").format(**labels)
    color, kind = row.get("color", "blue"), row.get("as", "line")
    line = extract_series(records, name)
    if name == "eval/kept_loss":
        line = Series(extract_series(records, "eval/kept_step").values[-1:], line.values[-1:])
    elif name.startswith("eval/"):
        line = line.drop_nan()
    line = Series(line.steps, row.get("times", 1) * line.values)
    if kind != "mean" or len(line) < MIN_RECORDS_FOR_MEAN:
        return (Curve(line, "line" if kind == "mean" else kind, color, label),)
    window = max(len(line) // MEANS_PER_RUN, MIN_WINDOW) | 1  # odd, since the mean is centered
    mean = Series(line.steps, compute_running_mean(line.values, window))
    return Curve(line, "pale", color, f"{label}, each record"), Curve(mean, "line", color, f"mean of {window}")


def render_chart(chart: Chart) -> str:
    steps = np.concatenate([curve.line.steps for curve in chart.curves])
    values = np.concatenate([curve.line.drop_nan().values for curve in chart.curves])
    low, high = float(values.min()), float(values.max())
    is_logarithmic = chart.is_logarithmic
    if not is_logarithmic:
        bounds = [bound for bound in (chart.low, chart.high, *(chart.band or ())) if bound is not None]
        low, high = min([low, *bounds]), max([high, *bounds])
    value_ticks = _list_powers_of_ten(low, high) if is_logarithmic else _choose_ticks(low, high)
    bottom, top = min(low, value_ticks[0]), max(high, value_ticks[-1])
    first, last = float(steps.min()), float(steps.max())

    def x_fraction(step: float) -> float:
        return 0.5 if last == first else (step - first) / (last - first)

    def y_fraction(value: float) -> float:
        if is_logarithmic:
            return 1 - math.log(value / bottom) / math.log(top / bottom) if top > bottom else 0.5
        return 1 - (value - bottom) / (top - bottom)

    def place(step: float, value: float) -> tuple[str | None, str, float, float]:
        if not math.isfinite(value):
            return None, "", step, value  # a gap
        return f"{SIDE * x_fraction(step):.1f}", f"{SIDE * y_fraction(value):.1f}", step, value

    step_ticks = [mark for mark in _choose_ticks(first, last, integral=True) if first <= mark <= last]
    return render_template(
        "chart.html.jinja",
        chart=chart,
        side=SIDE,
        unit=f"{chart.unit}, by optimizer step" if chart.is_wide else chart.unit,
        marks=[(format_number(mark), y_fraction(mark)) for mark in value_ticks],
        steps=[(f"{mark:,.0f}", x_fraction(mark)) for mark in step_ticks],
        # Clip the band: a logarithmic axis has no 0.
        band=[y_fraction(min(max(value, bottom), top)) for value in reversed(chart.band)] if chart.band else None,
        curves=[(curve, list(map(place, *_downsample(curve.line)))) for curve in chart.curves],
    )


def render_template(template: str, **content: Any) -> str:
    """Render a template in this folder; HTML templates escape their content."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=".html" in template, trim_blocks=True)
    return environment.get_template(template).render(content)


def _downsample(series: Series) -> tuple[list[float], list[float]]:
    """Reduce the curve to about `MAX_POINTS` points, keeping the minimum and maximum of each segment."""
    if len(series) <= MAX_POINTS:
        return series.steps.tolist(), series.values.tolist()
    indices: set[int] = {0, len(series) - 1}
    for part in np.array_split(np.arange(len(series)), MAX_POINTS // 2):
        finite = part[np.isfinite(series.values[part])]
        if len(finite):
            indices |= {int(finite[np.argmin(series.values[finite])]), int(finite[np.argmax(series.values[finite])])}
        else:
            indices.add(int(part[0]))
    order = sorted(indices)
    return series.steps[order].tolist(), series.values[order].tolist()


def _choose_ticks(low: float, high: float, *, integral: bool = False) -> list[float]:
    span = (high - low) or abs(high) or 1.0
    rough = span / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    size = max(size, 1.0) if integral else size
    begin, end = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [mark * size for mark in range(begin, max(end, begin + 1) + 1)]


def _list_powers_of_ten(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [10.0**exponent for exponent in exponents[:: max(1, len(exponents) // TICKS)]]


def format_number(value: float) -> str:
    """Format a number for an axis: 1,500, 0.25, 2e-4."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 0.01:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
