"""One run on one rank, read from top to bottom: join, load, adapt, start the engine, restore, loop, save."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from trainer.build import build_model, make_batches
from trainer.config import LoadedConfig, RunConfig, collective_timeout, engine_zero
from trainer.contract import known_versions
from trainer.contract.folder_lock import FolderLock
from trainer.course import Course
from trainer.data import Batches, StreamBatches, evaluation_batches
from trainer.data.prepared import Prepared, samples_of, share_stream
from trainer.data.shared_blocks import folder_of_run
from trainer.data.step_count import count_steps, smaller_batch_line, step_warnings, steps_line
from trainer.decisions import VARLEN, Decisions
from trainer.engine.deepspeed_engine import deepspeed_config, resolve_precision, start_engine
from trainer.engine.eight_bit_moments import elements_per_buffer
from trainer.engine.flat_adapter import flatten_adapter
from trainer.engine.optimizer import build_optimizer, build_schedule, planned_rates, rate_floor, restore_schedule
from trainer.engine.protocol import Engine
from trainer.engine.update_guard import UpdateGuard
from trainer.loop import Loop, Parts, Position, report_evaluation
from trainer.memory.oom_recovery import Recovery
from trainer.memory.preflight import MemoryPlan, peak_over_ranks, plan_memory, record_memory
from trainer.model.adapter import GradientCheck, count_parameters
from trainer.model.answers import answer_prompt
from trainer.monitor.expert_load import ExpertLoad
from trainer.monitor.metrics import Metrics
from trainer.monitor.mfu import MfuMeter
from trainer.monitor.profiler import StepProfiler
from trainer.monitor.summary import start_summary
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packing_probe import check_causal, keep_documents_apart
from trainer.ranks.agreement import meet
from trainer.ranks.group import Ranks, extend_timeouts, form_process_group
from trainer.ranks.progress import phase
from trainer.ranks.signals import StopRequest
from trainer.run_folder import RunFolder
from trainer.scu.base_samples import divergence_of
from trainer.scu.controller import Steering
from trainer.step import evaluate_loss


@dataclass(frozen=True)
class Measurement:
    """Of a run that is made for its held-out losses: what it does otherwise.

    It writes no checkpoints and no report: an interrupted one starts again.
    """

    evaluate: Callable[[Engine], tuple[float, int]]
    """Held-out loss of the engine's model, nats per target token, and the number of target tokens."""
    at_the_end: Callable[[Engine], None]
    """What more is measured of the trained model."""


