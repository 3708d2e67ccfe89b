"""The output folder of a run: records, checkpoints, final weights and report.

Every rank has a RunFolder, since gathering weights is collective. Only rank 0 writes, and it checks before each write
that the folder still belongs to this run.
"""

import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from trainer.checkpoint.adapter_files import AdapterFormat, record_result
from trainer.checkpoint.background import SaveError
from trainer.checkpoint.checkpoint import Position
from trainer.checkpoint.identity import use_initial_adapter_settings
from trainer.checkpoint.run_record import CONFIG, RESULT, RUN, clear_folder, move_result_into_place, write_run_record
from trainer.checkpoint.weights import gather_weights, save_initial_adapter, write_adapter, write_full_model
from trainer.config import RunConfig, UserError
from trainer.contract.folder_lock import FolderLock
from trainer.contract.output_files import collect_disk_errors
from trainer.contract.rank_arguments import build_resume_command
from trainer.model.adapter import changes_base_weights
from trainer.monitor.console import Output
from trainer.monitor.metrics import METRICS_FILE, Metrics, read_metrics
from trainer.monitor.report.model_card import CARD, is_user_written_card
from trainer.monitor.report.recorded import EXAMPLES, TIMES, Example, record_examples, record_times
from trainer.monitor.report.sample_images import SAMPLES, save_sample_image
from trainer.monitor.report.write import ANSWERS, format_end_summary, record_answer, write_report
from trainer.parallel.engine.flat_adapter import list_trained_parameters
from trainer.parallel.engine.optimizer import use_averaged_weights
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import PROGRESS, phase
from trainer.scu.controller import ScuController
from trainer.tasks.task import Task

INITIAL_ADAPTER = "initial_adapter"


