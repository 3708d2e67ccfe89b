"""Attention over packed documents: variable-length flash attention on a GPU, a block mask elsewhere.

transformers isolates documents by restarting `position_ids` when no attention mask and no cache are given; it then
builds a block mask of L x L. On a GPU the documents of a micro-batch are laid end to end instead, and torch's
variable-length attention computes each one alone, without a mask.
"""

from typing import Any

import torch

from trainer.config import ModelSection

VARLEN = "zerolora_varlen"
FLAT_ATTENTION = (VARLEN, "flash_attention_2", "flash_attention_3")


def resolve_attention(section: ModelSection, *, packing: bool, device: torch.device, dtype: torch.dtype) -> str:
    """The attention implementation behind `auto`; registers ours with transformers when it is chosen."""
    if section.attn_implementation != "auto":
        return section.attn_implementation
    if packing and device.type == "cuda" and dtype != torch.float32:
        _register()
        return VARLEN
    return "sdpa"


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document; query, key, value [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    Documents are the runs [cu_seqlens[i], cu_seqlens[i+1]). Without them (text generation) it is transformers' sdpa.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if cu_seqlens is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    from torch.nn.attention.varlen import varlen_attn

    if query.shape[1] != key.shape[1] and "enable_gqa" not in _CAUSAL:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    packed_query, packed_key, packed_value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    assert max_seqlen is not None
    out: Any = varlen_attn(
        packed_query, packed_key, packed_value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scaling, **_CAUSAL
    )
    return out.unsqueeze(0), None


def _causal_arguments() -> dict[str, Any]:
    """How this torch's varlen_attn is told to be causal and to share key heads: the names changed over releases."""
    import inspect

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    return causal | ({"enable_gqa": True} if "enable_gqa" in known else {})


_CAUSAL = _causal_arguments()


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, sdpa_mask)
