"""The measurements of a run: metrics.jsonl, TensorBoard, wandb, and the progress bar. Rank 0 only."""

import importlib
import importlib.util
import json
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trainer.config import LoggingSection, UserError
from trainer.contract.whole_files import write_whole
from trainer.monitor.gpu import GpuMetrics

METRICS_FILE = "metrics.jsonl"
# Records after the step that a run goes on from, until its first checkpoint is whole; and their name after that.
LATER_FILE = "metrics.later.jsonl"
ABANDONED_FILE = "abandoned-metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
REFRESH_S = 0.1
SPEED_WINDOW = 50
SHORTEST_BAR, LONGEST_BAR = 4, 40
BAR_WORDS = {
    "train/loss": "loss {:.3f}",
    "perf/tokens_per_second": "{:,.0f} tok/s",
    "perf/tokens_per_second_per_gpu": "{:,.0f} tok/s/GPU",
}
LINE_WORDS = {
    "train/loss": "loss {:7.4f}",
    "train/learning_rate": "lr {:.2e}",
    "train/grad_norm": "grad {:8.3g}",
    "perf/tokens_per_second": "{:>9,.0f} tok/s",
    "perf/tokens_per_second_per_gpu": "{:>7,.0f} tok/s/GPU",
    "memory/peak_gib": "{:6.2f} GiB",
}
Record = dict[str, float | None]


def check_reporters(logging: LoggingSection) -> None:
    """Raise UserError if a package that `logging.report_to` names is not installed; imports nothing heavy."""
    for name in logging.report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.report_to={name}: the package {name} is not installed; pip install {name}, or leave it out"
            )


def read_metrics(run_dir: Path, name: str = METRICS_FILE) -> list[Record]:
    """Records of `run_dir/metrics.jsonl` in the order written; a last line cut short by a kill is left out.

    Raises UserError if there is no such file or a line in its middle is not JSON.
    """
    path = run_dir / name
    if not path.is_file():
        raise UserError(f"{path}: no such file; name the output folder of a run that has trained")
    records: list[Record] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}: line {number} is not JSON ({error.msg}); repair or remove that line") from error
    return records


