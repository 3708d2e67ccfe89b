"""Fused LoRA operators `zerolora::lora_forward` and `zerolora::lora_backward` for shared-input projections.

Legend: T tokens (leading dimensions flattened), I in, O out, R rank. Formulas: ops/reference.py. One linear layer
is a group of one. The operators are functional: they change no input, and no output shares memory with an input. If
`lora_forward` is passed the h of an earlier `lora_project`, it returns an empty h.

Saved for the backward: x, the parameters themselves and h[T, sum of R]. Not saved: tensors of size T x O, the mask
(regenerated from `seed`) and views of weights, because ZeRO-3 frees a weight after the forward and gathers it into the
same Parameter before the backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops import derivative, reference
from ops.seeds import draw_seed

MAX_RANK = 256
MAX_GROUP_SIZE = 16


def compute_h_width(rank: int) -> int:
    """Return the width of h for one projection: the rank rounded up to a multiple of 8 (kernels load 16 bytes)."""
    return (rank + 7) // 8 * 8


def check_downs(x: Tensor, downs: Sequence[Tensor], scales: Sequence[float], p: float) -> None:
    if not 1 <= len(downs) == len(scales) <= MAX_GROUP_SIZE:
        raise ValueError(
            f"group of {len(downs)} lora_down, {len(scales)} scales: need equal counts, 1 to {MAX_GROUP_SIZE}"
        )
    if x.dim() < 2:
        raise ValueError(f"x of shape {tuple(x.shape)}: expected at least [tokens, features]")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout={p}: must lie in [0, 1)")
    for down in downs:
        if down.dim() != 2 or down.shape[1] != x.shape[-1]:
            raise ValueError(
                f"x {tuple(x.shape)}, lora_down {tuple(down.shape)}: expected x [..., I], lora_down [R, I]"
            )
        if not 1 <= down.shape[0] <= MAX_RANK:
            raise ValueError(f"r={down.shape[0]}: must be 1 to {MAX_RANK}")
        if down.device != x.device:
            raise ValueError(f"x on {x.device}, lora_down on {down.device}: move them together")
        if down.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"x is {x.dtype}, lora_down {down.dtype}: adapters need the type of x or float32")


def check_adapters(
    x: Tensor, outs: Sequence[int], downs: Sequence[Tensor], ups: Sequence[Tensor], scales: Sequence[float], p: float
) -> None:
    if not len(outs) == len(downs) == len(ups):
        raise ValueError(
            f"group of {len(outs)} weights, {len(downs)} lora_down, {len(ups)} lora_up: need equal counts, 1 to"
            f" {MAX_GROUP_SIZE}"
        )
    check_downs(x, downs, scales, p)
    for out, down, up in zip(outs, downs, ups, strict=True):
        if tuple(up.shape) != (out, down.shape[0]):
            raise ValueError(
                f"lora_down {tuple(down.shape)}, lora_up {tuple(up.shape)}, {out} outputs: expected lora_down [R, I],"
                " lora_up [O, R]"
            )
        if up.device != down.device:
            raise ValueError(f"lora_down on {down.device}, lora_up on {up.device}: move them together")
        if up.dtype != down.dtype:
            raise ValueError(f"lora_down is {down.dtype}, lora_up {up.dtype}: convert one of them")


def check_h(x: Tensor, downs: Sequence[Tensor], h: Tensor) -> None:
    """Raise ValueError unless h has the shape and type of `lora_project`'s result for x and `downs`."""
    expected = x.numel() // x.shape[-1], sum(compute_h_width(down.shape[0]) for down in downs)
    if tuple(h.shape) != expected or h.dtype != x.dtype or h.device != x.device:
        raise ValueError(
            f"h has shape {tuple(h.shape)}, dtype {h.dtype} on {h.device}; expected {expected}, {x.dtype} on {x.device}"
        )


