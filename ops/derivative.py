"""Define operators, and the autograd formula shared by the LoRA operators for all storage formats.

NAME_forward takes `x`, `biases`, `downs`, `ups`, `seed` and the frozen weights, and returns the outputs and h.
NAME_backward takes the same arguments except `biases`, plus `grads`, `h`, `need_x`, `need_down`, `need_up`.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FROZEN = "weight.requires_grad=True: the fused operator does not compute its gradient; freeze it"


REFERENCE: dict[str, Callable[..., Any]] = {}
"""Plain-torch implementations of the operators that have kernels, for CPUs and for GPUs without the kernels."""


def define(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    devices: str | tuple[str, ...] = "cpu",
) -> Any:
    """Define and return zerolora::NAME from the schema `NAME(...) -> ...` and a plain-torch `function`.

    `fake` returns empty tensors of the right shapes, for tracing. The function is also added to REFERENCE if it
    is registered only for the CPU.
    """
    name, _, signature = schema.partition("(")
    tags = (torch.Tag.pt2_compliant_tag,) if fake is not None else ()
    torch.library.define(f"zerolora::{name}", f"({signature}", tags=tags)
    torch.library.impl(f"zerolora::{name}", devices)(function)
    if fake is not None:
        torch.library.register_fake(f"zerolora::{name}")(fake)
    if devices == "cpu":
        REFERENCE[name] = function
    return getattr(torch.ops.zerolora, name).default


def register_backward(name: str) -> tuple[Any, Any]:
    """Register zerolora::NAME_backward as the gradient of NAME_forward; return a namedtuple class for each.

    Tensors are saved exactly as they were passed, so that ZeRO-3 can free a Parameter between the passes.
    """
    operator = getattr(torch.ops.zerolora, f"{name}_backward")
    schemas = [getattr(torch.ops.zerolora, f"{name}_{which}").default._schema for which in ("forward", "backward")]
    types: list[Any] = [namedtuple("Arguments", [argument.name for argument in schema.arguments]) for schema in schemas]
    forward, backward = types

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
        arguments = forward(*inputs)._asdict()
        if arguments.get("h") is not None:
            raise ValueError("h: a forward pass with a given h is not differentiable; omit h")
        saved_fields = {
            field: value for field, value in (arguments | {"h": output[1]}).items() if field in backward._fields
        }
        lists = {field: value for field, value in saved_fields.items() if isinstance(value, Sequence)}
        ctx.lists = {field: len(value) for field, value in lists.items() if all(isinstance(x, Tensor) for x in value)}
        ctx.single = [field for field, value in saved_fields.items() if value is None or isinstance(value, Tensor)]
        ctx.plain = {
            field: saved_fields[field] for field in saved_fields if field not in ctx.lists and field not in ctx.single
        }
        in_lists = [tensor for field in ctx.lists for tensor in saved_fields[field]]
        ctx.save_for_backward(*(saved_fields[field] for field in ctx.single), *in_lists)

    def derivative(ctx: Any, grads: list[Tensor], _: Tensor | None) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        saved_fields = ctx.plain | {field: next(saved) for field in ctx.single}
        saved_fields |= {field: [next(saved) for _ in range(length)] for field, length in ctx.lists.items()}
        need: Any = forward(*ctx.needs_input_grad)
        if any(any(getattr(need, field)) for field in ctx.lists if field not in ("downs", "ups")):
            raise ValueError(FROZEN)
        needs = {"need_x": need.x, "need_down": any(need.downs), "need_up": any(need.ups)}
        grad_x, grad_downs, grad_ups = operator(*backward(**saved_fields, **needs, grads=grads))
        none = dict.fromkeys(forward._fields)
        results = none | {field: [None] * length for field, length in ctx.lists.items()}
        # None where autograd needs no gradient; lists keep the structure of the inputs.
        results |= {"x": grad_x if need.x else None, "biases": []}
        results |= {"downs": grad_downs or results["downs"], "ups": grad_ups or results["ups"]}
        if need.biases:
            pairs = zip(grads, need.biases, strict=True)
            results["biases"] = [g.reshape(-1, g.shape[-1]).sum(0) if needed else None for g, needed in pairs]
        return tuple(results.values())

    torch.library.register_autograd(f"zerolora::{name}_forward", derivative, setup_context=setup_context)
    torch.library.register_autograd(f"zerolora::{name}_backward", reject_second_derivative)
    return forward, backward


def reject_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("the fused backward has no derivative; set ops.backend: peft for second derivatives")
