"""Plot the losses of a run with a repeatedly killed rank over those of an undisturbed run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.compare.plots import BLUE, DOTS_PER_INCH, GREY, ORANGE, STYLE


def draw_losses(series: Mapping[str, Any], path: Path) -> None:
    """A wide line for the undisturbed run, a thin one on it for the other, and a mark at every step of a kill."""
    undisturbed, disturbed, kills = series["undisturbed"], series["losses"], series.get("restarted_in", [])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.0), dpi=DOTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(f"One run with rank 1 killed {series['kills']} times, and the undisturbed one")
        wide: dict[str, Any] = {"color": GREY, "alpha": 0.5, "linewidth": 6.0, "label": "undisturbed"}
        axes.plot(range(1, len(undisturbed) + 1), undisturbed, **wide)
        thin: dict[str, Any] = {"color": BLUE, "linewidth": 1.2, "label": "killed and restarted"}
        axes.plot(range(1, len(disturbed) + 1), disturbed, **thin)
        if kills:
            axes.plot(kills, [min(undisturbed)] * len(kills), "|", color=ORANGE, markersize=10, label="a kill")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, nats per token")
        axes.legend()
        figure.savefig(path)
