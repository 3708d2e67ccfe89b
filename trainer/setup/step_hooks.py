"""The hooks of a run (trainer/monitor/hooks.py): first gradients, times of the start, samples, skipped records."""

from collections.abc import Callable

from trainer.config import RunConfig
from trainer.data.prepared import Prepared, skipped_records
from trainer.model.adapter import GradientCheck
from trainer.monitor.console import Output
from trainer.monitor.expert_load import ExpertLoad
from trainer.monitor.hooks import FinishedStep, Hook
from trainer.monitor.profiler import StepProfiler
from trainer.monitor.spikes import History, SpikeWatch
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import PROGRESS
from trainer.tasks.task import BatchSource, Task

LEAST_SHOWN_S = 0.05


def build_hooks(
    config: RunConfig, prepared: Prepared, task: Task, ranks: Ranks, engine: Engine, batches: BatchSource,
    steering: object | None, history: History, total_steps: int, sample: Callable[[str, int], None], say: Output,
    *, alone: bool = True,
) -> list[Hook]:  # fmt: skip
    """Return the hooks of a run on this rank, in the order of their calls; `sample` generates samples at a step.

    A run that is not `alone` shares its passes with others, and has only hooks for its own data and losses.
    """
    model = engine.module
    if not alone:
        own: list[Hook] = [SkippedRecords(config, prepared, batches)] if ranks.is_main else []
        return [*own, SpikeWatch(say, history)] if ranks.is_main and config.training.on_spike == "warn" else own
    hooks: list[Hook | None] = [
        FirstGradients(GradientCheck(model, finite=not engine.fp16_enabled())),
        StartReport(say),
        StepProfiler.for_run(config, ranks.rank, total_steps, engine, steering),
        ExpertLoad.for_model(model, compiled=config.training.torch_compile),
    ]
    if ranks.is_main:
        hooks += [SkippedRecords(config, prepared, batches), task.meter(model)]
        hooks += [SpikeWatch(say, history)] if config.training.on_spike == "warn" else []
    if task.counted == "images" and (every := config.image.sample_every):
        hooks.append(Samples(sample, every, total_steps))
    return [hook for hook in hooks if hook is not None]


class FirstGradients(Hook):
    """Checks the gradients of the first step of this process."""

    def __init__(self, check: GradientCheck) -> None:
        self._check: GradientCheck | None = check

    def after_launch(self, step: int) -> None:
        if self._check is not None:
            self._check.finish()
            self._check = None


class StartReport(Hook):
    """Reports the times of the start at the end of the first step, and logs them with the next metrics."""

    def __init__(self, say: Output) -> None:
        self._say = say
        self._times: dict[str, float] = {}

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        if (parts := PROGRESS.end_start()) is not None:
            self._times = {f"start/{part.replace(' ', '_')}_s": seconds for part, seconds in parts.items()}
            self._times["start/total_s"] = sum(parts.values())
            shown = ", ".join(f"{part} {taken:.1f}" for part, taken in parts.items() if taken >= LEAST_SHOWN_S)
            self._say(f"start        {self._times['start/total_s']:.1f} s: {shown}")
            self._say.is_starting = False
        found, self._times = (self._times, {}) if step.is_logged else ({}, self._times)
        return found


class Samples(Hook):
    """Generates samples every `every` steps, on every rank, except after the last step."""

    def __init__(self, sample: Callable[[str, int], None], every: int, total_steps: int) -> None:
        self._sample, self._every, self._total_steps = sample, every, total_steps

    def between_steps(self, step: int, settle: Callable[[], None]) -> None:
        if step % self._every == 0 and step != self._total_steps:
            settle()
            self._sample(f"step-{step}", step)


class SkippedRecords(Hook):
    """Counts the records skipped by `dataset.on_bad_record: skip`, by source."""

    def __init__(self, config: RunConfig, prepared: Prepared, batches: BatchSource) -> None:
        self._given = config, prepared, batches

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        return {f"data/skipped/{source}": float(count) for source, count in skipped_records(*self._given).items()}
