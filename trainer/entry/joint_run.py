"""Train several adapters on one base model (`adapters`) in joint passes; each is a `Run` with its own folder.

A joint step is one step for each adapter, with the same gradient, clipping, schedule and random numbers as in a
separate run. Each adapter's folder is the same as a separate run's, so an adapter can resume alone or with others.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.markup import escape

from trainer.config import LoadedConfig, UserError
from trainer.config.checks import flatten_entry
from trainer.contract.folder_lock import FolderLock
from trainer.contract.json_records import SweptRun, read_sweep, update_sweep
from trainer.contract.restart_record import apply_recorded_changes
from trainer.data.batches import MicroBatch, PairBatch, merge_batches
from trainer.data.prepared import PreparedRun, count_samples
from trainer.data.step_count import resolve_eval_and_save_steps, resolve_global_batch
from trainer.loop import Loop, exclude_from_garbage_collection
from trainer.memory.planner import apply_changes, combine_adapters
from trainer.memory.preflight import plan_memory
from trainer.monitor.console import Output
from trainer.monitor.display import Display
from trainer.monitor.hooks import FinishedStep, FirstGradientCheck, Hook, StartReport
from trainer.monitor.report.sweep_table import PAGE, print_table, read_run_results, write_page
from trainer.parallel.engine.adapter_choice import find_choice
from trainer.parallel.engine.deepspeed_engine import resolve_precision
from trainer.parallel.engine.flat_adapter import find_flat_adapter
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, sum_over_ranks
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.signals import StopRequest
from trainer.patches.loss_head import TokenLoss
from trainer.run import Run
from trainer.setup.build import Builder
from trainer.setup.joining import build_task, join_ranks
from trainer.setup.kinds import find_model_kind
from trainer.step import RANK_ENCODING_BASE, StepInFlight, sum_counts
from trainer.tasks.preference import PreferenceLoss

SHARED_SETTINGS = ("gradient_checkpointing", "gradient_checkpointing_layers", "tiled_mlp")
"""Settings of `training` that the memory estimate resolves for all adapters."""


class AdapterEngine:
    """Wraps the engine for one adapter's run, with only that adapter's optimizer group and separate step counts."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine = engine
        optimizer: Any = copy.copy(engine.basic_optimizer)
        optimizer.param_groups = [engine.basic_optimizer.param_groups[index]]
        optimizer._opt_called = True  # torch's schedules warn unless an update precedes their first step
        self.basic_optimizer: torch.optim.Optimizer = optimizer
        self.skipped_steps = self.global_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)


@dataclass
class _Member:
    run: Run
    index: int
    adapter: str
    """The adapter's name in the model."""
    has_finished: bool = False
    failure: FloatingPointError | None = None


