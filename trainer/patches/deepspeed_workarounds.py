"""Workarounds for faults of DeepSpeed 0.19.8's engine that would change training results.

For each, a test in tests/unit/test_workarounds.py fails once DeepSpeed has fixed the fault: then remove the workaround.
"""

from math import isclose
from typing import Any

import torch

from trainer.contract.known_versions import changed, replaces, require
from trainer.parallel.engine.averaged_weights import COUNTED
from trainer.parallel.engine.protocol import Engine
from trainer.patches.replace import replace


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
