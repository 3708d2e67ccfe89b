"""Autograd formula shared by the LoRA operators, for every storage format of the frozen base.

NAME_forward takes `x`, `biases`, `downs`, `ups`, `seed` and what its base needs, and returns the outputs and h.
NAME_backward takes the same arguments without `biases`, and `grads`, `h`, `need_x`, `need_down`, `need_up`. The
arguments of both are NamedTuples in the order of the operator schemas.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def register(name: str, forward: Any, backward: Any) -> None:
    """Register zerolora::NAME_backward as the gradient of zerolora::NAME_forward, given the types of their arguments.

    Tensors are saved exactly as they were passed, so that ZeRO-3 may free a Parameter between the passes.
    """
    operator = getattr(torch.ops.zerolora, f"{name}_backward")

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
        of = forward(*inputs)._asdict()
        refuse_given_h(of.get("h"))
        kept = {field: value for field, value in (of | {"h": output[1]}).items() if field in backward._fields}
        ctx.lists = {field: len(value) for field, value in kept.items() if _is_list_of_tensors(value)}
        ctx.single = [field for field, value in kept.items() if value is None or isinstance(value, Tensor)]
        ctx.plain = {field: kept[field] for field in kept if field not in ctx.lists and field not in ctx.single}
        in_lists = [tensor for field in ctx.lists for tensor in kept[field]]
        ctx.save_for_backward(*(kept[field] for field in ctx.single), *in_lists)

    def derivative(ctx: Any, grads: list[Tensor], _: Tensor | None) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        kept = ctx.plain | {field: next(saved) for field in ctx.single}
        kept |= {field: [next(saved) for _ in range(length)] for field, length in ctx.lists.items()}
        need: Any = forward(*ctx.needs_input_grad)
        ctx.need_x = need.x
        needs = {"need_x": need.x, "need_down": any(need.downs), "need_up": any(need.ups)}
        result = operator(*backward(**kept, **needs, grads=grads))
        none = dict.fromkeys(forward._fields)
        found = none | {field: [None] * length for field, length in ctx.lists.items()}
        found["x"], found["downs"], found["ups"] = select_adapter_grads(ctx, result, len(kept["downs"]))
        found["biases"] = compute_bias_grads(grads, need.biases) if need.biases else []
        return tuple(found.values())

    torch.library.register_autograd(f"zerolora::{name}_forward", derivative, setup_context=keep)
    torch.library.register_autograd(f"zerolora::{name}_backward", refuse_second_derivative)


def select_adapter_grads(
    ctx: Any, result: tuple[Tensor, list[Tensor], list[Tensor]], downs: int
) -> tuple[Any, Any, Any]:
    """Return the three gradients with None where autograd needs none; lists keep the structure of the inputs."""
    grad_x, grad_downs, grad_ups = result
    return grad_x if ctx.need_x else None, grad_downs or [None] * downs, grad_ups or [None] * downs


def compute_bias_grads(grads: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    return [g.reshape(-1, g.shape[-1]).sum(0) if need else None for g, need in zip(grads, needed, strict=True)]


def refuse_given_h(h: Tensor | None) -> None:
    """Raise ValueError if a gradient is needed from a forward that was given h."""
    if h is not None:
        raise ValueError("h was given: only the whole forward, with h=None, has a derivative")


def refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("the fused backward has no derivative; set ops.backend: peft for second derivatives")


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(each, Tensor) for each in value)
