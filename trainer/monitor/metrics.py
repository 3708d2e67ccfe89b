"""The measurements of a run: to its files, to wandb, and to the console. Rank 0 only."""

import importlib
import importlib.util
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.config import LoggingSection, UserError
from trainer.config.files import UnreadableFile, read_bytes, read_text
from trainer.contract.metric_records import MOST_METRICS_BYTES, parse_record
from trainer.contract.metric_records import Record as Record
from trainer.contract.whole_files import write_whole
from trainer.monitor.display import Display
from trainer.monitor.gpu import GpuMetrics
from trainer.monitor.metric_files import METRICS_FILE, MetricFiles

# Records after the step that a run goes on from, until its first checkpoint is whole; and their name after that.
LATER_FILE = "metrics.later.jsonl"
ABANDONED_FILE = "abandoned-metrics.jsonl"


def check_reporters(logging: LoggingSection) -> None:
    """Raise UserError if a package that `logging.report_to` names is not installed; imports nothing heavy."""
    for name in logging.report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.report_to={name}: the package {name} is not installed; pip install {name}, or leave it out"
            )


def read_metrics(run_dir: Path, name: str = METRICS_FILE) -> list[Record]:
    """Return the records of `run_dir/metrics.jsonl` in the order written, without a last line cut short by a kill.

    Raises UserError if there is no such file or a line in its middle is no record of numbers.
    """
    path = run_dir / name
    try:
        lines = read_bytes(path, MOST_METRICS_BYTES).split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name the output folder of a run that has trained") from None
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records += [parse_record(line, path)] if line else []
        except UnreadableFile as error:
            if number < len(lines):
                problem = f"line {number} does not record a step and its numbers ({error.problem})"
                raise UserError(f"{path}: {problem}; repair or remove that line") from None
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
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`before_writing` raises if the folder is no longer this run's; `settings` are its configuration."""
        check_reporters(logging)
        self._before_writing = before_writing
        run_dir.mkdir(parents=True, exist_ok=True)
        name = logging.run_name or run_dir.resolve().name
        _cut_back(run_dir, first_step)
        self._files = MetricFiles(
            run_dir,
            name,
            console,
            first_step=first_step,
            tensorboard="tensorboard" in logging.report_to,
            settings=settings,
        )
        self._wandb = _open_wandb(run_dir, name, logging.project) if "wandb" in logging.report_to else None
        self._display = Display(console, logging.progress, total_steps=total_steps)
        self._gpu = GpuMetrics.open()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step; a held-out loss, or without a bar any training loss, is shown as a line."""
        numbers = {key: float(value) for key, value in values.items()}
        if self._gpu is not None and "train/loss" in numbers:
            numbers |= self._gpu.values()
        # NaN is not JSON: other readers of the file would stop at it.
        finite = {key: number if math.isfinite(number) else None for key, number in numbers.items()}
        self._before_writing()
        self._files.write({"step": step, "time": round(time.time(), 3), **finite}, numbers)
        if self._wandb is not None:
            self._wandb.log({"step": step, **numbers})
        self._display.line(step, numbers)

    def picture(self, step: int, name: str, picture: Any) -> None:
        """Show a picture (PIL) in TensorBoard and wandb."""
        self._files.write_image(step, f"samples/{name}", picture)
        if self._wandb is not None:
            wandb = importlib.import_module("wandb")
            self._wandb.log({"step": step, f"samples/{name}": wandb.Image(picture)})

    def progress(self, step: int, values: Mapping[str, float]) -> None:
        """Move the bar; `values` may lack any name. Cheap enough for every step."""
        self._display.move(step, values)

    def close(self) -> None:
        """Stop the bar and finish all files; may be called twice."""
        self._display.stop()
        self._files.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._gpu is not None:
            self._gpu.close()
        self._wandb = None


def close_earlier_course(run_dir: Path, *, keep: bool) -> None:
    """The run has a checkpoint of its own: what was recorded after its beginning before is over, and kept if asked."""
    later = run_dir / LATER_FILE
    if keep and later.is_file():
        with (run_dir / ABANDONED_FILE).open("ab") as file:
            file.write(later.read_bytes())
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
        id=read_text(identity).strip(),
        resume="allow",
        dir=str(run_dir),
        settings=wandb.Settings(console="off"),
    )
    # A step axis of our own, since wandb refuses to go back behind its internal one after a resume.
    run.define_metric("*", step_metric="step")
    return run
