"""Workarounds for faults of DeepSpeed 0.19.8's engine that would change training results.

For each, a test in tests/unit/test_workarounds.py fails once DeepSpeed has fixed the fault: then remove the workaround.
"""

from collections.abc import Sequence
from math import isclose
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.known_versions import changed, replaces, require
from trainer.parallel.engine.optimizer import COUNTED
from trainer.parallel.engine.protocol import Engine
from trainer.patches.replace import replace

NORM_METHOD = "get_grad_norm_direct"


def install_workarounds(engine: Engine) -> None:
    """Install the workarounds that a new engine needs at its stage and precision."""
    at_stage_0 = engine.zero_optimization_stage() == 0
    if at_stage_0 and engine.optimizer is not engine.basic_optimizer:  # wrapped in 16 bits
        undo_zero_step(engine.optimizer)
    if engine.fp16_enabled():
        delay_loss_scale(engine.optimizer, scaled_norm=at_stage_0)
        if at_stage_0:
            scale_the_loss(engine)


@replaces("state and master weights of the 16-bit optimizer of stage 0 after its start")
def undo_zero_step(optimizer: Any) -> None:
    """Clear the state of a 16-bit optimizer of stage 0, and reset its master weights to those of the model.

    DeepSpeed creates the state by an update with zero gradients. This decays the weights and counts as a step, so the
    first update would have Adam's bias correction of the second (0.74 of the correct update).
    """
    optimizer.optimizer.state.clear()
    for group in optimizer.optimizer.param_groups:
        group.update({name: optimizer.optimizer.defaults[name] for name in COUNTED if name in group})
    working, masters = (require(optimizer, name, "deepspeed") for name in ("fp16_groups", "fp32_groups"))
    for weights, copies in zip(working, masters, strict=True):
        for weight, master in zip(weights, copies, strict=True):
            master.data.copy_(weight.data)


