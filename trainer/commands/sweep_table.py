"""`zerolora sweep CONFIG --table`: the results of a sweep, best first, as a table and a plot.

Runs are ranked by their lowest held-out loss or, without held-out data, by the mean training loss of the last tenth.
Exit code 0, 1 if a run has no result, 2 after one line on stderr.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.checkpoint.finished_run import quiet_libraries
from trainer.config import CommandParser, UserError
from trainer.config.errors import printable
from trainer.contract.json_records import SWEEP, read_sweep
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.curves import Series, choose_window, running_mean, series

PLOT = "sweep.png"
TAIL_DIVISOR = 10
MOST_LINES = 8
COLOURS = ("#2f6db3", "#d9822b", "#3b8f6b", "#a14f9a", "#8a94a3", "#b5473c", "#6b6f1d", "#27303d")


@dataclass(frozen=True)
class Outcome:
    """One run of a sweep, ranked by `loss`, which it had at `step`; None without a result."""

    name: str
    held_out: Series
    training: Series
    loss: float | None
    step: int
    state: str

    @property
    def last(self) -> float | None:
        """The final held-out loss."""
        return float(self.held_out.values[-1]) if len(self.held_out) else None


def read_outcomes(folder: Path) -> list[Outcome]:
    """Return the runs of the sweep in a folder, best first. Raises UserError if the folder has no record of one."""
    found = [_outcome(Path(run.folder), run.exit_code) for run in read_sweep(folder)]
    if not found:
        raise UserError(f"{folder}: has no {SWEEP}; pass the output_dir of a `zerolora sweep`")
    return sorted(found, key=lambda run: (run.loss is None, run.loss, run.name))


def _outcome(folder: Path, exit_code: int | None) -> Outcome:
    try:
        records: list[Record] = read_metrics(folder)
    except UserError:
        records = []
    held_out, training = series(records, "eval/loss").finite(), series(records, "train/loss").finite()
    loss, step = None, int(training.steps[-1]) if len(training) else 0
    if len(held_out):
        best = int(np.argmin(held_out.values))
        loss, step = float(held_out.values[best]), int(held_out.steps[best])
    elif len(training):
        loss = float(training.values[-max(1, len(training) // TAIL_DIVISOR) :].mean())
    state = (
        f"ended with {exit_code}" if exit_code else "done" if exit_code == 0 or _has_result(folder) else "not finished"
    )
    return Outcome(folder.name, held_out, training, loss, step, state)


def _has_result(folder: Path) -> bool:
    """Return whether a run finished, for array jobs, which have no recorded exit code."""
    return (folder / "adapter_model.safetensors").is_file() or any(folder.glob("model*.safetensors"))


def show(console: Console, runs: list[Outcome]) -> None:
    held_out = any(len(run.held_out) for run in runs)
    criterion = "lowest held-out loss" if held_out else "training loss, last tenth"
    table = Table("", "run", criterion, "step", *(["at the end"] if held_out else []), "", box=None, pad_edge=False)
    for place, run in enumerate(runs, start=1):
        loss = "-" if run.loss is None else f"{run.loss:.4f}"
        last = [] if not held_out else ["-" if run.last is None else f"{run.last:.4f}"]
        name = escape(printable(run.name))
        table.add_row(str(place) if run.loss is not None else "", name, loss, str(run.step), *last, run.state)
    console.print(table)


def draw(runs: list[Outcome], path: Path) -> None:
    """Plot held-out losses, or training losses without held-out data, with the best runs in colour."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from trainer.monitor.report.plots import DOTS_PER_INCH, STYLE, WIDE_INCHES

    shown = [run for run in runs if run.loss is not None]
    held_out = any(len(run.held_out) for run in shown)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=WIDE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
        axes: Any = figure.add_subplot()
        axes.set_title("Held-out loss" if held_out else "Training loss")
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
        for place, run in reversed(list(enumerate(shown))):
            line = run.held_out if held_out else run.training
            window = None if held_out else choose_window(len(line))
            values = running_mean(line.values, window) if window else line.values
            colour, label = (COLOURS[place], f"{run.name}  {run.loss:.4f}") if place < MOST_LINES else ("#d5dae1", None)
            axes.plot(line.steps, values, "o-" if held_out else "-", color=colour, label=label, markersize=4)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, 1 if a run has no result, or 2 after one line on stderr."""
    parser = CommandParser(prog="zerolora sweep --table", description="Show the results of a sweep, best first.")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    quiet_libraries()
    try:
        runs = read_outcomes(arguments.folder)
        show(Console(soft_wrap=True), runs)
        if any(run.loss is not None for run in runs):
            draw(runs, arguments.folder / PLOT)
            print(f"plot: {arguments.folder / PLOT}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if all(run.state == "done" for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