def _check_weights(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(f"weight {tuple(weight.shape)} for x {tuple(x.shape)}: expected [O, {x.shape[-1]}]")
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(
                f"weight is {weight.dtype} on {weight.device}, x is {x.dtype} on {x.device}: convert one of them"
            )
    if biases and [bias.shape[0] for bias in biases] != [weight.shape[0] for weight in weights]:
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights: expected one [O] per weight, or none")


def draw_mask(x: Tensor, p: float, seed: Tensor | None) -> Tensor | None:
    """Return the dropout mask m[T,I] for x, or None without dropout."""
    if p == 0.0:
        return None
    if seed is None:
        raise ValueError(f"dropout={p}: seed is missing; pass one int64 on the same device as x")
    return reference.build_dropout_mask(seed, x.numel() // x.shape[-1], x.shape[-1], p, x.dtype)


def reference_project(
    x: Tensor, downs: Sequence[Tensor], scales: Sequence[float], p: float, seed: Tensor | None
) -> Tensor:
    """Compute the group's concatenated h in plain torch, with `compute_h_width(R)` columns per projection."""
    check_downs(x, downs, scales, p)
    x_TI = x.reshape(-1, x.shape[-1])
    mask = draw_mask(x, p, seed)
    hs = []
    for down, scale in zip(downs, scales, strict=True):
        h_TR = reference.compute_h(x_TI, down.to(x.dtype), scale, mask)
        hs.append(torch.nn.functional.pad(h_TR, (0, compute_h_width(h_TR.shape[1]) - h_TR.shape[1])))
    return torch.cat(hs, dim=1)


def dense_forward(op: Any, h: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    x_TI = op.x.reshape(-1, op.x.shape[-1])
    return add_adapters(op, h, [x_TI @ weight.t() for weight in weights])


def add_adapters(op: Any, h: Tensor, products: Sequence[Tensor]) -> list[Tensor]:
    """Return y_i = product_i + h_i B_i^T + bias_i in the type of x, computed in the type of the products [T, O_i]."""
    x, ys, begin = op.x, [], 0
    for i, (y_TO, up) in enumerate(zip(products, op.ups, strict=True)):
        y_TO = y_TO + h[:, begin : begin + up.shape[1]].to(y_TO.dtype) @ up.to(x.dtype).to(y_TO.dtype).t()
        if op.biases:
            y_TO = y_TO + op.biases[i].to(y_TO.dtype)
        # Hide the view from autograd, which forbids in-place changes (Falcon) to a view that is one of several outputs.
        ys.append(torch.ops.aten._unsafe_view(y_TO.to(x.dtype), [*x.shape[:-1], len(up)]))
        begin += compute_h_width(up.shape[1])
    return ys


def dense_backward(op: Any, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the gradients of x, of all A and of all B for weights [O_i, I] in the type of x."""
    grad_x = op.x.new_zeros(op.x.numel() // op.x.shape[-1], op.x.shape[-1])
    factors = compute_adapter_gradients(op, grad_x, weights)
    return grad_x.view(op.x.shape), *factors


def compute_adapter_gradients(
    op: Any, grad_x: Tensor, weights: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of all A and B, and add the gradient of x to `grad_x` [T, I] in place.

    For a weight that is None, only the adapter's part of the gradient of x is added.
    """
    x, mask = op.x, draw_mask(op.x, op.p, op.seed)
    x_TI, grad_downs, grad_ups, begin = x.reshape(-1, x.shape[-1]), [], [], 0
    for grad, weight, down, up, scale in zip(op.grads, weights, op.downs, op.ups, op.scales, strict=True):
        grad_TO, h_TR = grad.reshape(-1, len(up)), op.h[:, begin : begin + len(down)]
        part, grad_down, grad_up = reference.backward(
            grad_TO, x_TI, weight, down.to(x.dtype), up.to(x.dtype), h_TR, scale, mask
        )
        grad_x += part
        grad_downs.append(grad_down.to(down.dtype))
        grad_ups.append(grad_up.to(up.dtype))
        begin += compute_h_width(len(down))
    return grad_downs, grad_ups


def fake_project(x: Tensor, downs: Sequence[Tensor], scales: Sequence[float], p: float, seed: Tensor | None) -> Tensor:
    check_downs(x, downs, scales, p)
    return x.new_empty((x.numel() // x.shape[-1], sum(compute_h_width(down.shape[0]) for down in downs)))


class FormatOperators:
    """Defines zerolora::NAME_forward and NAME_backward for one storage format of the frozen weights.

    `weights` declares the frozen weights in the schemas; `pack` converts a list of weights to these arguments. The
    other functions receive an object with the operator's arguments as attributes: `outs` returns each weight's number
    of outputs, `check` raises ValueError for invalid arguments, `forward` is also passed h and returns the outputs, and
    `backward` returns the gradients of x, all A and all B.
    """

    def __init__(
        self,
        name: str,
        weights: str,
        *,
        pack: Callable[[Tensor, Sequence[Any]], tuple[Any, ...]],
        outs: Callable[[Any], Sequence[int]],
        check: Callable[[Any], None],
        forward: Callable[[Any, Tensor], list[Tensor]],
        backward: Callable[[Any], tuple[Tensor, list[Tensor], list[Tensor]]],
        devices: str | tuple[str, ...] = "cpu",
    ) -> None:
        self._pack, self._outs, self._check, self._compute, self._derive = pack, outs, check, forward, backward
        self._operator = derivative.define(
            f"{name}_forward(Tensor x, {weights}, Tensor[] biases, Tensor[] downs, Tensor[] ups, float[] scales,"
            " float p, Tensor? seed, Tensor? h) -> (Tensor[] ys, Tensor h)",
            self._forward, self._fake_forward, devices,
        )  # fmt: skip
        derivative.define(
            f"{name}_backward(Tensor[] grads, Tensor x, {weights}, Tensor[] downs, Tensor[] ups, Tensor h,"
            " float[] scales, float p, Tensor? seed, bool need_x, bool need_down, bool need_up)"
            " -> (Tensor grad_x, Tensor[] grad_downs, Tensor[] grad_ups)",
            self._backward, self._fake_backward, devices,
        )  # fmt: skip
        self._forward_type, self._backward_type = derivative.register_backward(name)

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Any],
        biases: Sequence[Tensor | None],
        downs: Sequence[Tensor],
        ups: Sequence[Tensor],
        scales: Sequence[float],
        dropout: float = 0.0,
    ) -> list[Tensor]:
        """Compute y_i = x W_i^T + bias_i + s_i (m*x) A_i^T B_i^T for projections i that read the same x.

        x[..., I], W_i[O_i, I], A_i[R_i, I], B_i[O_i, R_i]; with dropout, the projections share one mask m.
        Raises ValueError for mismatched shapes, types or devices, for weights that are not gathered, and for an
        unsupported rank or dropout.
        """
        # The operator checks everything else, so that CUDA calls spend no time on it in Python.
        stored, filled = self._pack(x, weights), fill_biases(x, biases, ups)
        return self._operator(x, *stored, filled, downs, ups, scales, dropout, draw_seed(x, dropout), None)[0]

    def _check_arguments(self, arguments: tuple[Any, ...]) -> Any:
        op = self._forward_type(*arguments)
        self._check(op)
        check_adapters(op.x, self._outs(op), op.downs, op.ups, op.scales, op.p)
        if op.h is not None:
            check_h(op.x, op.downs, op.h)
        return op

    def _forward(self, *arguments: Any) -> tuple[list[Tensor], Tensor]:
        op = self._check_arguments(arguments)
        if op.h is not None:
            return self._compute(op, op.h), op.x.new_empty((0, 0))
        h = torch.ops.zerolora.lora_project(op.x, op.downs, op.scales, op.p, op.seed)
        return self._compute(op, h), h

    def _backward(self, *arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        op = self._backward_type(*arguments)
        grad_x, grad_downs, grad_ups = self._derive(op)
        needed = grad_downs if op.need_down else [], grad_ups if op.need_up else []
        return grad_x if op.need_x else op.x.new_empty(0), *needed

    def _fake_forward(self, *arguments: Any) -> tuple[list[Tensor], Tensor]:
        op = self._check_arguments(arguments)
        h = fake_project(op.x, op.downs, op.scales, op.p, None) if op.h is None else op.x.new_empty((0, 0))
        return [op.x.new_empty((*op.x.shape[:-1], out)) for out in self._outs(op)], h

    def _fake_backward(self, *arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        op = self._backward_type(*arguments)
        grad_downs = [down.new_empty(down.shape) for down in op.downs] if op.need_down else []
        grad_ups = [up.new_empty(up.shape) for up in op.ups] if op.need_up else []
        return op.x.new_empty(op.x.shape if op.need_x else 0), grad_downs, grad_ups


def _reject_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("lora_project has no derivative; call lora_forward")


derivative.define(
    "lora_project(Tensor x, Tensor[] downs, float[] scales, float p, Tensor? seed) -> Tensor",
    reference_project, fake_project,
)  # fmt: skip
torch.library.register_autograd("zerolora::lora_project", _reject_derivative)
lora_group = FormatOperators(
    "lora",
    "Tensor[] weights",
    pack=lambda x, weights: (weights,),
    outs=lambda op: [weight.shape[0] for weight in op.weights],
    check=lambda op: _check_weights(op.x, op.weights, op.biases),
    forward=lambda op, h: dense_forward(op, h, op.weights),
    backward=lambda op: dense_backward(op, op.weights),
)


def fill_biases(x: Tensor, biases: Sequence[Tensor | None], ups: Sequence[Tensor]) -> list[Tensor]:
    """Replace missing biases with zeros if only some projections have one: autograd accepts no None in a list."""
    if len(biases) not in (0, len(ups)):
        raise ValueError(f"{len(biases)} biases for {len(ups)} weights: need one (or None) for each, or an empty list")
    if all(bias is None for bias in biases):
        return []
    return [x.new_zeros(len(up)) if bias is None else bias for bias, up in zip(biases, ups, strict=True)]


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float, dropout: float = 0.0
) -> Tensor:
    """Compute y = x W^T + bias + s (m*x) A^T B^T for one linear layer; see `lora_group`."""
    return lora_group(x, [weight], [bias], [down], [up], [scale], dropout)[0]