class Metrics:
    """Writes what a run measures, under one name everywhere, and shows where it stands.

    `first_step` optimizer steps are done already (0: a fresh run). On resume, what an interrupted run recorded after
    that step is removed from metrics.jsonl and hidden in TensorBoard, so that every step is there once.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: LoggingSection,
        console: Console,
        *,
        first_step: int,
        total_steps: int,
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_writing` raises if the folder is no longer this run's."""
        check_reporters(logging)
        self._before_writing = before_writing
        run_dir.mkdir(parents=True, exist_ok=True)
        name = logging.run_name or run_dir.resolve().name
        _cut_back(run_dir, first_step)
        self._jsonl = (run_dir / METRICS_FILE).open("a", buffering=1, encoding="utf-8")
        self._tensorboard = _open_tensorboard(run_dir, name, first_step) if "tensorboard" in logging.report_to else None
        self._wandb = _open_wandb(run_dir, name, logging.project) if "wandb" in logging.report_to else None
        self._display = _Display(console, logging.progress, first_step=first_step, total_steps=total_steps)
        self._gpu = GpuMetrics.open()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step; a held-out loss, or without a bar any training loss, is shown as a line."""
        numbers = {key: float(value) for key, value in values.items()}
        if self._gpu is not None and "train/loss" in numbers:
            numbers |= self._gpu.values()
        # NaN is not JSON: other readers of the file would stop at it.
        finite = {key: number if math.isfinite(number) else None for key, number in numbers.items()}
        self._before_writing()
        self._jsonl.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        if self._tensorboard is not None:
            for key, number in numbers.items():
                self._tensorboard.add_scalar(key, number, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **numbers})
        self._display.line(step, numbers)

    def progress(self, step: int, values: Mapping[str, float]) -> None:
        """Move the bar; `values` may lack any name. Cheap enough for every step."""
        self._display.move(step, values)

    def close(self) -> None:
        """Stop the bar and finish all files; may be called twice."""
        self._display.stop()
        self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._gpu is not None:
            self._gpu.close()
        self._tensorboard = self._wandb = None


class _Display:
    """The bar on a terminal, or aligned lines elsewhere."""

    def __init__(self, console: Console, mode: str, *, first_step: int, total_steps: int) -> None:
        if mode == "auto":
            mode = "bar" if console.is_terminal and not console.is_dumb_terminal else "lines"
        self._console = console
        self._mode = mode
        self._total = total_steps
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), first_step)], maxlen=SPEED_WINDOW)
        self._progress: Progress | None = None
        self._bar = BarColumn(complete_style="cyan", finished_style="green")
        self._refreshed = -math.inf

    def line(self, step: int, values: Mapping[str, float]) -> None:
        if self._mode == "off":
            return
        head = f"step {step:>{len(str(self._total))}}/{self._total}"
        if "eval/loss" in values:
            self._print(f"{head}  held-out {evaluation_text(values)}")
        elif self._mode == "lines" and "train/loss" in values:
            self._observe(step)
            self._print("  ".join([head, f"{self._time_left():>8} left", *step_words(values, detailed=True)]))

    def move(self, step: int, values: Mapping[str, float]) -> None:
        self._observe(step)
        if self._mode != "bar" or (time.monotonic() - self._refreshed < REFRESH_S and step < self._total):
            return
        self._refreshed = time.monotonic()
        if self._progress is None:
            self._progress = self._start_bar()
        head, left = f"{step}/{self._total}", f"{self._time_left()} left"
        # What does not fit beside the shortest bar is left out, the last words first; the bar takes what remains.
        room = self._console.width - len(head) - len(left) - SHORTEST_BAR - 4
        text = ""
        for word in step_words(values, detailed=False):
            if len(text) + len(word) + 2 > room:
                break
            text += f"  {word}"
        self._bar.bar_width = min(LONGEST_BAR, SHORTEST_BAR + room - len(text))
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=step, head=head, text=f"{text}  {left}".strip())
        self._progress.refresh()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._mode = "off"

    def _start_bar(self) -> Progress:
        # No refresh thread: the loop refreshes, and a process that forks workers is better off without threads.
        # Redirection is off because sys.stdout is the log: prints of libraries must stay there.
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

    def _observe(self, step: int) -> None:
        if step != self._seen[-1][1]:
            self._seen.append((time.monotonic(), step))

    def _time_left(self) -> str:
        """Steps to go x mean time of the last steps, pauses for evaluation included."""
        (time_then, step_then), (time_now, step_now) = self._seen[0], self._seen[-1]
        if step_now <= step_then:
            return "-:--:--"
        seconds = round((self._total - step_now) * (time_now - time_then) / (step_now - step_then))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


def step_words(values: Mapping[str, float], *, detailed: bool) -> list[str]:
    """One step in words, the most telling first: `detailed` in fixed widths for a line, else short for the bar."""
    # The rate of the whole job is what a user plans with; that of one GPU stands in where only it is known.
    rate_of_gpu = "perf/tokens_per_second" not in values
    words = [
        text.format(values[name])
        for name, text in (LINE_WORDS if detailed else BAR_WORDS).items()
        if name in values and (rate_of_gpu or name != "perf/tokens_per_second_per_gpu")
    ]
    if "scu/s_ratio" in values:
        target = f"/{values['scu/target']:.2%}" if "scu/target" in values else " %"
        words.append(f"S {100 * values['scu/s_ratio']:.2f}{target}")
    if "scu/lambda" in values:
        words.append(f"λ {values['scu/lambda']:.3g}")
    return words


def evaluation_text(values: Mapping[str, float]) -> str:
    """A held-out evaluation in words: loss in nats per token, bits per token, perplexity."""
    parts = [f"loss {values['eval/loss']:7.4f}"]
    if "eval/bpt" in values:
        parts.append(f"{values['eval/bpt']:.4f} bits/token")
    if "eval/perplexity" in values:
        parts.append(f"perplexity {values['eval/perplexity']:.2f}")
    return "  ".join(parts)


def close_earlier_course(run_dir: Path, *, keep: bool) -> None:
    """The run has a checkpoint of its own: what was recorded after its beginning before is over, and kept if asked."""
    later = run_dir / LATER_FILE
    if keep and later.is_file():
        with (run_dir / ABANDONED_FILE).open("a", encoding="utf-8") as file:
            file.write(later.read_text(encoding="utf-8"))
    later.unlink(missing_ok=True)


def _cut_back(run_dir: Path, first_step: int) -> None:
    """Keep the records up to the resumed step, and the others beside them; a fresh run (0) starts an empty file."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return
    if not first_step:
        _rewrite(path, [])
        (run_dir / LATER_FILE).unlink(missing_ok=True)
        return
    records = read_metrics(run_dir)
    if later := read_metrics(run_dir, LATER_FILE) if (run_dir / LATER_FILE).is_file() else []:
        # The start that wrote it came to no checkpoint, so that nothing can go on from its own records.
        begun = later[0]["step"] or 0
        records = [record for record in records if (record["step"] or 0) < begun] + later
    after = [record for record in records if (record["step"] or 0) > first_step]
    if after:
        _rewrite(run_dir / LATER_FILE, after)
    else:
        (run_dir / LATER_FILE).unlink(missing_ok=True)
    _rewrite(path, [record for record in records if (record["step"] or 0) <= first_step])


def _rewrite(path: Path, records: list[Record]) -> None:
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def _open_tensorboard(run_dir: Path, name: str, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # costs a second, and the other ranks never need it

    folder = run_dir / TENSORBOARD_FOLDER / (re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "run")
    return SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None, flush_secs=5)


def _open_wandb(run_dir: Path, name: str, project: str) -> Any:
    """A wandb run that a resumed training continues: its identity is kept in the run's folder."""
    wandb = importlib.import_module("wandb")
    identity = run_dir / "wandb-id.txt"
    if not identity.is_file():
        write_whole(identity, secrets.token_hex(4) + "\n")
    # console=off: wandb would otherwise put itself between this process and its log.
    run = wandb.init(
        project=project,
        name=name,
        id=identity.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(run_dir),
        settings=wandb.Settings(console="off"),
    )
    # A step axis of our own, since wandb refuses to go back behind its internal one after a resume.
    run.define_metric("*", step_metric="step")
    return run
