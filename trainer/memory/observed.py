"""Observe the activation memory of language models by running their layers without weights on torch's meta device.

One layer of each kind runs forward and backward, with the patches of the real run, while a meter counts the bytes of
live tensors. Flash attention and mamba-ssm's scan, which keep different tensors on a GPU than on the meta device, are
replaced by functions that keep the same tensors as the GPU kernels.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from trainer.config import TrainingSection, UserError
from trainer.config.errors import format_one_line
from trainer.contract.known_versions import patch_attribute, replaces
from trainer.memory.stored_weights import ModelShapes
from trainer.model.expert_forward import detect_activation, run_adapted_experts, run_in_torch
from trainer.model.expert_layers import find_expert_modules, takes_all_tokens
from trainer.model.reached_layers import build_layer_key, find_decoder_layers
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.patches.norm_mlp_rope import RECOMPUTE_FROM_BYTES, install_input_recomputation, replace_elementwise
from trainer.patches.recompute import disable_recomputation, enable_recomputation
from trainer.patches.replace import replace
from trainer.patches.tiled_mlp import tile_feed_forward

MAX_DEQUANTIZED_TOGETHER = 64 << 20
"""Bytes of 4-bit weights below which shared-input projections are dequantized together (kMostBytes, ops/csrc)."""
FLASH = "zerolora_observed"
SCAN = "mamba2_chunk_scan"
"""Name of mamba-ssm's scan in transformers' modeling files."""


@dataclass(frozen=True)
class LayerSettings:
    """Properties of a run that determine which tensors a layer keeps."""

    length: int
    """Tokens in the longest row, including padding."""
    dtype: torch.dtype
    attention: str
    """`flash` (variable-length kernels, no mask), `sdpa` or `eager`."""
    masked: bool
    """Whether documents of a packed sequence are separated by a mask."""
    copied_heads: bool
    """Whether keys and values are copied for every head, as on a GPU without flash attention."""
    elementwise: bool
    """Whether our operators compute norms, SwiGLU and rotary embedding where possible."""
    frozen_norms: bool
    recomputed: str
    """What our kernels recompute in the backward pass: `none`, `activations` (of SwiGLU), or `norms` (both)."""
    fused: bool
    """Whether our operator computes adapted layers."""
    separate: bool
    """Whether shared-input projections are computed separately."""
    selective: bool
    """Whether feed-forward parts are recomputed."""
    mlp_tile: int
    """Tokens per tile of gated MLPs; 0: no tiles."""
    on_gpu: bool
    packed: bool
    """Whether the base model is quantized to 4 or 8 bits."""
    packed_experts: bool
    is_8bit: bool
    """Whether matmuls take 8-bit inputs."""
    scan_by_kernel: bool
    """Whether mamba-ssm rather than plain torch computes the scans of recurrent layers."""


@dataclass(frozen=True)
class Layer:
    kept: int
    """Bytes kept for the backward pass, including the input."""
    peak: int
    """Peak bytes during forward and backward, including the input and the gradient of the output."""
    output_bytes: int
    """Bytes of the hidden state that the layer returns."""
    attention: int = 0
    """Bytes of the outputs and log-sum-exps of attention."""

    def extrapolate(self, double: "Layer", steps: float) -> "Layer":
        """Return this layer plus `steps` times the difference between `double` and this layer."""
        pairs = zip(astuple(self), astuple(double), strict=True)
        return Layer(*(single + int(steps * (double - single)) for single, double in pairs))


class Meter(TorchDispatchMode):
    """Counts live bytes and their peak while operators run, excluding the model's parameters and buffers."""

    def __init__(self, model: nn.Module, settings: LayerSettings | None = None) -> None:
        super().__init__()
        self._settings, self.measuring = settings, False
        self.live = self.peak = self.operator_bytes = 0
        self._sizes = {int(tensor.untyped_storage()._cdata): 0 for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # transformers checks whether every row is one document.
            return self._settings is None or not self._settings.masked
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        self.operator_bytes = max(self.operator_bytes, self._count_internal(func, args))
        return result

    def _count(self, storage: Any) -> None:
        key, size = int(storage._cdata), storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = size
            self.live += size
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _count_internal(self, func: Any, args: Sequence[Any]) -> int:
        """Return the bytes that one of our operators allocates internally: dequantized weights, or 8-bit copies."""
        if self._settings is None or not self._settings.packed:
            return 0
        backward = func is torch.ops.zerolora.lora_backward.default
        if not (backward or func is torch.ops.zerolora.lora_forward.default):
            return 0
        weights = args[2] if backward else args[1]
        if self._settings.is_8bit:
            return sum(tensor.numel() for tensor in (*weights, *args[0])) if backward else 0
        sizes = [weight.nbytes for weight in weights]
        return sum(sizes) if backward and sum(sizes) <= MAX_DEQUANTIZED_TOGETHER else max(sizes)


class _ObservationComplete(Exception):
    """Raised to stop the forward pass once a layer of each kind has been measured."""


class NoEstimateError(UserError):
    """Raised if the memory cannot be estimated because the model's code does not run without weights."""

    def __init__(self, error: Exception) -> None:
        self.reason = format_one_line(f"{type(error).__name__}: {error}")
        super().__init__(
            f"the memory of this model cannot be estimated ({self.reason}); set zero.stage and training.batch_size "
            "to numbers"
        )


def observe_layers(shapes: ModelShapes, settings: LayerSettings, rows: int) -> dict[int, Layer]:
    """Return the memory that one layer needs for `rows` rows, by layer kind."""
    model = shapes.model.to("meta", settings.dtype).train()
    layers: dict[int, Layer] = {}
    meter = Meter(model, settings)
    try:
        with substitute_attention(copy_kv_heads=settings.copied_heads), forbid_triton(), meter:
            results = _intercept_layers(shapes, meter, layers)
            _apply_patches(model, settings)
            results.clear()
            meter.measuring = True
            _forward(model, rows, settings.length)
    except _ObservationComplete:
        pass
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NoEstimateError(error) from error
    finally:
        disable_recomputation(model)
        model.zero_grad()
    return layers


def count_rows_to_observe(shapes: ModelShapes, settings: LayerSettings) -> int:
    """Return the smallest row count from which memory grows linearly, or 1 if nothing is recomputed."""
    row = settings.length * shapes.hidden * settings.dtype.itemsize
    return 1 if settings.recomputed == "none" else -(-RECOMPUTE_FROM_BYTES // row)


@replaces("Triton's `JITFunction.run`")
def forbid_triton() -> AbstractContextManager[None]:
    """Return a context manager that raises RuntimeError if a layer launches a Triton kernel."""

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("the model's layers launch Triton kernels")

    try:
        from triton.runtime.jit import JITFunction
    except ImportError:  # not part of torch's CPU builds
        return nullcontext()
    return patch_attribute(JITFunction, "run", run, "triton")


def _forward(model: Any, rows: int, length: int) -> Any:
    return model(input_ids=torch.zeros(rows, length, dtype=torch.long, device="meta"), use_cache=False)


def _apply_patches(model: Any, settings: LayerSettings) -> None:
    """Patch the model as a run does (trainer/patches/installation.py)."""
    from transformers import AttentionInterface

    from trainer.patches.fused_lora import group_layers  # imports bitsandbytes

    AttentionInterface.register(FLASH, _attend)
    base, attention = find_base_model(model), FLASH if settings.attention == "flash" else settings.attention
    if base.config._attn_implementation != attention:
        base.set_attn_implementation(attention)
    if settings.elementwise:
        replace_elementwise(model, frozen_norms=settings.frozen_norms, recompute=settings.recomputed)
    _replace_experts(model, settings)
    for module in model.modules() if settings.scan_by_kernel else ():
        if hasattr(file := sys.modules[type(module).__module__], SCAN) and getattr(file, SCAN) is not _scan:
            replace(file, SCAN, _scan)
    if settings.fused:
        for group in group_layers(model, partial(_forward, model, 1, 8), separate=settings.separate)[1]:
            group.install()
    if settings.recomputed != "none":
        install_input_recomputation(model)
    if settings.mlp_tile:
        tile_feed_forward(model, settings.mlp_tile)
    if settings.selective:
        enable_recomputation(model, TrainingSection(gradient_checkpointing="selective"))


def _attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _Flash.apply(query, key, value, None).transpose(1, 2), None


def _replace_experts(model: nn.Module, settings: LayerSettings) -> None:
    """Replace the forward method of experts without an adapter, because the original fails on the meta device."""
    from trainer.model.expert_adapter import ParamWrapper

    wrapped = {id(module.get_base_layer()) for module in model.modules() if isinstance(module, ParamWrapper)}
    for experts in find_expert_modules(model).values():
        if id(experts) in wrapped or takes_all_tokens(experts):
            continue
        by_operator = settings.on_gpu and settings.fused and detect_activation(experts) is not None
        compute: Callable[..., Any] = partial(run_adapted_experts if by_operator else run_in_torch, experts, {})
        if settings.packed_experts and not by_operator:
            compute = partial(checkpoint, compute, use_reentrant=False)
        replace(experts, "forward", compute)


def _intercept_layers(shapes: ModelShapes, meter: Meter, layers: dict[int, Layer]) -> dict[int, Any]:
    """Patch the layers to run one of each kind, record its memory in `layers`, and reuse its output for the others.

    Returns a dict from kind to output, filled in while the model runs.
    """
    results: dict[int, Any] = {}

    def run(kind: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kind not in results and not meter.measuring:
            results[kind] = forward(*args, **kwargs)
        if kind not in results:
            results[kind], layers[kind] = _measure_layer(meter, forward, args, kwargs)
            if len(layers) == len(set(shapes.layers)):
                raise _ObservationComplete
        return results[kind]

    for kind, block in zip(shapes.layers, find_decoder_layers(shapes.model)[1], strict=True):
        replace(block, "forward", partial(run, kind, block.forward))
    return results


def _measure_layer(meter: Meter, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, Layer]:
    hidden = args[0] if args else kwargs["hidden_states"]
    before = meter.live
    meter.peak, meter.operator_bytes = before, 0
    leaf = torch.empty((), dtype=hidden.dtype, device="meta", requires_grad=True)
    inputs = [hidden.detach() + leaf]  # autograd would keep a leaf; popped so that no variable refers to it
    others = args[1:] if args else ()
    kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    _Flash.results = 0
    with torch.enable_grad():
        result = forward(inputs.pop(), *others, **kwargs)
    attention = _Flash.results
    output = result[0] if isinstance(result, tuple) else result
    output_bytes = output.untyped_storage().nbytes()
    kept = meter.live - before - output_bytes
    torch.autograd.backward(output, torch.empty_like(output))
    return result, Layer(kept, meter.peak - before - output_bytes + meter.operator_bytes, output_bytes, attention)


def empty_duplicate_layers(blocks: Sequence[nn.Module]) -> tuple[int, ...]:
    """Delete the contents of every layer that equals an earlier one; return the index of each layer's kind."""
    numbers: dict[Any, int] = {}
    kinds = []
    for block in blocks:
        count = len(numbers)
        kinds.append(numbers.setdefault(build_layer_key(block), count))
        if kinds[-1] < count:
            block._modules.clear()
            block._parameters.clear()
    return tuple(kinds)


class _Flash(torch.autograd.Function):
    """A substitute for flash attention that saves the same tensors: q, k, v, the output and the fp32 log-sum-exp."""

    results = 0
    """Bytes of outputs and log-sum-exps, accumulated since the last reset to 0."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, _ = query.shape
        measure_by_token = query.stride(1) < query.stride(2)  # the result has the layout of the queries
        first, second = (length, heads) if measure_by_token else (heads, length)
        result = query.new_empty(batch, first, second, value.shape[-1])
        result = result.transpose(1, 2) if measure_by_token else result
        converted_mask = None if mask is None else query.new_empty(mask.shape)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, log_sums, converted_mask)
        _Flash.results += result.nbytes + log_sums.nbytes
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]), None


class _Scan(torch.autograd.Function):
    """A substitute for mamba-ssm's scan that saves the same tensors: its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        result = torch.empty_like(inputs[0])
        ctx.save_for_backward(*inputs, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:-1])


def _scan(*inputs: Any, return_final_states: bool = False, **_: Any) -> Any:
    result = _Scan.apply(*(value for value in inputs if isinstance(value, Tensor)))
    return (result, None) if return_final_states else result


@replaces("`scaled_dot_product_attention`")
def substitute_attention(*, copy_kv_heads: bool = False) -> AbstractContextManager[None]:
    """Return a context manager that replaces attention with `_Flash`.

    On the meta device, torch would decompose attention and save the scores, unlike on a GPU. With `copy_kv_heads`,
    keys and values are copied for every query head.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any) -> Tensor:
        if copy_kv_heads and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return _Flash.apply(query, key, value, attn_mask)

    return patch_attribute(F, "scaled_dot_product_attention", attend, "torch")
