"""The plots of a run, drawn with matplotlib in one style: raw values pale, their running mean strong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainer.monitor.metrics import Record
from trainer.monitor.report.curves import (
    SPREAD_FOR_LOG_SCALE,
    Series,
    counted_in,
    held_out_words,
    running_mean,
    series,
    window_for,
)

BLUE, ORANGE, GREEN, GREY, INK = "#2f6db3", "#d9822b", "#3b8f6b", "#8a94a3", "#27303d"
STYLE = {
    "font.size": 10.5,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c3cad4",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ebf0",
    "grid.linewidth": 0.8,
    "xtick.color": "#5b6675",
    "ytick.color": "#5b6675",
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}
SIZE_INCHES, WIDE_INCHES = (7.0, 3.5), (13.0, 4.4)
DOTS_PER_INCH = 150


def draw_plots(records: list[Record], folder: Path, *, deadband: float | None = None) -> dict[str, Path]:
    """Write a PNG into `folder` for every plot that the records have values for; title -> file, in reading order.

    `deadband` is the half-width of the band around the SCU's target in which lambda rests.
    """
    plots: list[tuple[str, str, tuple[str, ...], Callable[[Any, list[Record]], None]]] = [
        ("Loss", "loss", ("train/loss", "eval/loss"), _draw_loss),
        ("Learning rate", "learning_rate", ("train/learning_rate",), _draw_learning_rate),
        ("Gradient norm", "gradient_norm", ("train/grad_norm",), _draw_gradient_norm),
        ("Throughput", "throughput", (counted_in(records).rate,), _draw_throughput),
        ("Peak memory", "memory", ("memory/peak_gib",), _draw_memory),
        ("SCU: S", "scu_s", ("scu/s_ratio",), lambda axes, rows: _draw_s(axes, rows, deadband)),
        ("SCU: K, adapter from base", "scu_kl", ("scu/kl_bits",), _draw_k),
        ("SCU: λ", "scu_lambda", ("scu/lambda",), _draw_lambda),
        ("SCU: DataBPT, information in the data", "scu_data_bpt", ("scu/data_bpt",), _draw_data_bits),
        ("SCU: ParamBPT, information in the adapter", "scu_param_bpt", ("scu/param_bpt",), _draw_parameter_bits),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for title, name, metrics, draw in plots:
        if not any(len(series(records, metric).finite()) for metric in metrics):
            continue
        with matplotlib.rc_context(STYLE):
            # A Figure of its own needs no pyplot, hence no display and no global state.
            figure = Figure(
                figsize=WIDE_INCHES if name == "loss" else SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained"
            )
            axes = figure.add_subplot()
            axes.set_title(title)
            axes.set_xlabel("optimizer step")
            axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
            axes.margins(x=0.02)
            draw(axes, records)
            figure.savefig(folder / f"{name}.png")
        drawn[title] = folder / f"{name}.png"
    return drawn


def _draw_loss(axes: Any, records: list[Record]) -> None:
    training, held_out = series(records, "train/loss"), series(records, "eval/loss").finite()
    _draw_with_mean(axes, training, BLUE, "training")
    if len(held_out):
        # Nothing was measured between the points.
        axes.plot(held_out.steps, held_out.values, ":", color=ORANGE, linewidth=1.0, alpha=0.6)
        label = held_out_words(held_out)
        axes.plot(held_out.steps, held_out.values, "o", color=ORANGE, markersize=7, label=label, zorder=5)
    axes.set_ylabel(f"loss ({counted_in(records).loss})")
    _legend(axes)


def _draw_learning_rate(axes: Any, records: list[Record]) -> None:
    rate = series(records, "train/learning_rate")
    axes.plot(rate.steps, rate.values, color=BLUE, linewidth=2)
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_short_power))


def _draw_gradient_norm(axes: Any, records: list[Record]) -> None:
    norm = series(records, "train/grad_norm")
    _draw_with_mean(axes, norm, BLUE, "before clipping")
    _scale(axes, norm)
    axes.set_ylabel("gradient norm (L2)")
    _legend(axes)


def _draw_throughput(axes: Any, records: list[Record]) -> None:
    counted = counted_in(records)
    rate = series(records, counted.rate)
    _draw_with_mean(axes, rate, GREEN, "per rank")
    axes.set_ylabel(f"{counted.name}/s per rank")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.{counted.digits}f}"))
    _legend(axes)


def _draw_memory(axes: Any, records: list[Record]) -> None:
    memory = series(records, "memory/peak_gib")
    axes.plot(memory.steps, memory.values, color=GREEN, linewidth=2)
    axes.fill_between(memory.steps, memory.values, color=GREEN, alpha=0.08, linewidth=0)
    axes.set_ylabel("peak memory of rank 0 (GiB)")
    axes.set_ylim(0, 1.15 * np.nanmax(memory.values))


def _draw_s(axes: Any, records: list[Record], deadband: float | None) -> None:
    s_ratio, target, smoothed = (series(records, f"scu/{name}") for name in ("s_ratio", "target", "s_smoothed"))
    axes.plot(s_ratio.steps, 100 * s_ratio.values, color=BLUE, alpha=0.3, linewidth=1, label="S of the step")
    if len(smoothed):
        axes.plot(smoothed.steps, 100 * smoothed.values, color=BLUE, linewidth=2, label="S smoothed")
    if len(target):
        axes.plot(target.steps, 100 * target.values, color=ORANGE, linewidth=1.4, linestyle="--", label="target")
        if deadband:
            low, high = 100 * (target.values - deadband), 100 * (target.values + deadband)
            axes.fill_between(target.steps, low, high, color=ORANGE, alpha=0.15, linewidth=0, label="deadband")
    axes.set_ylabel("S (%)")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _draw_k(axes: Any, records: list[Record]) -> None:
    _draw_with_mean(axes, series(records, "scu/kl_bits"), BLUE, "K of the step")
    target = series(records, "scu/target")
    if len(target):
        axes.plot(target.steps, target.values, color=ORANGE, linewidth=1.4, linestyle="--", label="target")
    axes.set_ylabel("bits/token of reference text")
    _legend(axes)


def _draw_lambda(axes: Any, records: list[Record]) -> None:
    found = series(records, "scu/lambda")
    axes.plot(found.steps, found.values, color=BLUE, linewidth=2)
    _scale(axes, found)
    axes.set_ylabel("λ")


def _draw_data_bits(axes: Any, records: list[Record]) -> None:
    _draw_with_mean(axes, series(records, "scu/data_bpt"), BLUE, "per step")
    axes.set_ylabel("bits/token")
    _legend(axes)


def _draw_parameter_bits(axes: Any, records: list[Record]) -> None:
    # Apart from DataBPT: at an S of 1 or 2 % it would be a line along the bottom of a common axis.
    bits = series(records, "scu/param_bpt")
    axes.plot(bits.steps, bits.values, color=BLUE, linewidth=2)
    axes.set_ylabel("bits/token")
    axes.set_ylim(bottom=0)


def _draw_with_mean(axes: Any, line: Series, color: str, label: str) -> None:
    """The values; where there are enough of them, pale, under their running mean."""
    window = window_for(len(line))
    if window is None:
        axes.plot(line.steps, line.values, color=color, linewidth=2, label=label)
        return
    axes.plot(line.steps, line.values, color=color, alpha=0.25, linewidth=0.9)
    mean = running_mean(line.values, window)
    axes.plot(line.steps, mean, color=color, linewidth=2, label=f"{label}, mean of {window} records")


def _legend(axes: Any) -> None:
    """In the line of the title, where it covers no data."""
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.99), ncols=4, fontsize=9.5, handlelength=1.6, columnspacing=1.4
    )


def _scale(axes: Any, line: Series) -> None:
    """From zero, or logarithmic where the values spread over more than a factor of 50."""
    values = line.finite().values
    if values.min() > 0 and values.max() / values.min() > SPREAD_FOR_LOG_SCALE:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _short_power(value: float, _: int) -> str:
    """0.0002 -> 2e-4."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return "0" if value == 0 else f"{mantissa.removesuffix('.0')}e{int(exponent)}"
