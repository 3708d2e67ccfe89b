"""Plots of a comparison: BPT with intervals by setting, BPT, S and lambda over time, the task over forgetting."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.compare.results import Comparison, Result, Values
from benchmarks.compare.trials import Setting
from trainer.scu.law import Form

BLUE, ORANGE, GREEN, GREY, INK = "#2f6db3", "#d9822b", "#3b8f6b", "#8a94a3", "#27303d"
STYLE = matplotlib.rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)
DOTS_PER_INCH = 150
PURPLE = "#7d5ba6"
RED = "#b23a48"
COLORS = {"none": INK, "fixed": GREY, "linear": GREEN, "cosine": PURPLE, "pi": ORANGE}
LINES = {"delta": "-", "factors": "--", "kl": "-"}
MOMENT_COLORS = {"final": ORANGE, "best": BLUE}
MEASURED = {"delta": "S", "factors": "S", "kl": "K, bits a token"}


def draw_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare_bpt, _curves, _scu and, if texts were measured, _forgetting.png into `folder`; return the paths."""
    height = 1.4 + 0.32 * len(comparison.by_setting)
    plots: dict[str, tuple[tuple[float, float], Callable[[Figure, Comparison], None]]] = {
        "compare_bpt": ((9.0, height), _draw_bpt),
        "compare_curves": ((9.0, 5.0), _draw_curves),
        "compare_scu": ((9.0, 7.0), _draw_scu),
    }
    if all(run.texts is not None for run in comparison.results):
        plots["compare_forgetting"] = (9.0, 5.0), _draw_forgetting
    paths = []
    for name, (size, draw) in plots.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
            draw(figure, comparison)
            figure.savefig(folder / f"{name}.png")
        paths.append(folder / f"{name}.png")
    return paths


def _draw_bpt(figure: Figure, comparison: Comparison) -> None:
    """Draw a row per setting: interval over documents as a bar, each seed's run as a pale dot."""
    axes = figure.add_subplot()
    axes.set_title("Held-out bits per token: intervals over documents, one pale dot per seed")
    settings = list(comparison.by_setting)
    for moment, shift in zip(MOMENT_COLORS, (-0.15, 0.15), strict=True):
        color = MOMENT_COLORS[moment]
        for row, setting in enumerate(settings):
            interval = comparison.bpt(setting, moment)
            axes.plot([interval.low, interval.high], [row + shift] * 2, color=color, linewidth=2.2)
            axes.plot([interval.value], [row + shift], "o", color=color, markersize=6, label="" if row else moment)
            values = [run.numbers()[f"{moment}_bpt"] for run in comparison.by_setting[setting]]
            axes.plot(values, [row + shift] * len(values), "o", color=color, markersize=3, alpha=0.45)
    axes.set_yticks(range(len(settings)), [setting.label for setting in settings])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("bits per held-out target token")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_curves(figure: Figure, comparison: Comparison) -> None:
    """Draw the mean over the seeds, with a band from the lowest to the highest seed."""
    axes = figure.add_subplot()
    axes.set_title("Held-out bits per token over the run: mean and range of the seeds")
    lowest, highest = np.inf, 0.0
    for setting, runs in comparison.by_setting.items():
        count = runs[0].trained
        steps, curves = runs[0].steps[:count], np.array([run.curve[:count] for run in runs])
        style = _style(comparison, setting)
        axes.plot(steps, curves.mean(0), label=setting.label, **style)
        axes.fill_between(steps, curves.min(0), curves.max(0), color=style["color"], alpha=0.1, linewidth=0)
        lowest, highest = min(lowest, curves.min()), max(highest, curves[:, 1:].max(initial=0.0))
    # The untrained model is far above all others and would hide their differences.
    axes.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.05 * (highest - lowest))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("bits per held-out target token")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def _draw_scu(figure: Figure, comparison: Comparison) -> None:
    """Draw S or K above, lambda below; fixed lambdas and schedules by their first seed, the controller by each seed."""
    measured_axes, lambda_axes = figure.subplots(2, 1, sharex=True)
    measured_axes.set_title("What is held (smoothed), and λ, over the run")
    for setting, runs in comparison.by_setting.items():
        style = _style(comparison, setting)
        for index, run in enumerate(runs if setting.controller == "pi" else runs[:1]):
            steps = [record["step"] for record in run.records]
            label = "" if index else setting.label
            measured_axes.plot(
                steps, [record[name_measurement(record)] for record in run.records], label=label, **style
            )
            if setting.controller != "none":
                lambda_axes.plot(steps, [record["lambda"] for record in run.records], **style)
        if setting.controller == "pi":
            scu = runs[0].trial.config.scu
            if scu.target != "auto":
                low, high = _deadband_bounds(scu.law if scu.measure != "kl" else "kl", scu.target, float(scu.deadband))
                measured_axes.axhspan(low, high, color=ORANGE, alpha=0.2, linewidth=0)
    measured_axes.set_ylabel(MEASURED[next(iter(comparison.by_setting)).measure])
    measured_axes.set_ylim(bottom=0)
    measured_axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    lambda_axes.set_ylabel("λ")
    if comparison.find("pi") or comparison.find("fixed"):
        lambda_axes.set_yscale("log")
    lambda_axes.set_xlabel("optimizer step")