@replaces("`optimizer.step` and `_update_scale`")
def delay_loss_scale(optimizer: Any, *, scaled_norm: bool) -> None:
    """Raise fp16's loss scale after the step instead of within it; report the norm of stage 0 without the scale.

    DeepSpeed doubles the scale before it divides the gradients by it, which would halve the gradients of that step. Its
    optimizer of stage 0 reports the norm times the scale (`scaled_norm`).
    """
    step, update = optimizer.step, require(optimizer, "_update_scale", "deepspeed")

    def update_after_overflow(overflow: bool) -> None:
        if overflow:
            update(True)

    def step_and_update(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if not optimizer.overflow:
            if scaled_norm:
                optimizer._global_grad_norm /= optimizer.loss_scale
            update(False)
        return result

    replace(optimizer, "step", step_and_update)
    replace(optimizer, "_update_scale", update_after_overflow)


@replaces("`engine.backward`")
def scale_the_loss(engine: Engine) -> None:
    """Multiply the loss of stage 0 by fp16's loss scale if DeepSpeed does not.

    DeepSpeed divides the gradients by the scale without multiplying first: next to gradients 65,536 times too small
    Adam's epsilon would dominate. The first gradient of the loss shows whether DeepSpeed multiplies.
    """
    backward = engine.backward
    engine_scales: bool | None = None

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal engine_scales
        scale = float(engine.optimizer.loss_scale)
        if engine_scales is None and scale != 1.0:
            factor = float(gradient) * engine.gradient_accumulation_steps()
            if not any(isclose(factor, one, rel_tol=1e-3) for one in (1.0, scale)):
                raise changed("deepspeed", f"engine.backward multiplies the loss by {factor:g}, not by 1 or {scale:g}")
            engine_scales = isclose(factor, scale, rel_tol=1e-3)
        return gradient if engine_scales else gradient * scale

    def run_scaled_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A new tensor: the hook must not stay on one that the caller may differentiate again.
        own = loss.float() * 1.0
        own.register_hook(scaled)
        return backward(own, *args, **kwargs)

    replace(engine, "backward", run_scaled_backward)


def loss_scaler(optimizer: Any) -> Any:
    """Return the object with the loss scale of a 16-bit optimizer of DeepSpeed."""
    # Stage 0 and the other stages have different optimizers with different scalers.
    if hasattr(optimizer, "loss_scale_config"):
        return optimizer.loss_scale_config
    return require(optimizer, "loss_scaler", "deepspeed")


def loss_scale_state(scaler: Any) -> tuple[str, ...]:
    """Return the names of the attributes that make up the state of a loss scale: one if the scale is fixed."""
    kind = "dynamic_loss_scale" if hasattr(scaler, "dynamic_loss_scale") else "dynamic"
    names = ("cur_scale", "cur_iter", "last_overflow_iter") if require(scaler, kind, "deepspeed") else ("cur_scale",)
    for name in names:
        require(scaler, name, "deepspeed")
    return names


@replaces("`get_grad_norm_direct`")
@replaces("`grad_scale` and `found_inf` of torch's fused AdamW")
class UpdateGuard:
    """Gives the optimizer of an engine of stage 1 or 2 the gradient norm before every update of a group."""

    def __init__(self, engine: Engine, max_grad_norm: float) -> None:
        """Install the guard. Raises UserError if torch or DeepSpeed no longer works as expected."""
        self._zero, self._max_grad_norm = engine.optimizer, max_grad_norm
        require_fused_update(engine.basic_optimizer)
        for name in (NORM_METHOD, "_global_grad_norm"):
            require(self._zero, name, "deepspeed")
        self._groups = len(engine.basic_optimizer.param_groups)
        self._measured: list[Tensor] = []
        self._norm: Tensor | None = None
        self._updated = 0
        replace(self._zero, NORM_METHOD, self._measure)
        engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def _measure(self, gradients: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        """Replace DeepSpeed's norm (0.19.8), which turns non-finite values into -1 and waits for the device twice."""
        if len(self._measured) == self._groups:
            raise changed("deepspeed", "the optimizer did not update the groups that were measured for the last step")
        norm = gradient_norm(self._zero, gradients)
        self._measured.append(norm)
        return norm

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        # DeepSpeed measures all groups, then updates them one by one.
        if self._updated == 0:
            if len(self._measured) != self._groups:
                raise changed("deepspeed", f"{len(self._measured)} of {self._groups} norms came from `{NORM_METHOD}`")
            self._norm = torch.stack(self._measured).square().sum().sqrt()
            self._zero._global_grad_norm = self._norm  # the engine reports this
            _give(optimizer, self._norm, self._max_grad_norm)
        self._updated += 1
        if self._updated == self._groups:
            self._measured, self._updated = [], 0


@replaces("`get_grad_norm_direct`, with several adapters")
class AdapterGuard:
    """Clips each adapter's gradient by its own norm, and updates only the adapters with a finite one."""

    def __init__(self, engine: Engine, limits: Sequence[float]) -> None:
        """Install the guard on an engine of stage 1 or 2 with a group for each adapter; a limit of 0 does not clip."""
        self._zero, self._limits = engine.optimizer, limits
        self._updated = 0
        self.waiting: set[int] = set()
        """Adapters that are not trained at present."""
        self.norms: list[Tensor] = []
        """Norm of each adapter's gradient in the last step, before clipping."""
        require(self._zero, NORM_METHOD, "deepspeed")
        self._on_device = engine.device.type == "cuda" and bool(engine.basic_optimizer.defaults.get("fused"))
        if self._on_device:
            require_fused_update(engine.basic_optimizer)
        # DeepSpeed would skip all adapters for the gradient of one; it clips nothing, as its limit is 0.
        replace(self._zero, NORM_METHOD, lambda *_, **__: torch.zeros((), device=engine.device))
        engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def check(self) -> None:
        """Raise UserError unless DeepSpeed has just updated every adapter once, through this guard."""
        if self._updated != len(self._limits):
            raise changed("deepspeed", f"{self._updated} of {len(self._limits)} groups were updated one by one")
        self._updated = 0

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        # DeepSpeed gives the optimizer one group at a time.
        if self._updated == 0:
            self.norms = []
        [group], own = optimizer.param_groups, self._updated
        parameters = [each for each in group["params"] if each.grad is not None]
        norm = gradient_norm(self._zero, [each.grad for each in parameters])
        self.norms.append(norm)
        self._updated += 1
        limit = self._limits[own]
        if own in self.waiting:
            for parameter in parameters:
                parameter.grad = None
        elif self._on_device:
            _give(optimizer, norm, limit)
        elif not torch.isfinite(norm):
            for parameter in parameters:
                parameter.grad = None
        elif limit:
            for parameter in parameters:
                parameter.grad.div_(((norm + 1e-6) / limit).clamp(min=1.0))


def _give(optimizer: Any, norm: Tensor, max_grad_norm: float) -> None:
    """Set the attributes of torch's fused optimizers: gradients are divided by `grad_scale`, `found_inf` skips."""
    optimizer.grad_scale = (norm / max_grad_norm).clamp(min=1.0).float() if max_grad_norm else None
    optimizer.found_inf = (~torch.isfinite(norm)).float()


def gradient_norm(optimizer: Any, gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all ranks of a group's gradients, non-finite if one of them is.

    `optimizer` is DeepSpeed's of stage 1 or 2. A rank's shard of a group may contain padding, which is zeros.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    squared = torch.stack(norms).square().sum() if norms else torch.zeros((), device=optimizer.device)
    dist.all_reduce(squared, group=require(optimizer, "dp_process_group", "deepspeed"))
    return squared.sqrt()


def require_fused_update(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError unless the optimizer reads `grad_scale` and `found_inf`, as torch's gradient scaler asks."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise changed("torch", f"{type(optimizer).__name__}(fused=True) does not read `grad_scale` and `found_inf`")
