"""What a run writes into its folder: records, checkpoints, the result, the report.

Every rank has one, since gathered weights are collectives; only rank 0 writes, and looks each time whether the folder
is still this run's.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from trainer.checkpoint.adapter_files import record_checksums
from trainer.checkpoint.checkpoint import SaveFailed
from trainer.checkpoint.run_record import RESULT, make_way, note_written, place_result, write_run_record
from trainer.checkpoint.weights import save_adapter, save_full_model
from trainer.config import RunConfig
from trainer.contract.folder_lock import FolderLock
from trainer.contract.full_disk import disk_errors_into
from trainer.course import Course
from trainer.engine.protocol import Engine
from trainer.loop import Position
from trainer.model.adapter import changes_base_weights, save_initial_adapter
from trainer.monitor.metrics import Metrics, read_metrics
from trainer.monitor.report.model_card import CARD, is_own_card, model_card
from trainer.monitor.report.write import ANSWERS, keep_answer, write_report
from trainer.monitor.summary import end_summary
from trainer.ranks.group import Ranks
from trainer.scu.controller import Steering

INITIAL_ADAPTER = "initial_adapter"


class RunFolder:
    """The folder of one run, on one rank."""

    def __init__(
        self, config: RunConfig, tokenizer: Any, ranks: Ranks, console: Console, course: Course, lock: FolderLock | None
    ) -> None:
        """`config` is without `auto`; `lock` is the folder's, which rank 0 holds. Nothing is written yet."""
        self.path = Path(config.output_dir)
        self._config, self._tokenizer, self._ranks = config, tokenizer, ranks
        self._console, self._course, self._lock = console, course, lock

    def check(self) -> None:
        """Raise FolderLost if another run has the folder by now: called before anything is written there."""
        if self._lock is not None:
            self._lock.check()

    def open(
        self, model: Any, position: Position, total_steps: int, device: torch.device, precision: str
    ) -> Metrics | None:
        """Write for the first time: every check has passed. Rank 0's metrics."""
        config, is_main = self._config, self._ranks.is_main
        moves_base = changes_base_weights(config.lora) and config.adapter == "lora"
        if position.step and moves_base:
            self._course.bring(INITIAL_ADAPTER)
        if is_main:
            self.check()
            moved = make_way(self.path, config.output.overwrite) if position.step == 0 else None
            if moved:
                self._say(moved)
            write_run_record(self.path, config, self._ranks.world_size, str(device.type), precision)
        if position.step == 0 and moves_base:
            save_initial_adapter(model, self.path / INITIAL_ADAPTER, is_main=is_main)
        if not is_main:
            return None
        return Metrics(
            self.path, config.logging, self._console, first_step=position.step, total_steps=total_steps,
            before_writing=self.check, settings=config.model_dump(mode="json"),
        )  # fmt: skip

    def save_answer(self, prompt: str, when: str, answer: str) -> None:
        """Keep the answer to a sample prompt for the report."""
        if self._ranks.is_main:
            self.check()
            with self.while_there_is_room(ANSWERS):
                keep_answer(self.path, prompt, when, answer)

    def save_steering(self, steering: Steering) -> None:
        """Write the records of the Shannon Control Unit."""
        if self._ranks.is_main:
            self.check()
            with self.while_there_is_room("what the SCU found"):
                steering.write_files(self.path)

    @contextmanager
    def while_there_is_room(self, what: str) -> Iterator[None]:
        """What is written beside the result: a full disk is told of, and the run goes on without."""
        failures: list[str] = []
        with disk_errors_into(failures, self.path):
            yield
        if failures:
            self._say(f"[yellow]warning:[/yellow] {what}: not written: {escape(failures[0])}")

    def save_checkpoint(
        self, engine: Engine, position: Position, state: dict[str, Any], *, must_have_moved: bool
    ) -> None:
        """Engine, position, `state` and weights; every rank must call it.

        `must_have_moved`: a learning rate was above zero by now. Raises SaveFailed, of which the user has been told.
        """
        if self._ranks.is_main:
            self.check()
            name = f"checkpoint-{position.step}"
            note_written(self.path, [name, f".writing-{name}"])

        def save_weights(folder: Path) -> None:
            self._save_weights(engine, folder, must_have_moved)

        self._course.save(engine, position, state, save_weights, self.check)

    def save_result(self, engine: Engine, *, must_have_moved: bool) -> None:
        """What training ends with, written beside and moved into the folder when it is whole; every rank must call it.

        Raises SaveFailed.
        """
        result = self.path / RESULT
        failures: list[str] = []
        with disk_errors_into(failures, self.path):
            if self._ranks.is_main:
                self.check()
                shutil.rmtree(result, ignore_errors=True)
                result.mkdir()
            self._save_weights(engine, result, must_have_moved)
            if self._ranks.is_main:
                self.check()
                self._write_card(result)
                place_result(self.path)
                record_checksums(self.path)
        if failures:
            raise SaveFailed(f"{self.path}: the result was not written: {failures[0]}; the newest checkpoint has it")

    def write_report(self, before: float | None, after: float | None) -> None:
        """The page and its plots, and the last lines on the console, with the held-out loss before and after."""
        page = None
        with self.while_there_is_room("report.html and plots"):
            page = write_report(self.path)
        for line in end_summary(self.path, self._config, page, before, after):
            self._say(line)

    def _save_weights(self, engine: Engine, folder: Path, must_have_moved: bool) -> None:
        model, tokenizer, is_main = engine.module, self._tokenizer, self._ranks.is_main
        if self._config.adapter == "none":
            save_full_model(model, tokenizer, folder, is_main=is_main)
            return
        initial = self.path / INITIAL_ADAPTER if changes_base_weights(self._config.lora) else None
        save_adapter(model, tokenizer, folder, is_main=is_main, must_have_moved=must_have_moved, initial=initial)

    def _write_card(self, result: Path) -> None:
        """The model card, unless the folder has one that a person wrote."""
        if self._config.adapter != "none" and not is_own_card(self.path / CARD):
            name = self.path.resolve().name
            card = model_card(self._config, self.path, read_metrics(self.path), name=name)
            (result / CARD).write_text(card, encoding="utf-8")

    def _say(self, line: Any) -> None:
        if self._ranks.is_main:
            self._console.print(line, soft_wrap=True)