class JointRun:
    """Trains the adapters of a run in joint passes; every rank creates a `JointRun`."""

    def __init__(
        self, loaded: LoadedConfig, prepared: PreparedRun, ranks: Ranks, console: Console, stop: StopRequest,
        lock: FolderLock | None = None, *, verbose: bool = True,
    ) -> None:  # fmt: skip
        self.config, self._notes, self._lock, self._prepared = loaded.config, loaded.notes, lock, prepared
        self._ranks, self._stop, self._verbose = ranks, stop, verbose
        self.log = Output(console, is_main=ranks.is_main, verbose=verbose)
        self._folder = Path(self.config.output_dir)
        self._console = console
        self.runs: list[Run] = []
        self._should_stop = False
        for config, data in zip(self.config.runs, prepared.adapters, strict=True):
            quiet = apply_changes(config, {"logging.progress": "off"})
            run = Run(LoadedConfig(quiet, ()), data, ranks, console, stop, lock, verbose=verbose)
            run.log = Output(console, is_main=ranks.is_main, verbose=verbose, name=Path(config.output_dir).name)
            run.log.shows_start = not self.runs
            self.runs.append(run)

    def train(self) -> None:
        """Train all adapters; a collective call. Raises FloatingPointError at the end if any failed."""
        self._join()
        for run in self.runs:
            run.find_checkpoint()
        first, builder = self.runs[0], self.runs[0].builder
        first.builder = self._builder
        engine = first._start_engine(first._build_model())
        first.builder = builder
        self._engine, self._loss = engine, first.loss
        assert self._builder.guard is not None and isinstance(self._loss, TokenLoss)
        self._guard = self._builder.guard
        choice = find_choice(engine.module)
        assert choice is not None
        self._choice = choice
        self._members = [
            _Member(run, index, name) for index, (run, name) in enumerate(zip(self.runs, choice.names, strict=True))
        ]
        self._record({})
        for member in self._members:
            run, adapter_engine = member.run, AdapterEngine(engine, member.index)
            fused_head, run.resident = run.memory.decisions.fused_head.value, first.resident
            run.loss = self._loss if run is first else run.task.build_loss(engine.module, fused_head=fused_head)
            run.task.flat_packs = first.task.flat_packs
            for line in (*run.prepared.notes, *run.prepared.data.stats.format_summary()):
                if run.config.dataset != first.config.dataset and line not in first.prepared.notes:
                    run.log(line)
            with choice.select(member.adapter):
                run.begin(adapter_engine)
                run.folder.get_adapter_format(adapter_engine)
            run.log.shows_start = True
        progress = self.config.logging.progress if self._ranks.is_main else "off"
        self._display = Display(self._console, progress, total_steps=max(run.total_steps for run in self.runs))
        self._train_steps()
        self._display.stop()
        engine.destroy()
        for member in self._members:
            if member.failure is None:
                member.run.log.is_starting = not self._verbose  # `_report` prints a table of all adapters
                member.run.finish()
            else:
                member.run.close()
        self._report()

    def close(self) -> None:
        for run in self.runs:
            run.close()

    def _join(self) -> None:
        config, ranks = self.config, self._ranks
        device = ranks.device()
        join_ranks(config, self._notes, ranks, self._lock, self.log)
        precision = resolve_precision(config.training.precision, device)
        configs = []
        for run in self.runs:
            samples, data_ranks = count_samples(run.prepared), config.count_data_ranks(ranks.world_size)
            resolved = resolve_global_batch(run.config, samples, data_ranks)
            configs.append(resolve_eval_and_save_steps(resolved, samples, data_ranks))
        steps = {resolved.training.gradient_accumulation_steps for resolved in configs}
        if len(steps) > 1:
            raise UserError(
                f"training.global_batch_size: adapters would use {' and '.join(map(str, sorted(steps)))} micro-steps, "
                "but need the same number; set one training.gradient_accumulation_steps for all, and each batch_size"
            )
        kind = find_model_kind(config)
        longest = max(self.runs, key=lambda run: _compute_max_length(run.prepared))
        combined = combine_adapters(config, configs, on_gpu=device.type == "cuda")
        memory = plan_memory(kind.planner, combined, longest.prepared, ranks, device, precision)
        for note in memory.notes:
            self.log(note)
        decided = memory.config
        shared = {f"training.{name}": getattr(decided.training, name) for name in SHARED_SETTINGS}
        for run, resolved in zip(self.runs, configs, strict=True):
            run.config = apply_changes(resolved, shared | {"zero": decided.zero})
            run.device, run.precision, run.memory = device, precision, replace(memory, config=run.config)
            run.task, run.total_steps = build_task(run.config, run.config, run.prepared, ranks, precision, run.log)
            run.builder = Builder(run.config, memory.decisions, run.task, ranks, device, precision)
        decided._runs = tuple(run.config for run in self.runs)
        self._builder = Builder(decided, memory.decisions, self.runs[0].task, ranks, device, precision)

    def _train_steps(self) -> None:
        hooks: list[Hook] = [StartReport(self.log)]
        if not any(member.run.loop.is_done for member in self._members):
            hooks.append(FirstGradientCheck(self._engine.module, finite=False))
        self._stop.training = True
        self._engine.train()
        try:
            with exclude_from_garbage_collection():
                while active := self._finish_done_members():
                    self._step(active, hooks)
        except UserError as error:
            for member in self._list_unfinished():
                with suppress(UserError), self._choice.select(member.adapter):
                    member.run.loop.save_and_raise(error)
            raise
        stopped = self._list_unfinished()
        for member in stopped:
            self._call_loop(member, Loop.end)
        self._stop.agree_on_signal()
        for member in stopped:
            member.run.evaluate_and_save(stopped=True)
        self._stop.saved = True

    def _list_unfinished(self) -> list[_Member]:
        return [member for member in self._members if not member.has_finished and member.failure is None]

    def _finish_done_members(self) -> list[_Member]:
        for member in self._list_unfinished():
            if member.run.loop.is_done:
                self._call_loop(member, Loop.end)
                if member.failure is None:
                    with self._choice.select(member.adapter):
                        member.run.evaluate_and_save(stopped=False)
                    self._engine.train()
                    self._deactivate(member)
                    self._record({member.index: 0})
        return [member for member in self._list_unfinished() if member.run.loop.should_continue]

    def _step(self, active: Sequence[_Member], hooks: Sequence[Hook]) -> None:
        first = active[0].run
        for member in active:
            member.run.loop.begin_step()
        recovery = first.memory.build_recovery(self._ranks.world_size)
        step = first.position.step + 1
        launched, consumed = recovery.attempt(step, first.position.step, partial(self._launch, active))
        for hook in hooks:
            hook.after_launch(step)
        for member, step_in_flight, samples in zip(active, launched, consumed, strict=True):
            self._call_loop(member, partial(Loop.advance, launched=step_in_flight, consumed=samples))
            self._call_loop(member, Loop.after_step)
        # Show the mean loss; each adapter's metrics contain its own loss.
        latest = [member.run.loop.latest for member in active]
        losses = [result.loss for result in latest if result is not None]
        loss = sum(losses) / len(losses) if losses else math.nan
        for hook in hooks:
            hook.after_step(FinishedStep(step, loss, math.nan, 0.0, is_logged=True))
        self._display.update(step, {"train/loss": loss})
        if step % self.config.training.logging_steps == 0:
            self._display.print_line(step, {"train/loss": loss})

    def _call_loop(self, member: _Member, call: Callable[[Loop], object]) -> None:
        """Call a method of an adapter's loop. If the adapter's loss is not finite, only this adapter fails."""
        if member.failure is not None:
            return
        try:
            with self._choice.select(member.adapter):
                call(member.run.loop)
        except FloatingPointError as error:
            member.failure = error
            self._deactivate(member)
            self._record({member.index: 1})
            member.run.log(f"[red]failed:[/red] {escape(str(error))}; the other adapters continue")

    def _deactivate(self, member: _Member) -> None:
        member.has_finished = member.failure is None
        self._guard.untrained.add(member.index)

    def _launch(self, active: Sequence[_Member]) -> tuple[list[StepInFlight], list[int]]:
        """Launch a joint step. Return each adapter's step, and its number of samples consumed across all ranks."""
        ranks, device, engine = self._ranks, self._engine.device, self._engine
        fetched = [member.run.loop.fetch() for member in active]
        batches: list[Sequence[MicroBatch]] = [batch for batch, _ in fetched]
        # If adapters were changed, the run saves and stops, and the launcher starts it again.
        entries = list(self.config.adapters) if ranks.is_main else []
        self._should_stop = bool(self._stop) or apply_recorded_changes(self._folder, entries) != entries
        requests = [[self._should_stop, member.run.loop.wants_save()] for member in active]
        counts = sum_counts(batches, requests, ranks, device)
        micro_steps = len(batches[0])
        scales = (ranks.world_size * micro_steps / (counts[:, 0] + (counts[:, 0] == 0))).float()
        sums = torch.zeros(len(active), 3, device=device, dtype=torch.float64)
        for index in range(micro_steps):
            is_last = index == micro_steps - 1
            parts = [micro_batches[index] for micro_batches in batches]
            self._run_micro_step(active, parts, scales, sums, micro_steps if is_last else 0)
            if is_last:
                nonfinite = torch.where(torch.isfinite(sums[:, 0]), 0.0, float(RANK_ENCODING_BASE + ranks.rank))
                sums[:, 1] = nonfinite
                sum_over_ranks(sums)
                for member in active:
                    self._call_loop(member, Loop.before_update)
            with phase("optimizer step"):
                engine.step()
        self._guard.check()
        norms = torch.stack([self._guard.norms[member.index] for member in active]).double().to(device)
        applied = torch.isfinite(norms)
        for index, member in enumerate(active):
            if (scu_controller := member.run.scu_controller) is not None:
                step = member.run.position.step + 1
                scu_controller.observe(step, sums[index, 0], counts[index, 0], sums[index, 2], applied[index])
        columns = [sums[:, 0], norms, applied.double(), sums[:, 1], nonfinite.double()]
        numbers = torch.cat([counts, torch.stack(columns, dim=1)], dim=1)
        return [StepInFlight(row) for row in numbers], [samples for _, samples in fetched]

    def _run_micro_step(
        self, active: Sequence[_Member], batches: Sequence[MicroBatch], scales: torch.Tensor, sums: torch.Tensor,
        penalty_scale: int,
    ) -> None:  # fmt: skip
        """Run a joint forward and backward pass over the micro-batches of all adapters, and add their losses to `sums`.

        `penalty_scale` multiplies the SCU penalties: the number of micro-steps on the last one, and 0 on the others.
        """
        engine, flat = self._engine, find_flat_adapter(self._engine.module)
        assert flat is not None and isinstance(self._loss, TokenLoss)
        padding = int(active[0].run.prepared.tokenizer.pad_token_id)
        merged = merge_batches(batches, padding)
        width, is_flat = merged.input_ids.shape[1], merged.cu_seqlens is not None
        sizes = [batch.input_ids.numel() if is_flat else len(batch.input_ids) * width for batch in batches]
        rows = [(member.adapter, size) for member, size in zip(active, sizes, strict=True)]
        self._loss.probe_head(merged, engine.device)
        with self._choice.assign_rows(rows, engine.device):
            losses = self._compute_losses(active, batches, merged)
            sums[:, 0] += losses.detach()
            total = (losses * scales).sum()
            inactive = set(range(len(flat.buffers))) - {member.index for member in active}
            # Every buffer has a gradient on every rank, including those of inactive adapters.
            total = total + sum(flat.buffers[index].narrow(0, 0, 0).sum() for index in inactive)
            for index, member in enumerate(active):
                if penalty_scale and (scu_controller := member.run.scu_controller) is not None:
                    total = total + scu_controller.compute_penalty(member.run.position.step + 1) * penalty_scale
                    sums[index, 2] = scu_controller.get_local_contribution()
            with phase("backward"):
                engine.backward(total)

    def _compute_losses(
        self, active: Sequence[_Member], batches: Sequence[MicroBatch], merged: MicroBatch
    ) -> torch.Tensor:
        """Return the summed loss of each adapter. Preference pairs use their adapter's loss function and beta."""
        engine, loss = self._engine, self._loss
        assert isinstance(loss, TokenLoss)
        if not isinstance(loss, PreferenceLoss):
            return loss.compute_by_part(engine, merged, engine.device, [each.target_count for each in batches])
        pairs, adapter_losses = cast(Sequence[PairBatch], batches), [cast(PreferenceLoss, m.run.loss) for m in active]
        with_reference = any(each.has_reference for each in adapter_losses)
        measures, has_divergence = loss.measure_tokens(engine, merged, engine.device, with_reference=with_reference)
        parts = measures.split([int(batch.document_targets.sum()) for batch in pairs], dim=1)
        triples = zip(adapter_losses, parts, pairs, strict=True)
        return torch.stack([each.score_measures(part, has_divergence, batch)[1].sum() for each, part, batch in triples])

    def _record(self, codes: dict[int, int]) -> None:
        """Write folders, settings and exit codes of adapters to sweep.json for `zerolora sweep --table`.

        `codes` maps the indices of adapters to exit codes. If it is empty, all adapters are written without exit codes.
        """
        if not self._ranks.is_main:
            return
        if self._lock is not None:
            self._lock.check()
        self._folder.mkdir(parents=True, exist_ok=True)
        known = {run.folder: run for run in read_sweep(self._folder)}  # written by `zerolora sweep --together`
        for index, run in enumerate(self.runs):
            if index in codes or not codes:
                folder = str(Path(run.config.output_dir).absolute())
                settings = [f"{name}={value}" for name, value in flatten_entry(self.config.adapters[index])][1:]
                entry = known.get(folder, SweptRun(folder, settings=settings))
                update_sweep(self._folder, [replace(entry, exit_code=codes.get(index))])

    def _report(self) -> None:
        failed = [Path(member.run.config.output_dir).name for member in self._members if member.failure is not None]
        if self._ranks.is_main and not self._should_stop and not any(run.digest for run in read_sweep(self._folder)):
            results = read_run_results(self._folder)
            print_table(self.log.console, results)
            if any(result.loss is not None for result in results):
                self.log(write_page(results, self._folder / PAGE))
        if failed:
            raise FloatingPointError(
                f"{len(failed)} of {len(self._members)} adapters failed: {', '.join(failed)}; the others completed"
            )


def _compute_max_length(prepared: PreparedRun) -> int:
    train = prepared.data.train
    return int(train.count_tokens()[0].max()) if hasattr(train, "count_tokens") else 0
