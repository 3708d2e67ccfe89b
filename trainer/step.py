"""An optimizer step: the token-weighted global loss, its gradient, and the update.

The loss of a step is the weighted sum of the token losses over all ranks and micro-steps, divided by N, the sum of
these weights (the number of target tokens if all weights are 1), so that neither padding nor the split into
micro-batches changes the gradient. DeepSpeed divides by the accumulation steps and averages over ranks; each micro-step
therefore passes sum_local * world * accumulation / N to it.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from trainer.contract.known_versions import build_api_error
from trainer.memory.oom_recovery import Recovery
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, sum_over_ranks
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.stragglers import StragglerWatch
from trainer.patches.loss_head import to_device
from trainer.scu.controller import ScuController
from trainer.tasks.task import Batch, BatchSource, StepLoss

RANK_ENCODING_BASE = 2**20
"""Exceeds any number of ranks, so that one sum encodes the number of ranks and, if it is 1, the rank."""


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step: sums over all ranks and micro-steps."""

    loss_sum: float
    """Weighted sum of token losses in nats."""
    target_weight: float
    """Sum of the loss weights of all target tokens."""
    target_tokens: int
    """Number of tokens that contribute to the loss."""
    tokens: int
    """Number of all tokens, including prompts."""
    grad_norm: float
    """Global gradient norm before clipping."""
    applied: bool
    """False if the step was skipped because a gradient was not finite."""
    stop: bool
    """Whether any rank requested a stop."""
    save: bool = False
    """Whether any rank requested a checkpoint."""
    nonfinite_ranks: int = 0
    """Number of ranks with a non-finite local loss."""
    nonfinite_rank: int | None = None
    """The rank with a non-finite local loss; None unless there is exactly one."""
    is_local_nonfinite: bool = False
    """Whether this rank's local loss was non-finite."""

    @property
    def loss(self) -> float:
        """The weighted mean of the token losses, in nats."""
        return self.loss_sum / (self.target_weight or 1.0)


@dataclass(frozen=True)
class StepContext:
    engine: Engine
    loss: StepLoss
    batches: BatchSource
    ranks: Ranks
    schedule: Any
    recovery: Recovery
    scu_controller: ScuController | None = None
    """Adds its penalty, in nats per token, once per step."""
    stragglers: StragglerWatch | None = None
    """Measures this rank's own time; None with a single rank."""

    def time_local_work(self, *, on_device: bool = True) -> AbstractContextManager[None]:
        return nullcontext() if self.stragglers is None else self.stragglers.time_own_work(on_device=on_device)