class Run:
    """One run on one rank, built in the order in which its parts need each other."""

    # What it is given.
    config: RunConfig
    """Without `auto` once the memory is planned."""
    notes: Sequence[str]
    prepared: Prepared
    ranks: Ranks
    console: Console
    stop: StopRequest
    lock: FolderLock | None
    measurement: Measurement | None
    # join
    device: torch.device
    precision: str
    memory: MemoryPlan
    decided: Decisions
    course: Course
    folder: RunFolder
    # load, start engine
    deepspeed_config: dict[str, Any]
    token_loss: TokenLoss
    optimizer: torch.optim.Optimizer
    flat_packs: bool
    """Packs are one row without padding."""
    # restore, steer
    batches: Batches | StreamBatches
    schedule: Any
    restored_scu: dict[str, Any] | None
    steering: Steering | None
    # train, save
    metrics: Metrics | None
    """Rank 0's, from the first write on."""
    recovery: Recovery
    peak: int
    """Bytes, of the rank that needed most."""

    def __init__(
        self,
        loaded: LoadedConfig,
        prepared: Prepared,
        ranks: Ranks,
        console: Console,
        stop: StopRequest,
        lock: FolderLock | None = None,
        measurement: Measurement | None = None,
    ) -> None:
        """`lock` is that of the run's folder, which rank 0 holds."""
        self.config, self.notes, self.lock = loaded.config, loaded.notes, lock
        self.prepared, self.ranks, self.console, self.stop = prepared, ranks, console, stop
        self.measurement = measurement
        self.restored_scu = self.steering = self.metrics = None

    def train(self) -> Position:
        """Everything from joining the other ranks to the saved weights; every rank must call it."""
        self._begin()
        self.course = Course(self.config, self.prepared, self.ranks, self.device, self.precision, self.say)
        self.folder = RunFolder(self.config, self.prepared.tokenizer, self.ranks, self.console, self.course, self.lock)
        model = self._build_model()
        engine = self._start_engine(model)
        position, total_steps = self._restore(engine)
        self.steering = self._steer(engine, position, total_steps)
        self.metrics = self.folder.open(model, position, total_steps, self.device, self.precision)
        before = self._evaluate_and_sample(engine, position, "before") if position.step == 0 else None
        Loop(self._parts(engine, total_steps), self.config.training, position, total_steps).run()
        after = None
        if not self.stop:
            self.course.return_to_best(engine, position)
            after = self._evaluate_and_sample(engine, position, "after")
            self._save_result(engine)
            if self.measurement is not None:
                self.measurement.at_the_end(engine)
        self.stop.saved = True
        if self.steering is not None and self.ranks.is_main:
            self.steering.settle()
            self.folder.save_steering(self.steering)
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
        if world.hosts > 1:
            blocks = folder_of_run(Path(self.config.output_dir) / "logs", world.token, is_main=self.ranks.is_main)
            self.prepared = share_stream(self.prepared, blocks)
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
        if smaller := smaller_batch_line(training, self.config.training, ranks):
            self.say(f"note: {smaller}")
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
        tokenizer, device, precision = self.prepared.tokenizer, self.device, self.precision
        model, fusion = build_model(
            config, self.decided, tokenizer, self.ranks, device, precision, self.deepspeed_config
        )
        devices = f"{self.ranks.world_size} x {self.device.type}"
        summary = start_summary(model, config, self.precision, devices)
        for line in (*summary, *fusion, *self.prepared.notes, *self.prepared.data.stats.lines()):
            self.say(line)
        return model

    @phase("start engine")
    def _start_engine(self, model: Any) -> Engine:
        config = self.config
        if config.training.torch_compile:
            model.compile()
        offloads = config.zero.offload_optimizer or self.device.type != "cuda"
        flat = None
        if self.decided.flat.value:
            multiple = elements_per_buffer(config.training.optimizer, self.ranks.world_size)
            flat = flatten_adapter(model, separate_up=bool(config.lora.loraplus_lr_ratio), multiple=multiple)
        optimizer = build_optimizer(model, config.training, config.lora, fused=not offloads)
        balance = config.training.router_aux_loss
        self.token_loss = TokenLoss(model, fused=self.decided.fused_head.value, say=self.say, balance=balance)
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
    def _restore(self, engine: Engine) -> tuple[Position, int]:
        """Batches, schedule and position: from the start, or from a checkpoint."""
        training = self.config.training
        self.batches = make_batches(self.config, self.prepared, self.ranks, flat=self.flat_packs)
        total_steps = count_steps(training, samples_of(self.prepared), self.ranks.world_size)
        assert total_steps is not None  # a stream without max_steps was refused
        self.schedule = build_schedule(self.optimizer, training, total_steps, floor=rate_floor(self.config.scu))
        position, state = self.course.restore(engine, total_steps)
        if state:
            restore_schedule(self.schedule, int(state["schedule_steps"]))
            self.restored_scu = state.get("scu")
            if isinstance(self.batches, StreamBatches):
                self.batches.load_state_dict(state.get("stream", {}))
        return position, total_steps

    @phase("steer")
    def _steer(self, engine: Engine, position: Position, total_steps: int) -> Steering | None:
        """The Shannon Control Unit, as it was in the checkpoint if there is one, its target found reachable."""
        section = self.config.scu
        if not section.enabled:
            return None
        divergence = None
        if section.measure == "kl":
            divergence = divergence_of(
                self.config, self.prepared, self.ranks, engine, self.token_loss,
                flat=self.flat_packs, resumes=position.step > 0, say=self.say,
            )  # fmt: skip
        steering = Steering(
            section,
            engine.module,
            target_tokens=self.prepared.data.stats.target_tokens,
            total_steps=total_steps,
            base_parameters=count_parameters(engine.module)[1],
            divergence=divergence,
        )
        notes: list[str] = []
        if self.restored_scu:
            notes = steering.load_state_dict(self.restored_scu, step=position.step, run_dir=self.folder.path)
        elif position.step:
            notes = ["scu.enabled=true: the checkpoint has no controller; it begins anew"]
        batches, _ = self.batches.step(position.epoch, position.offset)
        loss, _ = evaluate_loss(engine, self.token_loss, batches)
        rates = planned_rates(self.schedule, total_steps)[position.step :]
        ratio = self.config.lora.loraplus_lr_ratio or 1.0
        resumes = position.step > 0
        warnings = steering.check_target(loss / math.log(2), rates, b_ratio=ratio, resumes=resumes)
        for warning in [*notes, *warnings]:
            self.say(f"[yellow]warning:[/yellow] {escape(warning)}")
        return steering

    def _parts(self, engine: Engine, total_steps: int) -> Parts:
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
            experts=self._expert_load(engine),
            profiler=StepProfiler.of_run(self.config, self.ranks.rank, total_steps, engine, self.steering),
        )

    def _expert_load(self, engine: Engine) -> ExpertLoad | None:
        compiled = self.config.training.torch_compile
        return ExpertLoad.of(engine.module, compiled=compiled) if self.ranks.is_main else None

    @phase("evaluate")
    def _evaluate(self, engine: Engine) -> tuple[float, int]:
        if self.measurement is not None:
            return self.measurement.evaluate(engine)
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

    def _evaluate_and_sample(self, engine: Engine, position: Position, when: str) -> float | None:
        """Held-out loss, and answers to the sample prompts."""
        loss = position.last_evaluation if position.evaluated_at == position.step else None
        if self.prepared.data.evaluation is not None and loss is None:
            loss, _ = self._evaluate(engine)
            report_evaluation(self.metrics, position.step, loss)
        tokenizer, logging, system = self.prepared.tokenizer, self.config.logging, self.config.dataset.system_prompt
        for prompt in logging.sample_prompts:
            answer = answer_prompt(engine, tokenizer, prompt, logging.sample_tokens, system)
            self.say(f"[bold]{when} training[/bold]  {escape(prompt)}\n  -> {escape(answer.strip())}")
            self.folder.save_answer(prompt, when, answer.strip())
        return loss

    @phase("save")
    def _save_checkpoint(self, engine: Engine, position: Position) -> None:
        if self.measurement is not None:
            return
        state: dict[str, Any] = {"schedule_steps": self.schedule.last_epoch}
        if isinstance(self.batches, StreamBatches):
            state["stream"] = self.batches.state_dict()
        if self.steering is not None:
            state["scu"] = self.steering.state_dict()
            self.folder.save_steering(self.steering)
        self.folder.save_checkpoint(engine, position, state, must_have_moved=self._must_have_moved())

    @phase("save")
    def _save_result(self, engine: Engine) -> None:
        self.folder.save_result(engine, must_have_moved=self._must_have_moved())

    def _must_have_moved(self) -> bool:
        """The first steps of a warm-up have a learning rate of zero."""
        return sum(planned_rates(self.schedule, self.schedule.last_epoch)) > 0

    @phase("report")
    def _end(self, position: Position, before: float | None, after: float | None) -> None:
        if self.metrics is None:
            return
        self.metrics.close()
        if self.measurement is not None:
            self.say(f"stopped at step {position.step}" if self.stop else f"done at step {position.step}: {after:.4f}")
            return
        self.folder.check()
        with self.folder.while_there_is_room("the measured memory"):
            self.say(record_memory(self.folder.path, self.memory, self.peak, self.device, self.recovery.halvings))
        if self.stop:
            self.say(f"stopped at step {position.step}, saved; go on with training.resume_from_checkpoint=latest")
            return
        self.folder.write_report(before, after)

    def close(self) -> None:
        """Finish the files and the bar of a run that ends early."""
        if self.metrics is not None:
            self.metrics.close()

    def say(self, line: Any) -> None:
        """One of zerolora's own lines; only rank 0 speaks."""
        if self.ranks.is_main:
            self.console.print(line, soft_wrap=True)
