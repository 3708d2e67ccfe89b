"""Run fused experts with adapters: y = sum over a token's experts of weight * down(act(gate_up(x))).

The operator `ops.experts_mlp` computes y if it supports the activation (`detect_activation`). Otherwise the experts run
one by one in plain torch, with the model's own code between the matmuls. Legend: T tokens, K experts per token, S = T K
routed tokens sorted by expert, E experts, H hidden, I in, O out, R rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ops
from ops.experts import Activation
from trainer.model.expert_layers import DOWN, GATE_UP, UP, is_transposed, takes_all_tokens
from trainer.model.mxfp4 import MXFP4
from trainer.parallel.engine.linear_layers import get_packed_experts_layout
from trainer.parallel.engine.partitioned import is_partitioned


@dataclass(frozen=True)
class Adapter:
    """The adapter of one expert tensor: A [E, R, I], B [E, O, R], the scale of B A, and the dropout of its input."""

    a_ERI: Tensor
    b_EOR: Tensor
    scale: float
    dropout: float


def run_adapted_experts(
    experts: Any, adapters: dict[str, Adapter], hidden: Tensor, index: Any = None, weights: Any = None, **kwargs: Any
) -> Tensor:
    compute: Callable[..., Tensor] = _run_dense
    tensors: tuple[Tensor, ...] = (hidden,)
    if not takes_all_tokens(experts):
        index = next(iter(kwargs.values())) if index is None else index
        weights = list(kwargs.values())[-1] if weights is None else weights
        operands = _build_weight_operands(experts, hidden)
        if operands is not None:
            return ops.experts_mlp(hidden, index, weights.to(hidden.dtype), operands, _build_adapter_operand(adapters))
        compute, tensors = run_in_torch, (hidden, index, weights)
    if any(
        get_packed_experts_layout(weight) is not None or is_partitioned(weight)
        for weight in experts.parameters(recurse=False)
    ):
        # Dequantize or gather the weights again in the backward pass instead of keeping them.
        return checkpoint(compute, experts, adapters, *tensors, use_reentrant=False)
    return compute(experts, adapters, *tensors)


def _build_adapter_operand(adapters: dict[str, Adapter]) -> ops.ExpertAdapter:
    gate_up, down = adapters.get(GATE_UP), adapters.get(DOWN)
    return ops.ExpertAdapter(
        gate_up_down=gate_up.a_ERI if gate_up else None,
        gate_up_up=gate_up.b_EOR if gate_up else None,
        down_down=down.a_ERI if down else None,
        down_up=down.b_EOR if down else None,
        gate_up_scale=gate_up.scale if gate_up else 1.0,
        down_scale=down.scale if down else 1.0,
        dropout=max((adapter.dropout for adapter in adapters.values()), default=0.0),
    )


def _build_weight_operands(experts: Any, hidden: Tensor) -> ops.ExpertWeights | None:
    """Return the frozen weights as operands of `ops.experts_mlp`; None if the operator does not support them."""
    if hidden.is_cuda and ops.get_loaded_backend() is None:
        return None  # operators are loaded for training only
    activation = detect_activation(experts)
    gate_up, down = (_build_matrix_operand(experts, name, hidden) if activation else None for name in (GATE_UP, DOWN))
    if activation is None or gate_up is None or down is None:
        return None
    return ops.ExpertWeights(
        gate_up, down, getattr(experts, f"{GATE_UP}_bias", None), getattr(experts, f"{DOWN}_bias", None), *activation
    )


def _build_matrix_operand(experts: Any, name: str, hidden: Tensor) -> ops.ExpertMatrix | None:
    weight = getattr(experts, name)
    layout = get_packed_experts_layout(weight)
    if layout is None:
        return ops.ExpertMatrix.from_plain(weight, is_transposed(experts)) if weight.dtype == hidden.dtype else None
    from trainer.model.packed_experts import NESTED_BLOCK  # imports bitsandbytes

    if layout.dtype != hidden.dtype:
        return None
    if layout.is_8bit:
        sections, cell = weight.sections(), None if layout.cell == (1, layout.cols) else layout.cell
        return replace(ops.ExpertMatrix.from_8bit(sections["codes"], sections["scales"], cell), source=weight)
    if layout.groups is not None:
        if layout.cols % layout.groups.group:
            return None
        stored = ops.ExpertMatrix.from_groups(list(weight.sections().values()), layout.groups.is_float)
        return replace(stored, source=weight)
    if layout.rows * layout.cols % layout.block:
        return None
    sections = weight.sections()
    if layout.kind == MXFP4:
        groups = (layout.experts, layout.rows, layout.cols // layout.block)
        stored = ops.ExpertMatrix.from_mxfp4(sections["codes"].view(*groups, -1), sections["scales"].view(groups))
    elif layout.kind == "nf4":
        state = [sections["scales"], sections["book"]]
        if layout.double_quant:
            state += [sections["nested"], sections["nested_book"], sections["offsets"]]
        nested = NESTED_BLOCK if layout.double_quant else 0
        stored = ops.ExpertMatrix.from_nf4(sections["codes"], state, layout.rows, layout.cols, layout.block, nested)
    else:
        return None
    return replace(stored, source=weight)


class ExpertActivation(NamedTuple):
    """The activation between an expert's two matmuls, with the fields of `ops.ExpertWeights`."""

    name: Activation
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0


_CACHE: WeakKeyDictionary[Any, ExpertActivation | None] = WeakKeyDictionary()


def detect_activation(experts: Any) -> ExpertActivation | None:
    """Return the activation of the experts, or None if `ops.experts_mlp` does not support it."""
    if experts not in _CACHE:
        _CACHE[experts] = _try_activations(experts)
    return _CACHE[experts]