class StepInFlight:
    """A launched step. Its results are copied from the device while the host launches the next step."""

    def __init__(self, numbers: torch.Tensor) -> None:
        """Start copying `numbers`, an fp64 vector on the device, to the host.

        It contains: target weight, target tokens, tokens, stop and save requests, loss sum, gradient norm, applied, the
        sum of `RANK_ENCODING_BASE` + rank over all ranks with a non-finite loss, and the same sum for this rank only.
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
        """Whether `result` synchronizes with a GPU."""
        return self._ended is not None

    def result(self) -> StepResult:
        if self._ended is not None:
            self._ended.synchronize()
        weight, targets, tokens, stops, saves, loss_sum, grad_norm, applied, nonfinite, own = self._host.tolist()
        count, number = divmod(int(nonfinite), RANK_ENCODING_BASE)
        return StepResult(
            loss_sum, weight, int(targets), int(tokens), grad_norm, applied > 0, stops > 0, saves > 0,
            nonfinite_ranks=count, nonfinite_rank=number if count == 1 else None, is_local_nonfinite=own > 0,
        )  # fmt: skip

    def seconds_since(self, earlier: "StepInFlight") -> float:
        """Return the seconds from the end of an earlier step to the end of this one. Both must be finished."""
        if self._ended is None or earlier._ended is None:
            return self.launched_at - earlier.launched_at
        return float(earlier._ended.elapsed_time(self._ended)) / 1e3


def train_step(
    context: StepContext,
    batches: Sequence[Batch],
    *,
    step: int,
    max_grad_norm: float,
    stop: bool,
    save: bool,
    before_update: Callable[[], None],
) -> StepInFlight:
    """Run forward, backward and optimizer over all micro-batches of step `step` (from 1); a collective call.

    `stop` and `save` request a stop or checkpoint after the step; the result shows whether any rank requested one.
    `before_update` runs between the last backward pass and the optimizer, and can prevent the update by raising.
    """
    engine, ranks, scu_controller, device = context.engine, context.ranks, context.scu_controller, context.engine.device
    counts = sum_counts([batches], [(stop, save)], ranks, device)[0]
    # Undoes the engine's division by accumulation steps and ranks; a device tensor if there are several ranks.
    scale = (ranks.world_size * len(batches) / (counts[0] + (counts[0] == 0))).float()
    sums = torch.zeros(3, device=device, dtype=torch.float64)
    plain_norm = None
    skipped_before = engine.skipped_steps
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        _run_micro_step(context, batch, sums, scale, penalty_step=step if is_last else None, accumulation=len(batches))
        if is_last:
            own_nonfinite = torch.where(torch.isfinite(sums[0]), 0.0, float(RANK_ENCODING_BASE + ranks.rank))
            sums[2] = own_nonfinite
            sum_over_ranks(sums)
            before_update()
            plain_norm = _guard_plain_optimizer(engine, max_grad_norm)
        with phase("optimizer step"):
            engine.step()
    norm = engine.get_global_grad_norm() if plain_norm is None else plain_norm
    if norm is None:
        raise build_api_error("deepspeed", "engine.get_global_grad_norm() returns no norm after a step")
    grad_norm = torch.as_tensor(norm).double()
    if grad_norm.device != device:
        grad_norm = sums.new_zeros(()).fill_(float(grad_norm))
    # DeepSpeed counts the steps that it skips; if the optimizer skips a step, the norm is not finite.
    applied = torch.isfinite(grad_norm) & (engine.skipped_steps == skipped_before)
    if scu_controller is not None:
        scu_controller.observe(step, sums[0], counts[0], sums[1], applied)
    numbers = [sums[0], grad_norm, applied.double(), sums[2], own_nonfinite.double()]
    return StepInFlight(torch.cat([counts, torch.stack(numbers)]))


def _run_micro_step(
    context: StepContext,
    batch: Batch,
    sums: torch.Tensor,
    scale: torch.Tensor,
    *,
    penalty_step: int | None,
    accumulation: int,
) -> None:
    """Run the forward and backward pass of a micro-batch, and add its loss to `sums`.

    `penalty_step` is the step number for the step's last micro-batch, which adds the penalty, and None for earlier
    ones.
    """
    with context.time_local_work():
        loss_local = context.loss(context.engine, batch, context.engine.device)
    sums[0] += loss_local.detach()
    total = (loss_local + context.loss.load_balancing_loss) * scale
    if penalty_step is not None and context.scu_controller is not None:
        # Every rank adds the whole penalty and the engine averages over ranks: undo only the division by micro-steps.
        total = total + context.scu_controller.compute_penalty(penalty_step) * accumulation
        sums[1] = context.scu_controller.get_local_contribution()
    with phase("backward"):
        context.engine.backward(total)


def sum_counts(
    batches: Sequence[Sequence[Batch]], requests: Sequence[Sequence[bool]], ranks: Ranks, device: torch.device
) -> torch.Tensor:
    """Return sums over ranks, fp64 [N, 5], by adapter: target weight, targets, tokens, stop and save requests."""
    rows = []
    for micro_batches, requested in zip(batches, requests, strict=True):
        sizes = [(batch.target_weight, batch.target_count, batch.tokens) for batch in micro_batches]
        rows.append([*map(sum, zip(*sizes, strict=True)), *requested])
    counts: torch.Tensor = to_device(torch.tensor(rows, dtype=torch.float64), device)
    return sum_over_ranks(counts) if ranks.world_size > 1 else counts


def _guard_plain_optimizer(engine: Engine, max_grad_norm: float) -> torch.Tensor | None:
    """Clip gradients, or drop them if non-finite, at stage 0 in fp32, where DeepSpeed does not wrap the optimizer.

    Returns the gradient norm, or None if DeepSpeed wraps the optimizer. torch's AdamW ignores parameters without
    gradients, so dropping the gradients skips the step.
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
def evaluate_loss(engine: Engine, loss: StepLoss, batches: Iterable[Batch]) -> float:
    """Return the held-out loss in nats per target token; a collective call."""
    sums = torch.zeros(2, device=engine.device, dtype=torch.float64)
    engine.eval()
    for batch in batches:
        sums[0] += loss(engine, batch, engine.device)
        sums[1] += batch.target_count
    engine.train()
    loss_sum, target_tokens = sum_over_ranks(sums).tolist()
    return loss_sum / max(target_tokens, 1.0)