class RunFolder:
    def __init__(
        self, config: RunConfig, task: Task, ranks: Ranks, console: Console, log: Output, lock: FolderLock | None
    ) -> None:
        """Store the arguments. `config` must not contain `auto` values, and only rank 0 passes a `lock`."""
        self.path = Path(config.output_dir)
        self._config, self._task, self._ranks = use_initial_adapter_settings(config), task, ranks
        self._console, self._log, self._lock = console, log, lock
        self.metrics: Metrics | None = None
        """Metrics of this run; None before `open` and on ranks other than 0."""
        self._format: AdapterFormat | None = None
        self._write_record: Callable[[], None] = lambda: None

    def check_lock(self) -> None:
        """Raise FolderLostError if another run has taken over the folder; called before every write."""
        if self._lock is not None:
            self._lock.check()

    def open(
        self,
        model: Any,
        position: Position,
        total_steps: int,
        device: torch.device,
        precision: str,
        prompt_format: str | None,
        checkpoint: Path | None,
    ) -> None:
        """Write the run record and open the metrics; a collective call.

        Call it after all checks have passed, because a new run clears the folder of an earlier run. `checkpoint` is
        the checkpoint from which the run resumes.
        """
        config, is_main = self._config, self._ranks.is_main
        changes_base = changes_base_weights(config.lora) and config.adapter == "lora"
        if position.step and changes_base:
            self._copy_initial_adapter((checkpoint or self.path).parent / INITIAL_ADAPTER)
        if is_main:
            self.check_lock()
            if position.step == 0 and (moved := clear_folder(self.path, config.output.overwrite)):
                self._log.print_always(moved)
            environment = (self._ranks.world_size, str(device.type), precision, prompt_format)
            self._write_record = partial(write_run_record, self.path, config.model_dump_json(indent=1), *environment)
            self._write_record()
        if position.step == 0 and changes_base:
            save_initial_adapter(model, self.path / INITIAL_ADAPTER, is_main=is_main)
        if is_main:
            self.metrics = Metrics(
                self.path, config.logging, self._console, first_step=position.step, total_steps=total_steps,
                before_writing=self.check_lock, settings=config.model_dump(mode="json"),
            )  # fmt: skip

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.log(step, values)

    def _copy_initial_adapter(self, source: Path) -> None:
        if (self.path / INITIAL_ADAPTER).is_dir():
            return
        if not source.is_dir():
            raise UserError(f"{source}: is missing, but the run cannot continue without it; restore it")
        if self._ranks.is_main:
            shutil.copytree(source, self.path / INITIAL_ADAPTER)

    def save_answer(self, prompt: str, when: str, answer: str) -> None:
        self._write_optional(ANSWERS, partial(record_answer, self.path, prompt, when, answer))

    def save_examples(self, examples: list[Example]) -> None:
        self._write_optional(EXAMPLES, partial(record_examples, self.path, examples))

    def save_image(self, prompt: str, when: str, step: int, image: Any) -> None:
        self._write_optional(SAMPLES, partial(save_sample_image, self.path, prompt, when, image))
        if self.metrics is not None:
            self.metrics.log_image(step, prompt, image)

    def save_scu_records(self, scu_controller: ScuController) -> None:
        self._write_optional("the SCU's records", partial(scu_controller.write_files, self.path))

    def _write_optional(self, label: str, write: Callable[[], object]) -> None:
        if self._ranks.is_main:
            self.check_lock()
            with self.tolerate_full_disk(label):
                write()

    @contextmanager
    def tolerate_full_disk(self, label: str) -> Iterator[None]:
        """Warn and continue if the disk is full while writing a file that is not part of the result."""
        failures: list[str] = []
        with collect_disk_errors(failures, self.path):
            yield
        if failures:
            self._log(f"[yellow]warning:[/yellow] {label}: not written: {escape(failures[0])}")

    @phase("save")
    def save_result(
        self, engine: Engine, *, require_nonzero_b: bool, factor: float, identity: dict[str, Any] | None
    ) -> None:
        """Write the final weights to a temporary folder, then move them into place; a collective call.

        `factor` scales the adapter's update; rank 0 passes the run's `identity`. Raises SaveError if the disk is full.
        """
        result = self.path / RESULT
        failures: list[str] = []
        with collect_disk_errors(failures, self.path):
            if self._ranks.is_main:
                self.restore_record()
                shutil.rmtree(result, ignore_errors=True)
                result.mkdir()
            with use_averaged_weights(engine):
                weights = gather_weights(engine.module, only_trained=self._config.adapter != "none")
            for name, value in weights.items():
                if "lora_" in name and "_B." in name:  # lora_B and lora_embedding_B; the values are copies
                    value.mul_(factor)
            if self._ranks.is_main:
                self.build_weights_writer(engine, weights, require_nonzero_b=require_nonzero_b)(result)
                self.check_lock()
                self._write_card(result)
                record_result(self.path, move_result_into_place(self.path), identity)
        if failures:
            problem = f"the result was not written: {failures[0]}; the newest checkpoint contains it"
            raise SaveError(f"{self.path}: {problem}")

    def restore_record(self) -> None:
        """Check that the folder still belongs to this run, and rewrite the record if it is missing."""
        self.check_lock()
        if not ((self.path / RUN).exists() and (self.path / CONFIG).exists()):
            self._write_record()
            (self.path / METRICS_FILE).touch()

    def write_times(self) -> None:
        """Write the seconds per phase, including earlier attempts of this run."""
        with self.tolerate_full_disk(TIMES):
            record_times(self.path, PROGRESS.get_seconds_by_phase(), resumes=PROGRESS.first_step > 1)

    def write_report(self, loss_before: float | None, loss_after: float | None) -> None:
        """Write the report and print the summary.

        `loss_before` and `loss_after` are the held-out losses before and after training. A full disk or an exception
        while building the report only causes a warning, because the run is complete.
        """
        page = None
        if loss_before is None:  # a resumed run
            first = (record.get("eval/loss") for record in read_metrics(self.path) if record["step"] == 0)
            loss_before = next(first, None)
        with self.tolerate_full_disk("report.html"):
            try:
                page = write_report(self.path)
            except OSError:
                raise
            except Exception as error:  # the run is complete; a failed report must not cause a restart
                traceback.print_exc()
                problem = escape(f"{type(error).__name__}: {error}")
                self._log(f"[yellow]warning:[/yellow] report.html: not written: {problem}; the run is complete")
        for line in format_end_summary(self.path, self._config.model_dump(mode="json"), page, loss_before, loss_after):
            self._log(line)

    def print_resume_command(self, step: int) -> None:
        command = build_resume_command(sys.argv, overwrites=bool(self._config.output.overwrite))
        self._log(escape(f"stopped and saved at step {step}; resume with: {command}"))

    def get_adapter_format(self, engine: Engine) -> AdapterFormat | None:
        """Return the AdapterFormat of this run; None in full training, and on ranks other than 0."""
        if self._format is None and self._ranks.is_main and self._config.adapter != "none":
            names = [name for name, _ in list_trained_parameters(engine.module)]
            self._format = AdapterFormat.from_model(engine.module, names)
        return self._format

    def build_weights_writer(
        self, engine: Engine, weights: dict[str, torch.Tensor], *, require_nonzero_b: bool
    ) -> Callable[[Path], None]:
        """Return a function that writes gathered weights and tokenizer files to a folder, on rank 0.

        Set `require_nonzero_b` if the learning rate has been above zero: writing then fails if B is still zero.
        """
        model, is_full_training = engine.module, self._config.adapter == "none"
        write_companions = self._task.prepare_companion_files() if self._ranks.is_main else None
        initial = self.path / INITIAL_ADAPTER if changes_base_weights(self._config.lora) else None

        def write(folder: Path) -> None:
            if is_full_training:
                write_full_model(model, weights, folder)
            else:
                adapter_format = self.get_adapter_format(engine)
                assert adapter_format is not None, "weights are written on rank 0"
                write_adapter(adapter_format, weights, folder, require_nonzero_b=require_nonzero_b, initial=initial)
            if write_companions is not None:
                write_companions(folder)

        return write

    def _write_card(self, result: Path) -> None:
        if self._config.adapter != "none" and not is_user_written_card(self.path / CARD):
            path, records = str(self.path.resolve()), read_metrics(self.path)
            card = self._task.build_model_card(self._config, self.path, records, path)
            (result / CARD).write_text(card, encoding="utf-8")
