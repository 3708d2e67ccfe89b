"""What a run writes into its folder: records, checkpoints, the result, the report.

Every rank has one, since gathered weights are collectives; only rank 0 writes, and looks each time whether the folder
is still this run's.
"""

import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from trainer.checkpoint.adapter_files import record_result
from trainer.checkpoint.adapter_form import AdapterForm
from trainer.checkpoint.background import SaveFailed, WriteWeights
from trainer.checkpoint.course import Course
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.position import Position
from trainer.checkpoint.run_record import CONFIG, RESULT, RUN, make_way, note_written, place_result, write_run_record
from trainer.checkpoint.weights import (
    gathered,
    save_adapter,
    save_full_model,
    save_initial_adapter,
    write_adapter,
    write_full_model,
)
from trainer.config import RunConfig
from trainer.contract.folder_lock import FolderLock
from trainer.contract.full_disk import disk_errors_into
from trainer.model.adapter import changes_base_weights
from trainer.monitor.metric_files import METRICS_FILE
from trainer.monitor.metrics import Metrics
from trainer.monitor.report.model_card import CARD, is_own_card
from trainer.monitor.report.recorded import TIMES, keep_times
from trainer.monitor.report.sample_images import SAMPLES, save_sample_image
from trainer.monitor.report.write import ANSWERS, keep_answer, write_report
from trainer.monitor.summary import end_summary
from trainer.parallel.engine.flat_adapter import trained_parameters
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import PROGRESS
from trainer.scu.controller import Steering
from trainer.tasks.task import Task

INITIAL_ADAPTER = "initial_adapter"


