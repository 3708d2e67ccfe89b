"""One run on one rank, read from top to bottom: join, load, adapt, start the engine, restore, loop, save."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from trainer.build import build_model, make_batches
from trainer.checkpoint.adapter_files import record_checksums
from trainer.checkpoint.checkpoint import SaveFailed
from trainer.checkpoint.run_record import RESULT, make_way, note_written, place_result, write_run_record
from trainer.checkpoint.weights import save_adapter, save_full_model
from trainer.config import LoadedConfig, collective_timeout, engine_zero
from trainer.contract import known_versions
from trainer.contract.folder_lock import FolderLock
from trainer.contract.full_disk import disk_errors_into
from trainer.course import Course
from trainer.data import Batches, StreamBatches, evaluation_batches
from trainer.data.prepared import Prepared, samples_of
from trainer.data.step_count import count_steps, step_warnings, steps_line
from trainer.decisions import VARLEN
from trainer.engine.deepspeed_engine import deepspeed_config, resolve_precision, start_engine
from trainer.engine.eight_bit_moments import elements_per_buffer
from trainer.engine.flat_adapter import flatten_adapter
from trainer.engine.optimizer import build_optimizer, build_schedule, planned_rates, restore_schedule
from trainer.engine.update_guard import UpdateGuard
from trainer.loop import Loop, Parts, Position, report_evaluation
from trainer.memory.oom_recovery import Recovery
from trainer.memory.preflight import peak_over_ranks, plan_memory, record_memory
from trainer.model.adapter import (
    GradientCheck,
    changes_base_weights,
    count_parameters,
    save_initial_adapter,
)
from trainer.model.answers import answer_prompt
from trainer.monitor.metrics import Metrics, read_metrics
from trainer.monitor.mfu import MfuMeter
from trainer.monitor.profiler import StepProfiler
from trainer.monitor.report.write import ANSWERS, keep_answer
from trainer.monitor.summary import end_summary, start_summary
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packing_probe import check_causal, keep_documents_apart
from trainer.ranks.agreement import meet
from trainer.ranks.group import Ranks, extend_timeouts, form_process_group
from trainer.ranks.progress import phase
from trainer.ranks.signals import StopRequest
from trainer.scu.controller import Steering
from trainer.step import evaluate_loss

INITIAL_ADAPTER = "initial_adapter"


class Run:
    """One run on one rank, built in the order in which its parts need each other."""

    def __init__(
        self,
        loaded: LoadedConfig,
        prepared: Prepared,
        ranks: Ranks,
        console: Console,
        stop: StopRequest,
        lock: FolderLock | None = None,
    ) -> None:
        """`lock` is that of the run's folder, which rank 0 holds."""
        self.config, self.notes, self.lock = loaded.config, loaded.notes, lock
        self.prepared, self.ranks, self.console, self.stop = prepared, ranks, console, stop
        self.run_dir = Path(self.config.output_dir)
        self.metrics: Metrics | None = None
        self.restored_scu: dict[str, Any] | None = None

    def train(self) -> Position:
        """Everything from joining the other ranks to the saved weights; every rank must call it."""
        self._begin()
        self.course = Course(self.config, self.prepared, self.ranks, self.device, self.precision, self.say)
        model = self._build_model()
        engine = self._start_engine(model)
        position, total_steps = self._restore(engine)
        self.steering = self._steer(engine, position, total_steps)
        self._open_records(model, position, total_steps)
        before = self._evaluate_and_sample(engine, position, "before") if position.step == 0 else None
        Loop(self._parts(engine, total_steps), self.config.training, position, total_steps).run()
        after = None
        if not self.stop:
            self.course.return_to_best(engine, position)
            after = self._evaluate_and_sample(engine, position, "after")
            self._save_result(engine)
        self.stop.saved = True
        if self.steering is not None and self.ranks.is_main:
            self.steering.settle()
            self._check_folder()
            with self._while_there_is_room("what the SCU found"):
                self.steering.write_files(self.run_dir)
        self.peak = peak_over_ranks(self.device)
        engine.destroy()
        self._end(position, before, after)
        return position

    @phase("join")
    def _begin(self) -> None:
        """Join the other ranks."""
        training = self.config.training
        world = meet(self.ranks, self.config, self.lock.token if self.lock is not None else "")
        form_process_group(self.ranks, collective_timeout(training))
        self.say(world.summary)
        if (warning := known_versions.warning()) is not None:
            self.say(f"[yellow]warning:[/yellow] {escape(warning)}")
        self.device = self.ranks.device()
        self.precision = resolve_precision(training.precision, self.device)
        for note in self.notes:
            self.say(f"note: {escape(note)}")
        torch.use_deterministic_algorithms(training.deterministic, warn_only=True)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = training.cudnn_benchmark
            if training.memory_fraction:
                torch.cuda.set_per_process_memory_fraction(training.memory_fraction, self.device)
        self.memory = plan_memory(self.config, self.prepared, self.ranks, self.device, self.precision)
        self.config = self.memory.config  # without `auto`
        self.decided = self.memory.decisions
        for note in self.memory.notes:
            self.say(note)
        samples, ranks = samples_of(self.prepared), self.ranks.world_size
        warnings = step_warnings(self.config, samples, ranks)
        self.say(f"steps: {steps_line(self.config.training, samples, ranks)}")
        for warning in warnings:
            self.say(f"[yellow]warning:[/yellow] {escape(warning)}")

    @phase("load")
    def _build_model(self) -> Any:
        config = self.config
        self.deepspeed_config = deepspeed_config(
            config.training,
            engine_zero(config),
            self.precision,
            on_gpu=self.device.type == "cuda",
            one_gradient=self.decided.flat.value,
        )
        self.say(f"loading the model {escape(config.base_model)}")
        model, fusion = build_model(
            config,
            self.decided,
            self.prepared.tokenizer,
            self.ranks,
            self.device,
            self.precision,
            self.deepspeed_config,
        )
        devices = f"{self.ranks.world_size} x {self.device.type}"
        summary = start_summary(model, config, self.precision, devices)
        for line in (*summary, *fusion, *self.prepared.notes, *self.prepared.data.stats.lines()):
            self.say(line)
        return model

    @phase("start engine")
    def _start_engine(self, model: Any) -> Any:
        config = self.config
        if config.training.torch_compile:
            model.compile()
        offloads = config.zero.offload_optimizer or self.device.type != "cuda"
        flat = None
        if self.decided.flat.value:
            multiple = elements_per_buffer(config.training.optimizer, self.ranks.world_size)
            flat = flatten_adapter(model, separate_up=bool(config.lora.loraplus_lr_ratio), multiple=multiple)
        optimizer = build_optimizer(model, config.training, config.lora, fused=not offloads)
        self.token_loss = TokenLoss(model, fused=self.decided.fused_head.value, say=self.say)
        engine = start_engine(model, optimizer, self.deepspeed_config)
        if flat is not None:
            flat.repoint()
        if self.decided.clips_on_device.value:
            UpdateGuard(engine, config.training.max_grad_norm)
        self.optimizer = optimizer
        any_token = self.prepared.tokenizer.pad_token_id
        check_causal(self.token_loss, engine.module, any_token, self.device, config.base_model)
        self.flat_packs = config.dataset.packing and keep_documents_apart(
            self.token_loss, engine.module, any_token, self.device
        )
        if self.decided.attention.value == VARLEN and not self.flat_packs:
            self.say("[yellow]warning:[/yellow] packs are kept apart by a mask: the memory estimate is off")
        return engine

    @phase("restore")
    def _restore(self, engine: Any) -> tuple[Position, int]:
        """Batches, schedule and position: from the start, or from a checkpoint."""
        training = self.config.training
        self.batches = make_batches(self.config, self.prepared, self.ranks, flat=self.flat_packs)
        total_steps = count_steps(training, samples_of(self.prepared), self.ranks.world_size)
        assert total_steps is not None  # a stream without max_steps was refused
        self.schedule = build_schedule(self.optimizer, training, total_steps)
        position, state = self.course.restore(engine, total_steps)
        if state:
            restore_schedule(self.schedule, int(state["schedule_steps"]))
            self.restored_scu = state.get("scu")
            if isinstance(self.batches, StreamBatches):
                self.batches.load_state_dict(state.get("stream", {}))
        return position, total_steps

    @phase("steer")
    def _steer(self, engine: Any, position: Position, total_steps: int) -> Steering | None:
        """The Shannon Control Unit, its target found reachable, or as it was in the checkpoint."""
        section = self.config.scu
        if not section.enabled:
            return None
        steering = Steering(
            section,
            engine.module,
            target_tokens=self.prepared.data.stats.target_tokens,
            total_steps=total_steps,
            base_parameters=count_parameters(engine.module)[1],
        )
        if position.step == 0:
            batches, _ = self.batches.step(0, 0)
            loss, _ = evaluate_loss(engine, self.token_loss, batches)
            rates = planned_rates(self.schedule, total_steps)
            ratio = self.config.lora.loraplus_lr_ratio or 1.0
            for warning in steering.check_target(loss / math.log(2), rates, b_ratio=ratio):
                self.say(f"[yellow]warning:[/yellow] {escape(warning)}")
        elif self.restored_scu:
            steering.load_state_dict(self.restored_scu, step=position.step, run_dir=self.run_dir)
        return steering

    def _open_records(self, model: Any, position: Position, total_steps: int) -> None:
        """Write to the run's folder for the first time: every check has passed."""
        config = self.config
        moves_base = changes_base_weights(config.lora) and config.adapter == "lora"
        if position.step and moves_base:
            self.course.bring(INITIAL_ADAPTER)
        if self.ranks.is_main:
            self._check_folder()
            moved = make_way(self.run_dir, config.output.overwrite) if position.step == 0 else None
            if moved:
                self.say(moved)
            write_run_record(self.run_dir, config, self.ranks.world_size, str(self.device.type))
        if position.step == 0 and moves_base:
            save_initial_adapter(model, self.run_dir / INITIAL_ADAPTER, is_main=self.ranks.is_main)
        if self.ranks.is_main:
            self.metrics = Metrics(
                self.run_dir, self.config.logging, self.console, first_step=position.step, total_steps=total_steps,
                before_writing=self._check_folder, settings=config.model_dump(mode="json"),
            )  # fmt: skip

    def _parts(self, engine: Any, total_steps: int) -> Parts:
        self.recovery = Recovery(self.config, self.ranks, engine, self.batches, self.say)
        extend_timeouts(collective_timeout(self.config.training))
        return Parts(
            engine=engine,
            schedule=self.schedule,
            token_loss=self.token_loss,
            batches=self.batches,
            samples_per_epoch=len(self.batches.samples) if isinstance(self.batches, Batches) else None,
            ranks=self.ranks,
            reporter=self.metrics,
            stop=self.stop,
            evaluate=(lambda: self._evaluate(engine)) if self.prepared.data.evaluation is not None else None,
            save=lambda position: self._save_checkpoint(engine, position),
            recovery=self.recovery,
            steering=self.steering,
            gradient_check=GradientCheck(engine.module, finite=self.precision != "fp16"),
            mfu=MfuMeter.of(engine.module, self.device, self.precision) if self.ranks.is_main else None,
            profiler=StepProfiler.of_run(self.config, self.ranks.rank, total_steps, engine, self.steering),
        )

    @phase("evaluate")
    def _evaluate(self, engine: Any) -> tuple[float, int]:
        training, samples = self.config.training, self.prepared.data.evaluation
        assert samples is not None
        batches = evaluation_batches(
            samples,
            batch_size=training.eval_batch_size or training.batch_size,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            pad_token_id=self.prepared.tokenizer.pad_token_id,
            flat=self.flat_packs,
        )
        return evaluate_loss(engine, self.token_loss, batches)

    def _evaluate_and_sample(self, engine: Any, position: Position, when: str) -> float | None:
        """Held-out loss, and answers to the sample prompts."""
        loss = position.last_evaluation if position.evaluated_at == position.step else None
        if self.prepared.data.evaluation is not None and loss is None:
            loss, _ = self._evaluate(engine)
            report_evaluation(self.metrics, position.step, loss)
        tokenizer, logging, system = self.prepared.tokenizer, self.config.logging, self.config.dataset.system_prompt
        for prompt in logging.sample_prompts:
            answer = answer_prompt(engine, tokenizer, prompt, logging.sample_tokens, system)
            self.say(f"[bold]{when} training[/bold]  {escape(prompt)}\n  -> {escape(answer.strip())}")
            if self.ranks.is_main:
                self._check_folder()
                with self._while_there_is_room(ANSWERS):
                    keep_answer(self.run_dir, prompt, when, answer.strip())
        return loss

    @phase("save")
    def _save_checkpoint(self, engine: Any, position: Position) -> None:
        state: dict[str, Any] = {"schedule_steps": self.schedule.last_epoch}
        if self.ranks.is_main:
            self._check_folder()
            name = f"checkpoint-{position.step}"
            note_written(self.run_dir, [name, f".writing-{name}"])
        if isinstance(self.batches, StreamBatches):
            state["stream"] = self.batches.state_dict()
        if self.steering is not None:
            state["scu"] = self.steering.state_dict()
            if self.ranks.is_main:
                with self._while_there_is_room("what the SCU found"):
                    self.steering.write_files(self.run_dir)
        self.course.save(engine, position, state, lambda folder: self._save_weights(engine, folder), self._check_folder)

    @phase("save")
    def _save_weights(self, engine: Any, folder: Path) -> None:
        model, tokenizer, is_main = engine.module, self.prepared.tokenizer, self.ranks.is_main
        if self.config.adapter == "none":
            save_full_model(model, tokenizer, folder, is_main=is_main)
            return
        initial = self.run_dir / INITIAL_ADAPTER if changes_base_weights(self.config.lora) else None
        # The first steps of a warm-up have a learning rate of zero.
        moved = sum(planned_rates(self.schedule, self.schedule.last_epoch)) > 0
        save_adapter(model, tokenizer, folder, is_main=is_main, must_have_moved=moved, initial=initial)

    @phase("save")
    def _save_result(self, engine: Any) -> None:
        """What training ends with, written beside and moved into the run's folder when it is whole."""
        result = self.run_dir / RESULT
        failures: list[str] = []
        with disk_errors_into(failures, self.run_dir):
            if self.ranks.is_main:
                self._check_folder()
                shutil.rmtree(result, ignore_errors=True)
                result.mkdir()
            self._save_weights(engine, result)
            if self.ranks.is_main:
                self._check_folder()
                self._write_card(result)
                place_result(self.run_dir)
                record_checksums(self.run_dir)
        if failures:
            raise SaveFailed(f"{self.run_dir}: the result was not written: {failures[0]}; the newest checkpoint has it")

    def _write_card(self, result: Path) -> None:
        """The model card, unless the run's folder has one that a person wrote."""
        from trainer.monitor.report.model_card import CARD, is_own_card, model_card

        if self.config.adapter != "none" and not is_own_card(self.run_dir / CARD):
            name = self.run_dir.resolve().name
            card = model_card(self.config, self.run_dir, read_metrics(self.run_dir), name=name)
            (result / CARD).write_text(card, encoding="utf-8")

    @phase("report")
    def _end(self, position: Position, before: float | None, after: float | None) -> None:
        if self.metrics is None:
            return
        self.metrics.close()
        self._check_folder()
        with self._while_there_is_room("the measured memory"):
            self.say(record_memory(self.run_dir, self.memory, self.peak, self.device, self.recovery.halvings))
        if self.stop:
            self.say(f"stopped at step {position.step}, saved; go on with training.resume_from_checkpoint=latest")
            return
        from trainer.monitor.report.write import write_report  # matplotlib, which the other ranks never need

        page = None
        with self._while_there_is_room("report.html and plots"):
            page = write_report(self.run_dir)
        for line in end_summary(self.run_dir, self.config, page, before, after):
            self.say(line)

    @contextmanager
    def _while_there_is_room(self, what: str) -> Iterator[None]:
        """What is written beside the result: a full disk is told of, and the run goes on without."""
        failures: list[str] = []
        with disk_errors_into(failures, self.run_dir):
            yield
        if failures:
            self.say(f"[yellow]warning:[/yellow] {what}: not written: {escape(failures[0])}")

    def _check_folder(self) -> None:
        """Raise FolderLost if another run has the folder by now: called before anything is written there."""
        if self.lock is not None:
            self.lock.check()

    def close(self) -> None:
        """Finish the files and the bar of a run that ends early."""
        if self.metrics is not None:
            self.metrics.close()

    def say(self, line: Any) -> None:
        """One of zerolora's own lines; only rank 0 speaks."""
        if self.ranks.is_main:
            self.console.print(line, soft_wrap=True)
