"""The forward of fused experts with adapters: y = sum over a token's experts of weight * down(act(gate_up(x))).

Legend: T tokens, K experts a token visits, S = T K visits sorted by expert, E experts, H hidden, I in, O out, R rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.expert_layers import DOWN, GATE_UP, UP, is_transposed, takes_all_tokens


@dataclass(frozen=True)
class Adapter:
    """A [E, R, I], B [E, O, R], the scale of B A, and the probability of dropping an element of the input."""

    a_ERI: Tensor
    b_EOR: Tensor
    scale: float
    dropout: float


def adapted_forward(
    experts: Any, adapters: dict[str, Adapter], hidden: Tensor, index: Any = None, weights: Any = None, **named: Any
) -> Tensor:
    """What the module `experts` gives with an adapter on some of its tensors (by name), called as the module is."""
    if takes_all_tokens(experts):
        return _each_on_all_tokens(experts, adapters, hidden)
    index = next(iter(named.values())) if index is None else index
    weights = list(named.values())[-1] if weights is None else weights
    return _in_plain_torch(experts, adapters, hidden, index, weights)


def _in_plain_torch(
    experts: Any, adapters: dict[str, Adapter], x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Expert by expert over the tokens that are sent to it; those that get none take no part."""
    first = GATE_UP if getattr(experts, "has_gate", True) else UP
    activation = experts._apply_gate if first == GATE_UP else experts.act_fn
    expert_S, order_S = index_TK.reshape(-1).sort(stable=True)
    counts = torch.bincount(expert_S, minlength=experts.num_experts).tolist()
    token_S = order_S // index_TK.shape[-1]
    into, out_of = (_Products(experts, name, adapters.get(name)) for name in (first, DOWN))
    results = []
    for expert, rows in enumerate(token_S.split(counts)):
        if len(rows):
            results.append(out_of(expert, activation(into(expert, x_TH[rows]))))
    y_SH = torch.cat(results)
    if getattr(experts, "has_post_expert_norm", False):
        y_SH = experts.post_expert_norm(y_SH)
    y_SH = y_SH * weights_TK.reshape(-1)[order_S, None]
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    return y_SH[place_S].view(*index_TK.shape, -1).sum(1).to(x_TH.dtype)


class _Products:
    """x W_e^T + bias_e + s dropout(x) A_e^T B_e^T of one tensor of experts."""

    def __init__(self, experts: Any, name: str, adapter: Adapter | None) -> None:
        self.weight, self.transposed = getattr(experts, name), is_transposed(experts)
        self._bias = getattr(experts, f"{name}_bias", None)
        self.adapter = adapter
        # All at once: the gradient of each row alone would be a tensor as large as all.
        self.factors = (adapter.a_ERI.unbind(0), adapter.b_EOR.unbind(0)) if adapter is not None else None

    def __call__(self, expert: int, x: Tensor) -> Tensor:
        weight = self.weight[expert]
        bias = self._bias[expert] if self._bias is not None else None
        y = F.linear(x, weight.t() if self.transposed else weight, bias)
        if self.adapter is None or self.factors is None:
            return y
        kept = F.dropout(x, self.adapter.dropout) if self.adapter.dropout else x
        a, b = self.factors[0][expert], self.factors[1][expert]
        return y + self.adapter.scale * F.linear(F.linear(kept.to(a.dtype), a), b).to(y.dtype)


def _each_on_all_tokens(experts: Any, adapters: dict[str, Adapter], x: Tensor) -> Tensor:
    """Llama 4: rows [E T, H], all tokens for each expert; PEFT has A on the side of the outputs, B on the inputs'."""
    x_ETH = x.view(experts.num_experts, -1, x.shape[-1])
    gate, up = _batched(x_ETH, experts.gate_up_proj, adapters.get(GATE_UP)).chunk(2, dim=-1)
    y_ETH = _batched(up * experts.act_fn(gate), experts.down_proj, adapters.get(DOWN))
    return y_ETH.reshape(-1, y_ETH.shape[-1])


def _batched(x_ETI: Tensor, weight_EIO: Tensor, adapter: Adapter | None) -> Tensor:
    y_ETO = torch.bmm(x_ETI, weight_EIO)
    if adapter is None:
        return y_ETO
    kept = F.dropout(x_ETI, adapter.dropout) if adapter.dropout else x_ETI
    h_ETR = torch.bmm(kept.to(adapter.a_ERI.dtype), adapter.b_EOR)
    return y_ETO + adapter.scale * torch.bmm(h_ETR, adapter.a_ERI).to(y_ETO.dtype)
