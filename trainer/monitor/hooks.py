"""Hooks that the training loop calls before, during and after each step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.contract.known_versions import replaces
from trainer.model.adapter import GradientCheck
from trainer.model.expert_layers import DOWN, find_expert_modules, get_expert_shape, takes_all_tokens
from trainer.monitor.console import Output
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.parallel.ranks.progress import PROGRESS

MIN_SHOWN_S = 0.05
HISTORY_STEPS = 100
"""Number of previous losses with which a loss is compared."""
MIN_HISTORY = 20
"""Minimum number of previous losses for a comparison, and of steps between warnings."""
SPIKE_STDS = 8.0
SPIKE_FRACTION = 0.2
MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""


@dataclass(frozen=True)
class FinishedStep:
    """The results of a step, copied to the host."""

    number: int
    loss: float
    grad_norm: float
    seconds: float
    is_logged: bool
    """Whether the step's metrics are logged; the same on every rank."""


class Hook:
    """Base class of training hooks, with methods that do nothing.

    All ranks call hooks in the same order, so hooks may communicate. `finish` is not called if the run fails.
    """

    def before_step(self, step: int) -> None:
        """Called before the micro-batches of a step are fetched."""

    def on_batches(self, step: int, batches: Sequence[Any]) -> None:
        """Called with this rank's micro-batches for a step, and again if the step is repeated with smaller ones."""

    def after_launch(self, step: int) -> None:
        """Called once a step has been launched; on a GPU, its results are not available yet."""

    def after_step(self, step: FinishedStep) -> Mapping[str, float]:
        """Return metrics for a finished step. On a GPU, this is called after the next step is launched."""
        return {}

    def between_steps(self, step: int, finish_step: Callable[[], None]) -> None:
        """Called after a step. Slow hooks call `finish_step` first, so that their time does not count as step time."""

    def finish(self) -> None:
        """Called after the last step."""


class FirstGradientCheck(Hook):
    def __init__(self, model: Any, *, finite: bool) -> None:
        self._check: GradientCheck | None = GradientCheck(model, finite=finite)

    def after_launch(self, step: int) -> None:
        if self._check is not None:
            self._check.finish()
            self._check = None


class StartReport(Hook):
    """Reports the start-up times after the first step, and logs them with the next metrics."""

    def __init__(self, log: Output) -> None:
        self._log = log
        self._times: dict[str, float] = {}

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        if (parts := PROGRESS.take_startup_times()) is not None:
            self._times = {f"start/{part.replace(' ', '_')}_s": seconds for part, seconds in parts.items()}
            self._times["start/total_s"] = sum(parts.values())
            shown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= MIN_SHOWN_S)
            self._log(f"start        {self._times['start/total_s']:.1f} s: {shown}")
            self._log.is_starting = False
        if not step.is_logged:
            return {}
        times, self._times = self._times, {}
        return times


class SampleHook(Hook):
    """Generates samples every `every` steps on every rank, except after the last step."""

    def __init__(self, sample: Callable[[str, int], None], every: int, total_steps: int) -> None:
        self._sample, self._every, self._total_steps = sample, every, total_steps

    def between_steps(self, step: int, finish_step: Callable[[], None]) -> None:
        if step % self._every == 0 and step != self._total_steps:
            finish_step()
            self._sample(f"step-{step}", step)


class SkippedRecords(Hook):
    """Counts the records skipped by `dataset.on_bad_record: skip`, by source."""

    def __init__(self, skipped: Callable[[], dict[str, int]]) -> None:
        self._skipped = skipped

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        return {f"data/skipped/{source}": float(count) for source, count in self._skipped().items()}


class History(Protocol):
    """A run's recent losses and number of loss spikes, which checkpoints save."""

    latest_losses: list[float]
    spikes: int


class SpikeDetector(Hook):
    """Detects losses that exceed the recent median by both 8 standard deviations and a fifth of the median."""

    def __init__(self, log: Callable[[str], None], history: History) -> None:
        self._log, self._history = log, history
        self._warned_at = -HISTORY_STEPS

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        self._history.spikes += self.check(step.number, step.loss, step.grad_norm)
        return {"train/spikes": float(self._history.spikes)}

    def check(self, step: int, loss: float, grad_norm: float) -> bool:
        """Return whether the loss of a step is a spike; warn at most once every `MIN_HISTORY` steps."""
        is_spike, history = False, self._history.latest_losses
        if len(history) >= MIN_HISTORY:
            median_loss = median(history)
            spread = MAD_TO_STD * median(abs(value - median_loss) for value in history)
            is_spike = loss - median_loss > max(SPIKE_STDS * spread, SPIKE_FRACTION * median_loss)
            if is_spike and step - self._warned_at >= MIN_HISTORY:
                self._warned_at = step
                self._log(
                    f"[yellow]warning:[/yellow] step {step}: loss {loss:.3f}, but the last {len(history)} had a median "
                    f"of {median_loss:.3f} (gradient norm {grad_norm:.3g}); `zerolora inspect CONFIG --step {step} "
                    "--ranks N` shows its data"
                )
        if math.isfinite(loss):
            history[:] = [*history[-HISTORY_STEPS + 1 :], loss]
        return is_spike


@replaces("the call of experts, to read its arguments")
class ExpertLoad(Hook):
    """Counts, on the device, the training tokens routed to each expert between calls to `compute_metrics`."""

    def __init__(self, model: nn.Module) -> None:
        self._experts = [module for module in find_expert_modules(model).values() if not takes_all_tokens(module)]
        self._counts: dict[int, Tensor] = {}
        for layer, experts in enumerate(self._experts):
            experts.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)

    @classmethod
    def for_model(cls, model: nn.Module, *, compiled: bool) -> "ExpertLoad | None":
        """Return a hook, or None if the model has no experts or is `compiled` (module hooks would break the graph)."""
        return cls(model) if find_expert_modules(model) and not compiled else None

    def _count(self, layer: int, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Recomputed layers are counted twice, which does not change the fractions.
        if not (experts.training and torch.is_grad_enabled()):
            return
        index = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][1]
        visits = self._counts.get(layer)
        if visits is None:
            count = get_expert_shape(experts, DOWN)[0]
            visits = self._counts[layer] = torch.zeros(count, dtype=torch.long, device=index.device)
        flat = index.reshape(-1).long()
        visits.scatter_add_(0, flat, torch.ones_like(flat))

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        return self.compute_metrics() if step.is_logged else {}

    def compute_metrics(self) -> dict[str, float]:
        """Return the token fractions of the most and least loaded expert, and the routing entropy.

        All values are averaged over the layers; an entropy of 1 means uniform routing. Resets the counts. This is a
        collective call: one all-reduce sums the counts of all ranks.
        """
        if not self._counts:
            return {}
        visits = [self._counts[layer] for layer in sorted(self._counts)]
        summed = sum_over_ranks(torch.cat(visits)).split([len(counts) for counts in visits])
        fractions = [counts.double() / counts.sum().clamp(min=1) for counts in summed]
        entropies = [torch.special.entr(fraction).sum() / math.log(max(len(fraction), 2)) for fraction in fractions]
        table = torch.stack([torch.stack([s.max(), s.min(), e]) for s, e in zip(fractions, entropies, strict=True)])
        busiest, idlest, entropy = table.mean(0).tolist()
        for counts in visits:
            counts.zero_()
        return {"experts/busiest_share": busiest, "experts/idlest_share": idlest, "experts/entropy": entropy}
