"""Show the progress of a run on the console: aligned lines, and a bar on terminals."""

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trainer.config.yaml_core import read_yaml

REFRESH_S = 0.1
SPEED_WINDOW = 50
SHORTEST_BAR, LONGEST_BAR = 4, 40
LINES_WITH_BAR = 20
"""Number of step lines per run that are printed above the bar."""
_FORMATS: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_suffix(".yaml")).tree
ZERO_LEARNING_RATE = "0.00e+00"
"""A learning rate of 0, with which a warm-up begins."""
BAR_FORMATS, LINE_FORMATS, EVALUATION_FORMATS = (_FORMATS[name] for name in ("bar", "line", "evaluation"))


class Display:
    """Shows the progress of a run as a bar or as lines. `auto` selects the bar on terminals and lines elsewhere."""

    def __init__(self, console: Console, mode: str, *, total_steps: int) -> None:
        if mode == "auto":
            mode = "bar" if console.is_terminal and not console.is_dumb_terminal else "lines"
        self._console = console
        self._mode = mode
        self._total = total_steps
        # Measured after the first step, which compiles and warms up.
        self._step_times: deque[tuple[float, int]] = deque(maxlen=SPEED_WINDOW)
        self._progress: Progress | None = None
        self._bar = BarColumn(complete_style="cyan", finished_style="green")
        self._refreshed = -math.inf

    def print_line(self, step: int, values: Mapping[str, float]) -> None:
        if self._mode == "off":
            return
        head = f"step {step:>{len(str(self._total))}}/{self._total}"
        if "eval/loss" in values:
            parts = [text.format(values[name]) for name, text in EVALUATION_FORMATS.items() if name in values]
            self._print(f"{head}  held-out {'  '.join(parts)}")
            return
        is_printed = step in (1, self._total) or step % max(1, math.ceil(self._total / LINES_WITH_BAR)) == 0
        if "train/loss" in values and (self._mode == "lines" or is_printed):
            self._record_time(step)
            left = [f"{self._format_time_left():>8} left"] if self._mode == "lines" else []
            line = "  ".join([head, *left, *format_step(values, detailed=True)])
            self._print(line.replace(ZERO_LEARNING_RATE, f"{'0 warmup':>{len(ZERO_LEARNING_RATE)}}"))

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Update the progress bar; cheap enough for every step. Any metric may be missing from `values`."""
        self._record_time(step)
        if self._mode != "bar" or (time.monotonic() - self._refreshed < REFRESH_S and step < self._total):
            return
        self._refreshed = time.monotonic()
        if self._progress is None:
            self._progress = self._start_bar()
        head, left = f"{step}/{self._total}", f"{self._format_time_left()} left"
        # Drop values from the end until the rest fits next to the shortest bar; the bar fills the remaining width.
        available_width = self._console.width - len(head) - len(left) - SHORTEST_BAR - 4
        text = ""
        for part in format_step(values, detailed=False):
            if len(text) + len(part) + 2 > available_width:
                break
            text += f"  {part}"
        self._bar.bar_width = min(LONGEST_BAR, SHORTEST_BAR + available_width - len(text))
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=step, head=head, text=f"{text}  {left}".strip())
        self._progress.refresh()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._mode = "off"

    def _start_bar(self) -> Progress:
        # The loop refreshes, so no thread is needed. sys.stdout remains the log, for output from libraries.
        progress = Progress(
            TextColumn("{task.fields[head]}"),
            self._bar,
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        progress.add_task("", total=self._total, head="", text="")
        progress.start()
        # rich hides the cursor until `stop`, which a killed process never reaches.
        self._console.show_cursor(True)
        return progress

    def _record_time(self, step: int) -> None:
        if not self._step_times or step != self._step_times[-1][1]:
            self._step_times.append((time.monotonic(), step))

    def _format_time_left(self) -> str:
        if not self._step_times or self._step_times[-1][1] <= self._step_times[0][1]:
            return "-:--:--"
        (time_then, step_then), (time_now, step_now) = self._step_times[0], self._step_times[-1]
        seconds = round((self._total - step_now) * (time_now - time_then) / (step_now - step_then))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


def format_step(values: Mapping[str, float], *, detailed: bool) -> list[str]:
    """Format a step's metrics, most important first. Values are aligned if `detailed`, else short for the bar."""
    # Show the whole job's throughput if it is known, otherwise one GPU's.
    per_gpu = "perf/tokens_per_second" not in values
    parts = [
        text.format(values[name])
        for name, text in (LINE_FORMATS if detailed else BAR_FORMATS).items()
        if name in values and (per_gpu or name != "perf/tokens_per_second_per_gpu")
    ]
    if "scu/s_ratio" in values:
        target = f"/{values['scu/target']:.2%}" if "scu/target" in values else " %"
        parts.append(f"S {100 * values['scu/s_ratio']:.2f}{target}")
    if "scu/kl_bits" in values:
        parts.append(f"K {values['scu/kl_bits']:.3f}/{values.get('scu/target', 0.0):g} bits")
    if "scu/lambda" in values:
        parts.append(f"λ {values['scu/lambda']:.3g}")
    return parts
