"""Compute attention over packed documents with variable-length flash attention or, if it is unavailable, a block mask.

Without an attention mask and a cache, transformers detects documents by `position_ids` that restart, and builds an
L x L block mask. On a GPU the documents of a micro-batch are concatenated instead, and flash attention computes each
one separately, without a mask. Without flash attention (fp32, GPUs before Ampere) shared key heads are copied for every
query head, because torch would fall back to matmuls that keep L x L probabilities.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.config import ModelSection, UserError
from trainer.contract.known_versions import patch_attribute, replaces, require
from trainer.data.batches import SequencePart
from trainer.model.model_kind import supports_sdpa
from trainer.model.targets import find_non_text_modules
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.parallel.ranks.sequence_group import exchange_for_heads, exchange_for_tokens
from trainer.patches.attention_sinks import attend_per_document, attend_with_sinks, build_causal_mask, has_sinks
from trainer.patches.replace import replace

VARLEN = "zerolora_varlen"
TOWER = "zerolora_flash_windows"
"""Name of `window_attention`; transformers passes window bounds only to names that contain `flash`."""
FLAT_ATTENTION = (VARLEN, "flash_attention_2", "flash_attention_3")
CUDNN_TILE = 128
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_MODULE_WITHOUT_GQA = torch.nn.Module()  # passed in place of an attention module: it has no `num_key_value_groups`

SUPPORT_FLAGS = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
"""Attributes by which transformers' model classes declare support for an attention implementation."""


