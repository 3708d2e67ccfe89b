"""Faults of DeepSpeed 0.19.8's engine that would change what is trained, and what is done about each.

tests/unit/test_workarounds.py has a test for every one that fails when DeepSpeed has mended it: then it goes.
"""

from math import isclose
from typing import Any

import torch

from trainer.contract.known_versions import changed, require
from trainer.contract.replacements import replaces
from trainer.parallel.engine.protocol import Engine
from trainer.patches.replace import replace


def answer_faults(engine: Engine) -> None:
    """What is done about the faults that a new engine has at its stage, in its precision; `undo_on` is the opposite."""
    at_stage_0 = engine.zero_optimization_stage() == 0
    if at_stage_0 and engine.optimizer is not engine.basic_optimizer:  # in 16 bits it is wrapped
        undo_the_step_of_zeros(engine.optimizer)
    if engine.fp16_enabled():
        raise_the_loss_scale_last(engine.optimizer, scaled_norm=at_stage_0)
        if at_stage_0:
            scale_the_loss(engine)


@replaces(
    "state and master weights of the 16-bit optimizer of stage 0 after its start",
    library="deepspeed",
    read_in="0.19.8",
    why="the state is created by an update with zero gradients, which decays the weights and counts as a step: "
    "the first real update would be 0.74 of its size",
    active="zero.stage: 0 in bf16 or fp16",
    test="tests/unit/test_workarounds.py: test_stage_0_takes_a_step_of_zeros",
    upstream="https://github.com/deepspeedai/DeepSpeed/issues/5151 (the same in BF16_Optimizer)",
)
def undo_the_step_of_zeros(optimizer: Any) -> None:
    """Give a 16-bit optimizer of stage 0 an empty state and the weights of the model.

    DeepSpeed creates the state by an update with gradients of zero: it decays the weights, and it counts, so that
    Adam's correction of its first moments would be that of the second step (0.74 of the update that is due).
    """
    optimizer.optimizer.state.clear()
    working, masters = (require(optimizer, name, "deepspeed") for name in ("fp16_groups", "fp32_groups"))
    for weights, copies in zip(working, masters, strict=True):
        for weight, master in zip(weights, copies, strict=True):
            master.data.copy_(weight.data)


@replaces(
    "`optimizer.step` and `_update_scale`",
    library="deepspeed",
    read_in="0.19.8",
    why="the loss scale is doubled before gradients are divided by it, which halves that step; stage 0 reports "
    "the norm times the scale",
    active="fp16",
    test="tests/unit/test_workarounds.py: test_the_loss_scale_rises_before_gradients_are_divided_by_it, "
    "test_stage_0_reports_the_norm_times_the_loss_scale; tests/unit/test_loss_scale.py",
    upstream="https://github.com/deepspeedai/DeepSpeed/pull/8588",
)
def raise_the_loss_scale_last(optimizer: Any, *, scaled_norm: bool) -> None:
    """Let fp16's loss scale rise after the step and not within it; give the norm of stage 0 without the scale.

    DeepSpeed doubles the scale before it divides the gradients by it: the step in which it rises would be taken with
    half of them. Its optimizer of stage 0 reports the norm times the scale (`scaled_norm`).
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


@replaces(
    "`engine.backward`",
    library="deepspeed",
    read_in="0.19.8",
    why="stage 0 divides gradients by a loss scale without multiplying the loss by it",
    active="zero.stage: 0 in fp16, if the first gradient shows that DeepSpeed does not multiply",
    test="tests/unit/test_workarounds.py: test_stage_0_divides_by_a_loss_scale_that_it_never_applied",
    upstream="https://github.com/deepspeedai/DeepSpeed/pull/8393",
)
def scale_the_loss(engine: Engine) -> None:
    """Multiply the loss of stage 0 by fp16's loss scale, where DeepSpeed has not.

    It divides the gradients by the scale and never multiplied: of gradients 65,536 times too small Adam's epsilon would
    leave little. Whether it has is seen in the first gradient that comes back to the loss.
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

    def backward_of_scaled(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A tensor of its own: the hook must not stay on one that the caller differentiates again.
        own = loss.float() * 1.0
        own.register_hook(scaled)
        return backward(own, *args, **kwargs)

    replace(engine, "backward", backward_of_scaled)


def loss_scaler(optimizer: Any) -> Any:
    """What holds the loss scale of a 16-bit optimizer of DeepSpeed, and when it last fell."""
    # Stage 0 and the other stages have optimizers of their own, with scalers of their own.
    if hasattr(optimizer, "loss_scale_config"):
        return optimizer.loss_scale_config
    return require(optimizer, "loss_scaler", "deepspeed")


def loss_scale_state(scaler: Any) -> tuple[str, ...]:
    """The attributes that a loss scale consists of: one if it is fixed."""
    kind = "dynamic_loss_scale" if hasattr(scaler, "dynamic_loss_scale") else "dynamic"
    names = ("cur_scale", "cur_iter", "last_overflow_iter") if require(scaler, kind, "deepspeed") else ("cur_scale",)
    for name in names:
        require(scaler, name, "deepspeed")
    return names