def _try_activations(experts: Any) -> ExpertActivation | None:
    has_gate, has_norm = getattr(experts, "has_gate", True), getattr(experts, "has_post_expert_norm", False)
    if not has_gate or has_norm or takes_all_tokens(experts):
        return None
    u = torch.linspace(-30.0, 30.0, 241, device="cpu").repeat(2)[: 2 * 240].view(2, 240)  # exceeds any clamping limit
    with torch.no_grad(), torch.device("cpu"):
        output = experts._apply_gate(u)
        halves, pairs = u.chunk(2, dim=-1), (u[..., ::2], u[..., 1::2])
        gates: dict[Activation, Callable[[Tensor], Tensor]] = {
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
        }
        for name, function in gates.items():
            for interleaved, (gate, up) in ((False, halves), (True, pairs)):
                if torch.allclose(output, function(gate) * up, rtol=1e-5, atol=1e-6):
                    return ExpertActivation(name, interleaved)
        alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
        if isinstance(alpha, float) and isinstance(limit, float):
            for interleaved, (gate, up) in ((False, halves), (True, pairs)):
                clamped_gate = gate.clamp(max=limit)
                clamped = (up.clamp(-limit, limit) + 1) * clamped_gate * torch.sigmoid(alpha * clamped_gate)
                if torch.allclose(output, clamped, rtol=1e-5, atol=1e-6):
                    return ExpertActivation("clamped", interleaved, alpha, limit)
    return None


def run_in_torch(
    experts: Any, adapters: dict[str, Adapter], x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    first = GATE_UP if getattr(experts, "has_gate", True) else UP
    activation = experts._apply_gate if first == GATE_UP else experts.act_fn
    expert_S, order_S = index_TK.reshape(-1).sort(stable=True)
    # On the meta device (memory estimate) the first expert computes all rows.
    counts = [len(expert_S)] if expert_S.is_meta else torch.bincount(expert_S, minlength=experts.num_experts).tolist()
    token_S = order_S // index_TK.shape[-1]
    up_product, down_product = (_ExpertLinear(experts, name, adapters.get(name)) for name in (first, DOWN))
    results = []
    for expert, rows in enumerate(token_S.split(counts)):
        if len(rows):
            results.append(down_product(expert, activation(up_product(expert, x_TH[rows]))))
    y_SH = torch.cat(results)
    if getattr(experts, "has_post_expert_norm", False):
        y_SH = experts.post_expert_norm(y_SH)
    y_SH = y_SH * weights_TK.reshape(-1)[order_S, None]
    position_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    return y_SH[position_S].view(*index_TK.shape, -1).sum(1).to(x_TH.dtype)


class _ExpertLinear:
    """Computes x W_e^T + bias_e + s dropout(x) A_e^T B_e^T (s: the adapter's scale) for one expert tensor."""

    def __init__(self, experts: Any, name: str, adapter: Adapter | None) -> None:
        self.weight, self.transposed = getattr(experts, name), is_transposed(experts)
        self._bias = getattr(experts, f"{name}_bias", None)
        self.adapter = adapter
        # Unbind once: indexing each expert would create a gradient as large as the whole tensor.
        self.factors = (adapter.a_ERI.unbind(0), adapter.b_EOR.unbind(0)) if adapter is not None else None

    def __call__(self, expert: int, x: Tensor) -> Tensor:
        if get_packed_experts_layout(self.weight) is not None:
            weight = self.weight.dequantize_expert(expert)
        else:
            weight = self.weight[expert].t() if self.transposed else self.weight[expert]
        y = F.linear(x, weight, self._bias[expert] if self._bias is not None else None)
        if self.adapter is None or self.factors is None:
            return y
        dropped = F.dropout(x, self.adapter.dropout) if self.adapter.dropout else x
        a, b = self.factors[0][expert], self.factors[1][expert]
        return y + self.adapter.scale * F.linear(F.linear(dropped.to(a.dtype), a), b).to(y.dtype)


def _run_dense(experts: Any, adapters: dict[str, Adapter], x: Tensor) -> Tensor:
    """Run all of Llama 4's experts on `x` [E T, H], which contains every token once per expert.

    The weights are stored as [E, in, out], so PEFT swaps the factors: B is applied before A.
    """
    x_ETH = x.view(experts.num_experts, -1, x.shape[-1])
    gate, up = _batched_linear(x_ETH, experts.gate_up_proj, adapters.get(GATE_UP)).chunk(2, dim=-1)
    y_ETH = _batched_linear(up * experts.act_fn(gate), experts.down_proj, adapters.get(DOWN))
    return y_ETH.reshape(-1, y_ETH.shape[-1])


def _batched_linear(x_ETI: Tensor, weight_EIO: Any, adapter: Adapter | None) -> Tensor:
    if get_packed_experts_layout(weight_EIO) is not None:  # dequantized one by one
        y_ETO = torch.stack([F.linear(x_TI, weight_EIO.dequantize_expert(index)) for index, x_TI in enumerate(x_ETI)])
    else:
        y_ETO = torch.bmm(x_ETI, weight_EIO)
    if adapter is None:
        return y_ETO
    dropped = F.dropout(x_ETI, adapter.dropout) if adapter.dropout else x_ETI
    h_ETR = torch.bmm(dropped.to(adapter.a_ERI.dtype), adapter.b_EOR)
    return y_ETO + adapter.scale * torch.bmm(h_ETR, adapter.a_ERI).to(y_ETO.dtype)
