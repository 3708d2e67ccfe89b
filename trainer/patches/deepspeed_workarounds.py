"""Workarounds for bugs in DeepSpeed 0.19.8's engine that would change training results.

When DeepSpeed fixes a bug, a test in tests/unit/test_workarounds.py fails; then remove the workaround.
"""

from collections.abc import Sequence
from math import isclose
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.known_versions import build_api_error, replaces, require
from trainer.parallel.engine.optimizer import AVERAGING_STATE_KEYS
from trainer.parallel.engine.protocol import Engine
from trainer.patches.replace import replace

NORM_METHOD = "get_grad_norm_direct"


def install_workarounds(engine: Engine) -> None:
    is_stage_0 = engine.zero_optimization_stage() == 0
    if is_stage_0 and engine.optimizer is not engine.basic_optimizer:  # DeepSpeed wraps it only for 16-bit types
        undo_zero_gradient_step(engine.optimizer)
    if engine.fp16_enabled():
        delay_loss_scale(engine.optimizer, scaled_norm=is_stage_0)
        if is_stage_0:
            scale_loss(engine)


@replaces("state and master weights of the 16-bit optimizer of stage 0 after its start")
def undo_zero_gradient_step(optimizer: Any) -> None:
    """Clear the state of a 16-bit optimizer at stage 0, and reset its master weights to the model's weights.

    DeepSpeed creates the state with a step on zero gradients. That step decays the weights and is counted, so the first
    real update would be 0.74 times its proper size (Adam's bias correction for step 2).
    """
    optimizer.optimizer.state.clear()
    for group in optimizer.optimizer.param_groups:
        group.update({name: optimizer.optimizer.defaults[name] for name in AVERAGING_STATE_KEYS if name in group})
    model_groups, master_groups = (require(optimizer, name, "deepspeed") for name in ("fp16_groups", "fp32_groups"))
    for weights, masters in zip(model_groups, master_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            master.data.copy_(weight.data)


@replaces("`optimizer.step` and `_update_scale`")
def delay_loss_scale(optimizer: Any, *, scaled_norm: bool) -> None:
    """Raise the fp16 loss scale after the step instead of within it; if `scaled_norm`, unscale the reported norm.

    DeepSpeed doubles the scale before it divides the gradients by it, which would halve the gradients of that step. At
    stage 0, it reports the gradient norm multiplied by the scale.
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
def scale_loss(engine: Engine) -> None:
    """Multiply the loss at stage 0 by the fp16 loss scale if DeepSpeed does not.

    DeepSpeed divides the gradients by the scale without multiplying the loss by it. Gradients would be 65,536
    times too small, and Adam's epsilon would dominate. The gradient of the first scaled loss shows whether
    DeepSpeed multiplies the loss; UserError is raised if it uses another factor.
    """
    backward = engine.backward
    engine_scales: bool | None = None

    def scale_gradient(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal engine_scales
        scale = float(engine.optimizer.loss_scale)
        if engine_scales is None and scale != 1.0:
            factor = float(gradient) * engine.gradient_accumulation_steps()
            if not any(isclose(factor, expected, rel_tol=1e-3) for expected in (1.0, scale)):
                raise build_api_error(
                    "deepspeed", f"engine.backward multiplies the loss by {factor:g}, not by 1 or {scale:g}"
                )
            engine_scales = isclose(factor, scale, rel_tol=1e-3)
        return gradient if engine_scales else gradient * scale

    def run_scaled_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A new tensor, because the caller may differentiate `loss` again, without the hook.
        copy = loss.float() * 1.0
        copy.register_hook(scale_gradient)
        return backward(copy, *args, **kwargs)

    replace(engine, "backward", run_scaled_backward)


def get_loss_scaler(optimizer: Any) -> Any:
    if hasattr(optimizer, "loss_scale_config"):
        return optimizer.loss_scale_config  # stage 0
    return require(optimizer, "loss_scaler", "deepspeed")


def list_loss_scale_attributes(scaler: Any) -> tuple[str, ...]:
    kind = "dynamic_loss_scale" if hasattr(scaler, "dynamic_loss_scale") else "dynamic"
    names = ("cur_scale", "cur_iter", "last_overflow_iter") if require(scaler, kind, "deepspeed") else ("cur_scale",)
    for name in names:
        require(scaler, name, "deepspeed")
    return names


@replaces("`get_grad_norm_direct`")
@replaces("`grad_scale` and `found_inf` of torch's fused AdamW")
class UpdateGuard:
    """Clips gradients and skips non-finite steps on the device, at stages 1 and 2."""

    def __init__(self, engine: Engine, max_grad_norm: float) -> None:
        """Install the guard. Raises UserError if torch or DeepSpeed lacks a required feature."""
        self._zero, self._max_grad_norm = engine.optimizer, max_grad_norm
        check_amp_scaling_support(engine.basic_optimizer)
        for name in (NORM_METHOD, "_global_grad_norm"):
            require(self._zero, name, "deepspeed")
        self._groups = len(engine.basic_optimizer.param_groups)
        self._measured: list[Tensor] = []
        self._norm: Tensor | None = None
        self._updated = 0
        replace(self._zero, NORM_METHOD, self._measure)
        engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def _measure(self, gradients: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        """Return a group's gradient norm without synchronizing. DeepSpeed synchronizes twice and returns -1 for NaN."""
        if len(self._measured) == self._groups:
            raise build_api_error("deepspeed", "the optimizer did not update all groups in the last step")
        norm = compute_gradient_norm(self._zero, gradients)
        self._measured.append(norm)
        return norm

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        # DeepSpeed measures all groups, then updates them one by one.
        if self._updated == 0:
            if len(self._measured) != self._groups:
                raise build_api_error(
                    "deepspeed", f"`{NORM_METHOD}` ran for {len(self._measured)} of {self._groups} groups"
                )
            self._norm = torch.stack(self._measured).square().sum().sqrt()
            self._zero._global_grad_norm = self._norm  # the engine reports this
            _set_clipping(optimizer, self._norm, self._max_grad_norm)
        self._updated += 1
        if self._updated == self._groups:
            self._measured, self._updated = [], 0


@replaces("`get_grad_norm_direct`, with several adapters")
class AdapterGuard:
    """Clips each adapter's gradient by its own norm, and skips the update of adapters with a non-finite norm."""

    def __init__(self, engine: Engine, max_grad_norms: Sequence[float]) -> None:
        """Install the guard on a stage 1 or 2 engine with a group per adapter; a limit of 0 disables clipping."""
        self._zero, self._limits = engine.optimizer, max_grad_norms
        self._updated = 0
        self.untrained: set[int] = set()
        """Indices of adapters that are currently not trained."""
        self.norms: list[Tensor] = []
        """Gradient norm of each adapter in the last step, before clipping."""
        require(self._zero, NORM_METHOD, "deepspeed")
        self._on_device = engine.device.type == "cuda" and bool(engine.basic_optimizer.defaults.get("fused"))
        if self._on_device:
            check_amp_scaling_support(engine.basic_optimizer)
        # DeepSpeed would skip all adapters if one had a non-finite gradient. Its own clipping is off (limit 0).
        replace(self._zero, NORM_METHOD, lambda *_, **__: torch.zeros((), device=engine.device))
        engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def check(self) -> None:
        """Raise UserError if DeepSpeed did not update every adapter once through this guard in the last step."""
        if self._updated != len(self._limits):
            raise build_api_error("deepspeed", f"{self._updated} of {len(self._limits)} groups were updated separately")
        self._updated = 0

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        # DeepSpeed passes one group at a time to the optimizer.
        if self._updated == 0:
            self.norms = []
        [group], index = optimizer.param_groups, self._updated
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        norm = compute_gradient_norm(self._zero, [parameter.grad for parameter in parameters])
        self.norms.append(norm)
        self._updated += 1
        limit = self._limits[index]
        if index in self.untrained or not (self._on_device or torch.isfinite(norm)):
            for parameter in parameters:
                parameter.grad = None
        elif self._on_device:
            _set_clipping(optimizer, norm, limit)
        elif limit:
            for parameter in parameters:
                parameter.grad.div_(((norm + 1e-6) / limit).clamp(min=1.0))


def _set_clipping(optimizer: Any, norm: Tensor, max_grad_norm: float) -> None:
    """Make torch's fused optimizer divide gradients by `grad_scale`, and skip the update if `found_inf` is 1."""
    optimizer.grad_scale = (norm / max_grad_norm).clamp(min=1.0).float() if max_grad_norm else None
    optimizer.found_inf = (~torch.isfinite(norm)).float()


def compute_gradient_norm(optimizer: Any, gradients: Sequence[Tensor]) -> Tensor:
    """Compute the 2-norm of a group's gradients over all ranks; the norm is non-finite if any gradient is.

    `optimizer` is DeepSpeed's stage 1 or 2 optimizer. Padding in a rank's shard is zero.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    squared = torch.stack(norms).square().sum() if norms else torch.zeros((), device=optimizer.device)
    dist.all_reduce(squared, group=require(optimizer, "dp_process_group", "deepspeed"))
    return squared.sqrt()


def check_amp_scaling_support(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the optimizer does not read the `grad_scale` and `found_inf` of torch's GradScaler."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise build_api_error(
            "torch", f"{type(optimizer).__name__}(fused=True) does not read `grad_scale` and `found_inf`"
        )