def _draw_forgetting(figure: Figure, comparison: Comparison) -> None:
    """Draw the final values of the runs, one line per controller; `none` as a path over the run.

    All values are means over the seeds.
    """
    axes = figure.add_subplot()
    axes.set_title("The task against forgetting: low and to the left is good")
    for setting in comparison.find("none"):
        path = _mean_path(comparison.by_setting[setting])
        axes.plot(*path.T, ".-", color=INK, linewidth=1.0, label="none, over the run")
        stop = path[int(np.argmin(path[:, 1]))]
        axes.plot(*stop, "*", color=INK, markersize=15, label="none, stopped at its best")
    for controller, color in {**COLORS, "fixed": BLUE}.items():
        for measure in LINES if controller != "none" else ():
            settings = comparison.find(controller, measure)
            ends = [np.mean([_path(run)[-1] for run in comparison.by_setting[each]], axis=0) for each in settings]
            if not ends:
                continue
            if measure == "kl":  # does not prevent overfitting: its runs would be stopped before their end
                color = RED
                paths = [_mean_path(comparison.by_setting[each]) for each in settings]
                stops = np.array([path[int(np.argmin(path[:, 1]))] for path in paths])
                axes.plot(*stops.T, "*", color=color, markersize=11, label=f"{_words(settings)}, stopped at their best")
            words = f"{_words(settings)}, at the end" if measure == "kl" else _words(settings)
            faint = 0.4 if measure == "kl" else 1.0
            axes.plot(*np.array(ends).T, "o", linestyle=LINES[measure], color=color, label=words, alpha=faint)
            for end, setting in zip(stops if measure == "kl" else ends, settings, strict=True):
                number = setting.target if controller == "pi" else setting.lambda_
                offset = (-8, 9) if measure == "kl" else (6, -11) if controller == "pi" else (5, 5)
                text = "" if number is None else f"{number:g}"
                axes.annotate(text, end, offset, color=color, textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("K on other texts: bits a token between the adapted model and the base")
    axes.set_ylabel("bits per held-out target token")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def _path(run: Result) -> Values:
    return np.array([(run.forgetting(index)[0], bits) for index, bits in enumerate(run.curve)], dtype=np.float64)


def _mean_path(runs: list[Result]) -> Values:
    """Average the paths over the seeds, as trained, without the untrained model."""
    mean: Values = np.mean([_path(run)[: run.trained] for run in runs], axis=0)[1:]
    return mean


def _words(settings: list[Setting]) -> str:
    what = {
        "pi": "PI at targets",
        "fixed": "fixed λ",
        "linear": "λ rising linearly to",
        "cosine": "λ rising by cosine to",
    }
    return f"{settings[0].measure}, {what[settings[0].controller]}"


def name_measurement(record: dict[str, Any]) -> str:
    return "kl_smoothed" if "kl_smoothed" in record else "s_smoothed"


def _style(comparison: Comparison, setting: Setting) -> dict[str, Any]:
    """Return the style: color by controller, fixed lambdas from pale to dark, dashes for the measure `factors`."""
    color: Any = COLORS[setting.controller]
    if setting.controller == "fixed":
        family = comparison.find("fixed", setting.measure)
        color = matplotlib.colormaps["Blues"](0.35 + 0.6 * family.index(setting) / max(1, len(family) - 1))
    wide = setting.controller in ("pi", "none")
    return {"color": color, "linewidth": 2.0 if wide else 1.3, "linestyle": LINES[setting.measure]}


def _deadband_bounds(form: Form, target: float, deadband: float) -> tuple[float, float]:
    """Return the interval of M in which lambda does not move."""
    if form == "published":
        return target - deadband, target + deadband
    odds = target if form == "kl" else target / (1.0 - target)
    low, high = odds * math.exp(-deadband), odds * math.exp(deadband)
    return (low, high) if form == "kl" else (low / (1.0 + low), high / (1.0 + high))