class RunFolder:
    """The folder of one run, on one rank."""

    def __init__(
        self, config: RunConfig, task: Task, ranks: Ranks, console: Console, course: Course, lock: FolderLock | None
    ) -> None:
        """`config` is without `auto`; `lock` is the folder's, which rank 0 holds. Nothing is written yet."""
        self.path = Path(config.output_dir)
        self._config, self._task, self._ranks = config, task, ranks
        self._console, self._course, self._lock = console, course, lock
        self._metrics: Metrics | None = None
        self._form: AdapterForm | None = None
        self._write_record: Callable[[], None] = lambda: None
        self._copied: dict[str, torch.Tensor] = {}

    def check(self) -> None:
        """Raise FolderLost if another run has the folder by now: called before anything is written there."""
        if self._lock is not None:
            self._lock.check()

    def open(
        self,
        model: Any,
        position: Position,
        total_steps: int,
        device: torch.device,
        precision: str,
        prompt_text: str | None,
    ) -> Metrics | None:
        """Write for the first time: every check has passed. Return rank 0's metrics."""
        config, is_main = self._config, self._ranks.is_main
        moves_base = changes_base_weights(config.lora) and config.adapter == "lora"
        if position.step and moves_base:
            self._course.bring(INITIAL_ADAPTER)
        if is_main:
            self.check()
            moved = make_way(self.path, config.output.overwrite) if position.step == 0 else None
            if moved:
                self._say(moved)
            run_on = (self._ranks.world_size, str(device.type), precision, prompt_text)
            self._write_record = partial(write_run_record, self.path, config, *run_on)
            self._write_record()
        if position.step == 0 and moves_base:
            save_initial_adapter(model, self.path / INITIAL_ADAPTER, is_main=is_main)
        if not is_main:
            return None
        self._metrics = Metrics(
            self.path, config.logging, self._console, first_step=position.step, total_steps=total_steps,
            before_writing=self.check, settings=config.model_dump(mode="json"),
        )  # fmt: skip
        return self._metrics

    def save_answer(self, prompt: str, when: str, answer: str) -> None:
        """Keep the answer to a sample prompt for the report."""
        if self._ranks.is_main:
            self.check()
            with self.while_there_is_room(ANSWERS):
                keep_answer(self.path, prompt, when, answer)

    def save_image(self, prompt: str, when: str, step: int, picture: Any) -> None:
        """Keep what an image model made of a sample prompt, for the report and TensorBoard."""
        if self._ranks.is_main:
            self.check()
            with self.while_there_is_room(SAMPLES):
                save_sample_image(self.path, prompt, when, picture)
            if self._metrics is not None:
                self._metrics.log_image(step, prompt, picture)

    def save_steering(self, steering: Steering) -> None:
        """Write the records of the Shannon Control Unit."""
        if self._ranks.is_main:
            self.check()
            with self.while_there_is_room("what the SCU found"):
                steering.write_files(self.path)

    @contextmanager
    def while_there_is_room(self, what: str) -> Iterator[None]:
        """For files beside the result: where the disk is full the user is told, and the run goes on without them."""
        failures: list[str] = []
        with disk_errors_into(failures, self.path):
            yield
        if failures:
            self._say(f"[yellow]warning:[/yellow] {what}: not written: {escape(failures[0])}")

    def prepare_saves(self, engine: Engine) -> None:
        """Where checkpoints will be written while training goes on: have a thread do what the first of them needs."""
        training = self._config.training
        if training.save_steps or training.save_minutes:
            self._course.prepare_saves(engine, lambda: self._adapter_form(engine))

    def copy_checkpoint(self, engine: Engine) -> None:
        """Copy engine and weights, behind the step that the device is in; every rank must call it."""
        only_trained = self._config.adapter != "none"

        def weights(copies: HostCopies) -> None:
            self._copied = gathered(engine.module, only_trained=only_trained, copy=copies.copy)

        self._course.copy(engine, weights)

    def save_checkpoint(
        self, engine: Engine, position: Position, state: dict[str, Any], *, must_have_moved: bool
    ) -> None:
        """Let what was copied, position and `state` be written while training goes on; every rank must call it.

        `must_have_moved`: a learning rate was above zero by now. Raises SaveFailed, of which the user has been told.
        """
        if self._ranks.is_main:
            self._keep_record()
            name = f"checkpoint-{position.step}"
            note_written(self.path, [name, f".writing-{name}"])
        write_weights = self._writer(engine, self._copied, must_have_moved)
        self._course.save(engine, position, state, write_weights, self.check)

    def save_result(self, engine: Engine, *, must_have_moved: bool, factor: float = 1.0) -> None:
        """What training ends with, written beside and moved into the folder when it is whole; every rank must call it.

        `factor` of the adapter's update is written.
        Raises SaveFailed.
        """
        result = self.path / RESULT
        failures: list[str] = []
        with disk_errors_into(failures, self.path):
            if self._ranks.is_main:
                self._keep_record()
                shutil.rmtree(result, ignore_errors=True)
                result.mkdir()
            self._save_weights(engine, result, must_have_moved, factor)
            if self._ranks.is_main:
                self.check()
                self._write_card(result)
                record_result(self.path, place_result(self.path), self._course.identity())
        if failures:
            raise SaveFailed(f"{self.path}: the result was not written: {failures[0]}; the newest checkpoint has it")

    def _keep_record(self) -> None:
        """Check the folder, and write the record again where the folder was moved away with it."""
        self.check()
        if not ((self.path / RUN).exists() and (self.path / CONFIG).exists()):
            self._write_record()
            (self.path / METRICS_FILE).touch()

    def write_times(self) -> None:
        """Seconds by phase, on top of those of the starts that this one goes on from."""
        with self.while_there_is_room(TIMES):
            keep_times(self.path, PROGRESS.time_by_phase(), goes_on=PROGRESS.first_step > 1)

    def write_report(self, before: float | None, after: float | None) -> None:
        """The page and its plots, and the last lines on the console, with the held-out loss before and after."""
        page = None
        with self.while_there_is_room("report.html and plots"):
            try:
                page = write_report(self.path)
            except OSError:
                raise
            except Exception as error:  # the run is whole: what a page shows of it must not have it started again
                traceback.print_exc()
                found = escape(f"{type(error).__name__}: {error}")
                self._say(f"[yellow]warning:[/yellow] report.html and plots: not drawn: {found}; the run is whole")
        for line in end_summary(self.path, self._config, page, before, after):
            self._say(line)

    def _save_weights(self, engine: Engine, folder: Path, must_have_moved: bool, factor: float) -> None:
        model, is_main = engine.module, self._ranks.is_main
        if self._config.adapter == "none":
            save_full_model(model, folder, is_main=is_main)
        else:
            initial = self.path / INITIAL_ADAPTER if changes_base_weights(self._config.lora) else None
            form = self._adapter_form(engine) if is_main else None
            save_adapter(
                model,
                folder,
                is_main=is_main,
                must_have_moved=must_have_moved,
                initial=initial,
                form=form,
                factor=factor,
            )
        if is_main:
            self._task.companion_files()(folder)

    def _adapter_form(self, engine: Engine) -> AdapterForm | None:
        """How PEFT stores this run's adapter, if there is one; of use on rank 0."""
        if self._form is None and self._ranks.is_main and self._config.adapter != "none":
            self._form = AdapterForm.of(engine.module, [name for name, _ in trained_parameters(engine.module)])
        return self._form

    def _writer(self, engine: Engine, weights: dict[str, torch.Tensor], must_have_moved: bool) -> WriteWeights:
        """What writes copied weights, with what they need beside them."""
        model, whole = engine.module, self._config.adapter == "none"
        save_beside = self._task.companion_files() if self._ranks.is_main else None
        initial = self.path / INITIAL_ADAPTER if changes_base_weights(self._config.lora) else None

        def write(folder: Path) -> None:
            if whole:
                write_full_model(model, weights, folder)
            else:
                form = self._adapter_form(engine)
                assert form is not None, "weights are written on rank 0"
                write_adapter(form, weights, folder, must_have_moved=must_have_moved, initial=initial)
            if save_beside is not None:
                save_beside(folder)

        return write

    def _write_card(self, result: Path) -> None:
        """The model card, unless the folder has one that a person wrote."""
        if self._config.adapter != "none" and not is_own_card(self.path / CARD):
            card = self._task.card(self.path, str(self.path.resolve()))
            (result / CARD).write_text(card, encoding="utf-8")

    def _say(self, line: Any) -> None:
        if self._ranks.is_main:
            self._console.print(line, soft_wrap=True)
