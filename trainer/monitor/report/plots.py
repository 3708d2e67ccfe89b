"""The charts of a run as PNG files, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainer.monitor.report.charts import Chart, number

BLUE, ORANGE, GREEN, GREY, INK = "#2f6db3", "#d9822b", "#3b8f6b", "#8a94a3", "#27303d"
STYLE = matplotlib.rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)
SIZE_INCHES, WIDE_INCHES = (7.0, 3.5), (13.0, 4.4)
DOTS_PER_INCH = 150


COLOURS = {"blue": BLUE, "orange": ORANGE, "green": GREEN}
STROKES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2},
    "pale": {"linewidth": 0.9, "alpha": 0.3},
    "dashed": {"linewidth": 1.4, "linestyle": "--"},
    "dots": {"linestyle": "none", "marker": "o", "markersize": 7, "zorder": 5},
}
"""Line style of each kind of curve (trainer/monitor/report/charts.py)."""


def draw_plots(charts: Sequence[Chart], folder: Path) -> None:
    """Write a PNG of each chart into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        with matplotlib.rc_context(STYLE):
            # A Figure without pyplot needs no display and no global state.
            figure = Figure(figsize=WIDE_INCHES if chart.wide else SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
            draw_chart(figure.add_subplot(), chart)
            figure.savefig(folder / f"{chart.name}.png")


def draw_chart(axes: Any, chart: Chart) -> None:
    """Draw the curves, band, axes and legend of a chart."""
    axes.set_title(chart.title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
    axes.margins(x=0.02)
    for curve in chart.curves:
        label, line = curve.label or None, curve.line
        axes.plot(line.steps, line.values, color=COLOURS[curve.colour], label=label, **STROKES[curve.kind])
    if chart.band:
        axes.axhspan(*chart.band, color=ORANGE, alpha=0.15, linewidth=0, label="deadband")
    if chart.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axes.set_ylim(bottom=chart.low)
    if axes.get_legend_handles_labels()[1]:
        # Next to the title, where it covers no data.
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.01, 0.99), ncols=4, fontsize=9.5, handlelength=1.6, columnspacing=1.4
        )
