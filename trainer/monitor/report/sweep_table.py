"""`zerolora sweep CONFIG --table`: the results of a sweep, best first, as a table and an HTML page.

Runs are ranked by their lowest held-out loss or, without held-out data, by the mean training loss over the last tenth.
Exit code: 0; 1 if a run has no result; 2 for a user error, with one line on stderr.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.config import CommandParser, UserError, reports_errors
from trainer.config.errors import sanitize
from trainer.contract.json_records import SWEEP_RECORD_FILE, read_sweep
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.comparison import MAX_RUNS, write_comparison_page
from trainer.monitor.report.curves import Series, extract_series

PAGE = "sweep.html"
TAIL_DIVISOR = 10


@dataclass(frozen=True)
class RunResult:
    """The result of a run, ranked by its `loss` at `step`; `loss` is None if the run has no result."""

    folder: Path
    held_out: Series
    loss: float | None
    step: int
    state: str


def read_run_results(folder: Path) -> list[RunResult]:
    """Return the runs of the sweep in a folder, best first. Raises UserError if the folder has no sweep record."""
    results = [_read_result(Path(run.folder), run.exit_code) for run in read_sweep(folder)]
    if not results:
        raise UserError(f"{folder}: has no {SWEEP_RECORD_FILE}; pass the output_dir of a `zerolora sweep`")
    return sorted(results, key=lambda run: (run.loss is None, run.loss, run.folder.name))


def _read_result(folder: Path, exit_code: int | None) -> RunResult:
    try:
        records: list[Record] = read_metrics(folder)
    except UserError:
        records = []
    held_out, training = (extract_series(records, f"{name}/loss").drop_nan() for name in ("eval", "train"))
    loss, step = None, int(training.steps[-1]) if len(training) else 0
    if len(held_out):
        best = int(np.argmin(held_out.values))
        loss, step = float(held_out.values[best]), int(held_out.steps[best])
    elif len(training):
        loss = float(training.values[-max(1, len(training) // TAIL_DIVISOR) :].mean())
    # Runs in array jobs have no recorded exit code.
    is_done = exit_code == 0 or any(folder.glob("adapter_model.safetensors")) or any(folder.glob("model*.safetensors"))
    state = f"exit code {exit_code}" if exit_code else "done" if is_done else "not finished"
    return RunResult(folder, held_out, loss, step, state)


def print_table(console: Console, runs: list[RunResult]) -> None:
    held_out = any(len(run.held_out) for run in runs)
    criterion = "lowest held-out loss" if held_out else "training loss, last tenth"
    table = Table("", "run", criterion, "step", "", box=None, pad_edge=False)
    for number, run in enumerate(runs, start=1):
        loss = "-" if run.loss is None else f"{run.loss:.4f}"
        name = escape(sanitize(run.folder.name))
        table.add_row(str(number) if run.loss is not None else "", name, loss, str(run.step), run.state)
    console.print(table)


def write_page(runs: list[RunResult], page: Path) -> str:
    successful = [run for run in runs if run.loss is not None]
    write_comparison_page([run.folder for run in successful[:MAX_RUNS]], page)
    return f"page: {page}" + (f" (the best {MAX_RUNS} of {len(successful)} runs)" if len(successful) > MAX_RUNS else "")


@reports_errors()
def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(prog="zerolora sweep --table", description="Show the results of a sweep, best first.")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    runs = read_run_results(arguments.folder)
    print_table(Console(soft_wrap=True), runs)
    if any(run.loss is not None for run in runs):
        print(write_page(runs, arguments.folder / PAGE))
    return 0 if all(run.state == "done" for run in runs) else 1