@replaces("`create_causal_mask` of modeling files that give it no positions")
def pass_positions_to_masks(base: Any) -> None:
    """Pass positions to `create_causal_mask`, so that masks separate documents. Granite 4.0 H does not pass them."""
    modeling_file, decoder = sys.modules[type(base).__module__], base.base_model
    create = getattr(modeling_file, "create_causal_mask", None)
    if create is None or hasattr(decoder, "packed_positions"):
        return
    decoder.packed_positions = None

    def store_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        module.packed_positions = kwargs.get("position_ids")

    def clear_positions(module: Any, *_: Any) -> None:
        module.packed_positions = None

    def create_positioned_mask(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is None and decoder.packed_positions is not None:
            kwargs["position_ids"] = decoder.packed_positions
        return create(*args, **kwargs)

    decoder.register_forward_pre_hook(store_positions, with_kwargs=True)
    decoder.register_forward_hook(clear_positions, always_call=True)
    replace(modeling_file, "create_causal_mask", create_positioned_mask)


def check_attention_supported(section: ModelSection, model: Any) -> None:
    """Raise UserError if the model does not support `model.attn_implementation`."""
    chosen = section.attn_implementation
    flag = SUPPORT_FLAGS.get(chosen)
    lacks_sdpa = chosen == "sdpa" and not supports_sdpa(model)
    if lacks_sdpa or (flag is not None and not require(model, flag, "transformers")):
        raise UserError(f"model.attn_implementation={chosen}: {type(model).__name__} does not support it; use auto")


def check_sequence_parallel_support(size: int, model: Any) -> None:
    """Raise UserError if attention cannot be divided among `size` ranks. The model may be on the meta device."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    towers = tuple(f"{path}." for path in find_non_text_modules(model))
    is_recurrent = any(
        isinstance(module, torch.nn.Conv1d) and not path.startswith(towers) for path, module in model.named_modules()
    )
    fix = "1"
    if is_recurrent or set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        problem = "has recurrent or chunked layers, which need all earlier tokens"
    elif has_sinks(model):
        problem = "has attention sinks, which are not supported"
    elif not require(model, "_supports_attention_backend", "transformers") or not supports_sdpa(model):
        problem = "does not support custom attention"
    elif not isinstance(heads, int) or heads % size:
        problem, fix = f"has {heads} attention heads, not a multiple of {size}", "a divisor of that number"
    else:
        return
    raise UserError(f"parallel.sequence={size}: {type(model).__name__} {problem}; use {fix}")


def choose_attention(section: ModelSection) -> str | None:
    """Return the `attn_implementation` for loading a model; None selects transformers' default."""
    return None if section.attn_implementation == "auto" else section.attn_implementation


def copy_heads_without_flash(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and not has_flash(device, dtype):
        register_repeated_heads_attention()


@replaces("attention over packed documents")
@replaces("attention sinks over packed documents")
def use_varlen_if_supported(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Switch a loaded model to variable-length attention for packed documents, if it supports that.

    The model needs transformers' attention registry, and sdpa with flash attention for device and dtype. Models with
    attention sinks are switched even without flash attention, because transformers would mix their documents.
    """
    is_replaceable = require(model, "_supports_attention_backend", "transformers")
    uses_flash = supports_sdpa(model) and model.config._attn_implementation == "sdpa" and has_flash(device, dtype)
    if is_replaceable and (uses_flash or has_sinks(model)):
        enable_varlen(model)


@replaces("attention in the windows of vision towers")
def use_flash_in_towers(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Make vision towers compute all windows in one attention call. transformers calls sdpa once per window.

    For an image of 896 x 896 pixels, Qwen2.5-VL has 64 windows in each of 28 layers.
    """
    from transformers import AttentionInterface

    if not has_flash(device, dtype):
        return
    text_configs = (None, model.config, model.config.get_text_config())
    for path in find_non_text_modules(model):
        for module in model.get_submodule(path).modules():
            config = getattr(module, "config", None)
            if "cu_seqlens" not in inspect.signature(module.forward).parameters or config in text_configs:
                continue
            if config._attn_implementation in ("sdpa", VARLEN):
                AttentionInterface.register(TOWER, window_attention)
                config._attn_implementation = TOWER


def can_share_keys(model: Any) -> bool:
    """Return whether two answers can share their prompt's keys (not with attention sinks or chunked attention)."""
    is_replaceable = require(model, "_supports_attention_backend", "transformers") and supports_sdpa(model)
    has_chunks = getattr(model.config.get_text_config(), "attention_chunk_size", None)  # Llama 4
    uses_sdpa = model.config._attn_implementation in ("sdpa", VARLEN)
    return is_replaceable and uses_sdpa and not has_chunks and not has_sinks(model)


def enable_varlen(model: Any) -> None:
    from transformers import AttentionInterface

    # No mask is registered, so transformers builds none. It would be L x L in every forward pass, and detecting packed
    # documents would synchronize with the device.
    AttentionInterface.register(VARLEN, sequence_attention)
    model.set_attn_implementation(VARLEN)


def disable_varlen(model: Any) -> None:
    base = find_base_model(model)
    if base.config._attn_implementation == VARLEN:
        base.set_attn_implementation("sdpa")


@contextmanager
def mask_padding(model: Any) -> Iterator[None]:
    """Use transformers' attention within the block, so that generation masks the padding of a batch.

    transformers builds no mask for VARLEN, so tokens would attend to padding.
    """
    base = find_base_model(model)
    attention = "sdpa" if supports_sdpa(base) else "eager"
    configs = {id(config): config for module in base.modules() if (config := getattr(module, "config", None))}
    with ExitStack() as stack:
        for config in configs.values():
            if getattr(config, "_attn_implementation", None) == VARLEN:
                # The public setter would also change the attention of vision towers.
                stack.enter_context(patch_attribute(config, "_attn_implementation_internal", attention, "transformers"))
        yield


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)


@replaces("transformers' attention `sdpa`")
def register_repeated_heads_attention() -> None:
    """Replace transformers' `sdpa` in this process with `attend_with_repeated_heads`."""
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", attend_with_repeated_heads)


def attend_with_repeated_heads(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute transformers' sdpa with key/value heads repeated for each query head (GQA) [B, heads, L, head_dim].

    Without a mask, transformers passes GQA inputs to torch unchanged, and torch's memory-efficient kernels do not
    support them. Without flash attention, torch then uses the math kernel, which keeps L x L probabilities per head.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if key.shape[1] != query.shape[1]:
        key, value = (repeat_kv(heads, query.shape[1] // key.shape[1]) for heads in (key, value))
    if kwargs.get("is_causal") is None:
        kwargs["is_causal"] = getattr(module, "is_causal", True)
    return sdpa_attention_forward(_MODULE_WITHOUT_GQA, query, key, value, attention_mask, **kwargs)


def varlen_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None, key_index: torch.Tensor | None = None, key_seqlens: torch.Tensor | None = None,
    sliding_window: int | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute causal attention within each document: [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    Document i consists of tokens cu_seqlens[i] to cu_seqlens[i+1] - 1. Without `cu_seqlens` (text generation),
    transformers' sdpa runs. With a `sliding_window` of W tokens, a query attends to itself and the W - 1 tokens before.

    If documents share a prompt, document i attends to keys key_index[key_seqlens[i]:key_seqlens[i+1]] (at most
    max_seqlen). The last of these keys belong to the document's own tokens.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sinks = kwargs.get("s_aux")
    if sinks is not None and (cu_seqlens is None or dropout or not has_flash(query.device, query.dtype)):
        tensors = (query, key, value, attention_mask)
        return attend_per_document(module, *tensors, scaling, cu_seqlens, sliding_window, dropout), None
    if cu_seqlens is None:
        if attention_mask is None:
            attention_mask = _build_mask(query.shape[2], key.shape[2], sliding_window, query.device)
        kwargs |= {"scaling": scaling, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0], None
    assert max_seqlen is not None
    if kwargs.get("softcap") is not None:
        raise UserError(
            "model.attn_implementation=auto: this model uses softcap, which the variable-length kernels do not "
            "support; use eager, or set dataset.packing: false"
        )
    documents, tokens = len(cu_seqlens) - 1, query.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < max_seqlen else None
    if sinks is not None:
        return attend_with_sinks(query, key, value, sinks, cu_seqlens, max_seqlen, scaling, window), None
    if documents * max_seqlen == tokens and window is None and key_index is None:
        return _attend_batched(query, key, value, documents, scaling, dropout).unsqueeze(0), None
    key_seqlens = cu_seqlens if key_seqlens is None else key_seqlens
    if key_index is not None:
        # Select rows [heads, head_dim], which are contiguous.
        key, value = (heads.transpose(1, 2).index_select(1, key_index).transpose(1, 2) for heads in (key, value))
    if not has_flash(query.device, query.dtype):
        outs, options = [], {"scaling": scaling, "dropout": dropout}
        queries, keys = (bounds.diff().tolist() for bounds in (cu_seqlens, key_seqlens))
        for q, k, v in zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True):
            mask = _build_mask(q.shape[2], k.shape[2], window, q.device)
            outs.append(attend_with_repeated_heads(_MODULE_WITHOUT_GQA, q, k, v, mask, **options)[0])
        return torch.cat(outs, 1), None
    bounds = cu_seqlens, key_seqlens, max_seqlen
    sides: dict[str, Any] = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    return _flash_attention(query, key, value, *bounds, scaling, dropout, **sides).unsqueeze(0), None


def sequence_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, sequence: SequencePart | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute `varlen_attention`, divided by heads among the ranks of a sequence group.

    With `sequence`, each of the N ranks passes and receives only its own T/N tokens:
    [1, heads, T/N, head_dim] -> [1, T/N, heads, head_dim].
    """
    if sequence is None:
        return varlen_attention(module, query, key, value, attention_mask, **kwargs)
    query, key, value = exchange_for_heads((query, key, value), sequence)
    out, _ = varlen_attention(module, query, key, value, attention_mask, **kwargs)
    return exchange_for_tokens(out, sequence), None


def window_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None, max_length_q: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention without a mask within each window: [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    Window i consists of patches cu_seq_lens_q[i] to cu_seq_lens_q[i+1] - 1; without bounds, transformers' sdpa runs.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if cu_seq_lens_q is None:
        options = {"scaling": scaling, "dropout": dropout, "is_causal": False}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None
    assert max_length_q is not None
    bounds = cu_seq_lens_q.int(), cu_seq_lens_q.int(), max_length_q
    return _flash_attention(query, key, value, *bounds, scaling, dropout, causal=False).unsqueeze(0), None


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, key_bounds: torch.Tensor,
    max_seqlen: int, scaling: float | None, dropout: float, *, causal: bool = True, **window: int,
) -> torch.Tensor:  # fmt: skip
    """Compute flash attention within each document; return [T, heads, head_dim].

    A document's last query and last key are the same token. Calls the operator behind varlen_attn directly,
    because varlen_attn copies shared key heads (GQA) in torch 2.11.
    """
    tensors = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    lengths = bounds, key_bounds, max_seqlen, max_seqlen
    options: dict[str, Any] = {"is_causal": causal, "return_debug_mask": False, "scale": scaling, **window}
    return torch.ops.aten._flash_attention_forward(*tensors, *lengths, dropout, **options)[0]


def _attend_batched(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: int, scaling: float | None, dropout: float
) -> torch.Tensor:
    """Return attention [T, heads, head_dim] over documents of equal length, computed as batch rows.

    This allows faster dense kernels (cuDNN on Hopper). On an H200 with 4 x 2048 tokens, 32 heads of 128 and 8
    KV heads, forward and backward together took 1.13 ms instead of 1.97 ms.
    """
    # squeeze() instead of [0], because the backward of indexing copies into zeros
    q, k, v = (tensor.squeeze(0).unflatten(1, (documents, -1)).transpose(0, 1) for tensor in (query, key, value))
    fills_tiles = q.shape[2] % CUDNN_TILE == 0
    with sdpa_kernel([*WITHOUT_CUDNN, SDPBackend.CUDNN_ATTENTION] if fills_tiles else WITHOUT_CUDNN):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2).flatten(0, 1)


def _build_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Build the mask [1, 1, queries, keys] of one document. Return None if sdpa's `is_causal` is equivalent.

    Documents have no padding; to generate with rows of different lengths, use `mask_padding`.
    """
    if (window is None or keys <= window) and queries in (1, keys):
        return None
    return build_causal_mask(queries, keys, window, device)
