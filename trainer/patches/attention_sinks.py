"""Compute attention with sinks (gpt-oss) over packed documents by correcting variable-length flash attention.

A sink is a score without a value that each head adds to its softmax. With lse, the log-sum-exp of the other scores, and
a sink z,

    lse' = log(e^lse + e^z)      out' = out e^(lse - lse') = out sigmoid(lse - z)

The probabilities are e^(scores - lse'), so flash attention's own backward pass is exact if given out' and lse'. The
sink's gradient is -sum over tokens of e^(z - lse') (grad . out'). Without flash attention, the model's own eager code
computes one document at a time.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from trainer.contract.known_versions import require


def has_sinks(model: torch.nn.Module) -> bool:
    return any(isinstance(getattr(module, "sinks", None), torch.nn.Parameter) for module in model.modules())


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scaling: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """Return attention with sinks [1, T, heads, head_dim]; query, key and value are [1, heads, T, head_dim].

    Document i consists of tokens cu_seqlens[i] to cu_seqlens[i+1] - 1.
    """
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return _FlashWithSinks.apply(*rows, sinks, cu_seqlens, max_seqlen, scaling, window).unsqueeze(0)


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, cu_seqlens: Tensor, max_seqlen: int,
        scaling: float | None, window: int | None,
    ) -> Tensor:  # fmt: skip
        bounds = {
            "scale": scaling,
            "window_size_left": None if window is None else window - 1,
            "window_size_right": None if window is None else 0,
        }
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        out, lse_hT, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *lengths, 0.0, True, False, **bounds
        )
        out, lse_hT = add_sinks(out, lse_hT, sinks)
        ctx.save_for_backward(query, key, value, out, lse_hT, sinks, cu_seqlens, rng_state, unused)
        ctx.max_seqlen, ctx.bounds = max_seqlen, bounds
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, out, lse_hT, sinks, cu_seqlens, rng_state, unused = ctx.saved_tensors
        lengths = (cu_seqlens, cu_seqlens, ctx.max_seqlen, ctx.max_seqlen)
        input_grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out, lse_hT, *lengths, 0.0, True, rng_state, unused, **ctx.bounds
        )
        sink_grad = compute_sink_gradient(grad, out, lse_hT, sinks) if ctx.needs_input_grad[3] else None
        return *input_grads, sink_grad, None, None, None, None


def add_sinks(out_Thd: Tensor, lse_hT: Tensor, sinks_h: Tensor) -> tuple[Tensor, Tensor]:
    lse_sinks_hT = torch.logaddexp(lse_hT, sinks_h.float()[:, None])
    factor_Th = torch.exp(lse_hT - lse_sinks_hT).t()
    return (out_Thd * factor_Th[..., None]).to(out_Thd.dtype), lse_sinks_hT


def compute_sink_gradient(grad_Thd: Tensor, out_Thd: Tensor, lse_hT: Tensor, sinks_h: Tensor) -> Tensor:
    sink_prob_hT = torch.exp(sinks_h.float()[:, None] - lse_hT)
    dot_hT = (grad_Thd.float() * out_Thd.float()).sum(-1).t()
    return -(sink_prob_hT * dot_hT).sum(1).to(sinks_h.dtype)


def attend_per_document(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    cu_seqlens: Tensor | None,
    window: int | None,
    dropout: float,
) -> Tensor:
    """Run the model's own eager attention for each document or, without `cu_seqlens`, once for all tokens."""
    attend = require(sys.modules[type(module).__module__], "eager_attention_forward", "transformers")

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = build_causal_mask(query.shape[2], key.shape[2], window, query.device)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        return attend(module, query, key, value, mask, scaling=scaling, dropout=dropout)[0]

    if cu_seqlens is None:
        return run(query, key, value, mask)
    lengths = cu_seqlens.diff().tolist()
    rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([run(q, k, v, None) for q, k, v in rows], dim=1)


def build_causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Build a causal mask [1, 1, queries, keys] that is true where a query may attend to a key.

    The last query and the last key are the same token. With a `window` of W tokens, a query attends to itself
    and the W - 1 tokens before it.
    """
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions
    return ((distance >= 0) & (distance < (window or keys)))[None, None]
