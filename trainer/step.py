"""One optimizer step: micro-batches in, the globally token-weighted loss and its gradient out.

The loss of a step is the sum of the token losses over all ranks and micro-steps divided by the number of target tokens
over all ranks and micro-steps, so that neither padding nor the way a batch is cut changes the gradient. DeepSpeed
divides by the accumulation steps and averages over ranks; each micro-step therefore hands it
sum_local * world * accumulation / N.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from trainer.contract.known_versions import changed
from trainer.memory.oom_recovery import Recovery
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, sum_over_ranks
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.stragglers import StragglerWatch
from trainer.patches.loss_head import to_device
from trainer.scu.controller import Steering
from trainer.tasks.task import Batch, StepLoss

_NONFINITE = 2**20  # more than there are ranks: how many they are and, of one, its number fit into one sum


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: sums over all ranks and micro-steps."""

    loss_sum: float
    """Sum of token losses, nats."""
    target_tokens: int
    """Tokens with loss."""
    tokens: int
    """All tokens, prompts included."""
    grad_norm: float
    """Global gradient norm before clipping."""
    applied: bool
    """False if the step was skipped because a gradient was not finite."""
    stop: bool
    """True on every rank if any rank asked to stop."""
    save: bool = False
    """True on every rank if any rank asked for a checkpoint."""
    nonfinite_ranks: int = 0
    """Ranks whose own loss was not finite, which is what makes a sum over all of them so."""
    nonfinite_rank: int | None = None
    """Which it was, if it was one."""
    own_is_nonfinite: bool = False
    """Whether this rank's own was."""


class StepInFlight:
    """A step whose numbers are on their way from the device; the host goes on with the next one meanwhile."""

    def __init__(self, numbers: torch.Tensor) -> None:
        """`numbers`, fp64 on the device: target tokens, tokens, stops, saves, loss sum, gradient norm, applied, ranks
        whose loss is not finite (`_NONFINITE` each, and their numbers), the same of this rank alone.
        """
        self._ended: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._ended = torch.cuda.Event(enable_timing=True)
            self._ended.record()
        self.launched_at = time.perf_counter()

    @property
    def on_device(self) -> bool:
        """True if `result` may have to wait for a GPU."""
        return self._ended is not None

    def result(self) -> StepResult:
        """The numbers, waited for."""
        if self._ended is not None:
            self._ended.synchronize()
        targets, tokens, stops, saves, loss_sum, grad_norm, applied, nonfinite, own = self._host.tolist()
        count, number = divmod(int(nonfinite), _NONFINITE)
        return StepResult(
            loss_sum, int(targets), int(tokens), grad_norm, applied > 0, stops > 0, saves > 0,
            nonfinite_ranks=count, nonfinite_rank=number if count == 1 else None, own_is_nonfinite=own > 0,
        )  # fmt: skip

    def seconds_since(self, earlier: "StepInFlight") -> float:
        """Time from the end of an earlier step to the end of this one, both over."""
        if self._ended is None or earlier._ended is None:
            return self.launched_at - earlier.launched_at
        return float(earlier._ended.elapsed_time(self._ended)) / 1e3


def count_targets(batches: Sequence[Batch]) -> int:
    """Tokens with loss in this rank's micro-batches."""
    return sum(batch.target_count for batch in batches)


def count_tokens(batches: Sequence[Batch]) -> int:
    """Tokens that are not padding in this rank's micro-batches."""
    return sum(batch.tokens for batch in batches)


def train_step(
    engine: Engine,
    loss: StepLoss,
    batches: Sequence[Batch],
    ranks: Ranks,
    *,
    step: int,
    max_grad_norm: float,
    steering: Steering | None = None,
    stop: bool = False,
    save: bool = False,
    before_update: Callable[[], None] | None = None,
    recovery: Recovery | None = None,
    stragglers: StragglerWatch | None = None,
) -> StepInFlight:
    """Forward, backward and optimizer over all micro-batches of step `step` (from 1); every rank must call it.

    `steering` adds its term, nats per token, once per step. `stop` says that this rank wants to end after the step,
    `save` that it wants a checkpoint; the result says whether any rank does. `before_update` runs between the last
    backward and the optimizer: what it learns of the step before can still keep this one from changing a weight.
    `recovery` has the ranks agree, before gradients are reduced, that none ran out of memory; `stragglers` learns how
    long this rank's forward passes take.
    """
    device = engine.device
    counts = _global_counts(batches, stop, save, ranks, device)
    # What undoes the engine's division by accumulation steps and ranks; on the device where the ranks are several.
    to_engine = (ranks.world_size * len(batches) / counts[0].clamp(min=1)).float()
    sums = torch.zeros(3, device=device, dtype=torch.float64)
    plain_norm = None
    skipped_before = engine.skipped_steps
    if recovery is not None:
        recovery.hold_reduction()
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with stragglers.own_time() if stragglers is not None else nullcontext():
            loss_local = steering.loss(step, batch) if is_last and steering is not None else None
            if loss_local is None:
                loss_local = loss(engine, batch, device)
        sums[0] += loss_local.detach()
        total = (loss_local + loss.balancing) * to_engine
        if is_last and steering is not None:
            # Every rank adds the whole term and the engine averages over ranks: only the accumulation is undone.
            total = total + steering.penalty(step) * len(batches)
            sums[1] = steering.measured_local()
        with phase("backward"):
            engine.backward(total)
        del total, loss_local  # they hold what was recorded, where it is to be let go of
        if is_last:
            if recovery is not None:
                recovery.agree_and_reduce()
            own_nonfinite = torch.where(torch.isfinite(sums[0]), 0.0, float(_NONFINITE + ranks.rank))
            sums[2] = own_nonfinite
            sum_over_ranks(sums)
            if before_update is not None:
                before_update()
            plain_norm = _guard_plain_optimizer(engine, max_grad_norm)
        with phase("optimizer step"):
            engine.step()
    norm = engine.get_global_grad_norm() if plain_norm is None else plain_norm
    if norm is None:
        raise changed("deepspeed", "engine.get_global_grad_norm() knows no norm after a step")
    grad_norm = torch.as_tensor(norm).double()
    if grad_norm.device != device:
        grad_norm = sums.new_zeros(()).fill_(float(grad_norm))
    # What DeepSpeed skips it counts; what the optimizer itself skips has a norm that is not finite.
    applied = torch.isfinite(grad_norm) & (engine.skipped_steps == skipped_before)
    if steering is not None:
        steering.observe(step, sums[0], counts[0], sums[1], applied)
    numbers = [sums[0], grad_norm, applied.double(), sums[2], own_nonfinite.double()]
    return StepInFlight(torch.cat([counts, torch.stack(numbers)]))


def _global_counts(
    batches: Sequence[Batch], stop: bool, save: bool, ranks: Ranks, device: torch.device
) -> torch.Tensor:
    """Target tokens, tokens, and ranks that want to stop, and to save, over all ranks; fp64 [4] on the device."""
    counts = torch.tensor([count_targets(batches), count_tokens(batches), stop, save], dtype=torch.float64)
    counts = to_device(counts, device)
    return sum_over_ranks(counts) if ranks.world_size > 1 else counts


def _guard_plain_optimizer(engine: Engine, max_grad_norm: float) -> torch.Tensor | None:
    """Stage 0 in 32 bits has no wrapper that measures, clips and skips: do it here; None for the other engines.

    torch's AdamW leaves parameters without a gradient alone, so dropping the gradients skips the step.
    """
    if engine.optimizer is not engine.basic_optimizer:
        return None
    parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if not math.isfinite(norm):
        engine.optimizer.zero_grad(set_to_none=True)
    elif max_grad_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return norm


@torch.no_grad()
def evaluate_loss(engine: Engine, loss: StepLoss, batches: Iterable[Batch]) -> tuple[float, int]:
    """Held-out loss, nats per target token over all ranks, and the number of target tokens; every rank must call it."""
    sums = torch.zeros(2, device=engine.device, dtype=torch.float64)
    engine.eval()
    for batch in batches:
        sums[0] += loss(engine, batch, engine.device)
        sums[1] += batch.target_count
    engine.train()
    loss_sum, target_tokens = sum_over_ranks(sums).tolist()
    return loss_sum / max(target_tokens, 1.0), int(target_tokens)
