"""Gradient checkpointing: the parts of the model that are recomputed in the backward pass, and what is kept instead.

non_reentrant, reentrant   recompute every decoder layer, or the first ones; keep its input
selective                  recompute the MLP of every layer, which keeps most of a layer's activations, not attention
offload_activations        keep the inputs in pinned host memory; copies overlap with the computation
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ops.seeds import Seeds
from trainer.config import TrainingSection, UserError
from trainer.contract.known_versions import changed, replaces
from trainer.model.reached_layers import find_decoder_layers
from trainer.parallel.engine.linear_layers import is_linear, model_shape
from trainer.patches.replace import replace, undo

_aten = torch.ops.aten
OPERATORS = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
}
Results = deque[list[Any]]


@replaces("`_gradient_checkpointing_func` of decoder layers and the forward of their MLPs")
def enable_recomputation(model: Any, training: TrainingSection) -> str | None:
    """Set up `training.gradient_checkpointing`; return a line for the console, None if it is off.

    Raises UserError if `selective` finds no feed-forward part to recompute.
    """
    mode = training.gradient_checkpointing
    if mode == "none":
        return None
    if mode == "reentrant":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        return "recomputed in the backward pass: every layer (reentrant)"
    offload = HostCopies() if training.offload_activations else None
    run, kept = _choose_run(model, training, offload), "kept on the device"
    if offload is not None:
        run = partial(_run_with_offload, offload, run)
        model.recomputation_hook = model.register_forward_pre_hook(offload.start_pass)
        kept = "kept in host memory"
    if mode == "selective":
        parts = feed_forward_parts(model)
        if not parts:
            raise UserError(
                "training.gradient_checkpointing=selective: no feed-forward part was found in this model's layers; "
                "use non_reentrant"
            )
        for part in parts:
            replace(part, "forward", _recomputed(part.forward, run))
        return f"recomputed in the backward pass: {len(parts)} feed-forward parts; their inputs are {kept}"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    if not layers:
        raise changed("transformers", "no layer has `_gradient_checkpointing_func` with gradient checkpointing on")
    for layer in layers:
        replace(layer, "_gradient_checkpointing_func", run)
    which = "every layer"
    if first := training.gradient_checkpointing_layers:
        which = _leave_out_but_the_first(model, layers, first)
    but = " but attention" if not training.recompute_attention else ""
    return f"recomputed in the backward pass: {which}{but}; their inputs are {kept}"


def _choose_run(model: Any, training: TrainingSection, offload: "HostCopies | None") -> Callable[..., Any]:
    run: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if _draws(model):
        run = _repeating_draws
    if not training.recompute_attention:
        if draws_in_attention(model):
            raise UserError(
                "training.recompute_attention=false: the model has attention dropout, which draws a new mask when the "
                "layer is recomputed; use auto"
            )
        store, load = (offload.copy, offload.give_back) if offload else (_unchanged, _unchanged)
        run = partial(run, context_fn=partial(keep_attention, store, load))
    return run


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _repeating_draws(function: Callable[..., Any], *args: Any, **contexts: Any) -> Any:
    """Run a checkpoint that repeats its random numbers; during the capture of a CUDA graph only those of our operators.

    Other random numbers are noticed there: the graph has different gradients (trainer/parallel/engine/cuda_graphs.py).
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **contexts)
    seeds = Seeds()
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (seeds.record(), seeds.replay()),
    )


def _leave_out_but_the_first(model: nn.Module, layers: list[Any], first: int) -> str:
    """Recompute only the first layers, if the model's code supports it; return which ones are recomputed."""
    blocks = list(find_decoder_layers(model)[1])
    if not set(blocks) <= set(layers):
        return f"every layer: this model supports only all or none (not gradient_checkpointing_layers={first})"
    for block in blocks[first:]:
        replace(block, "gradient_checkpointing", False)
    return f"the first {min(first, len(blocks))} of {len(blocks)} layers"


def recomputed_whole(model: nn.Module, training: TrainingSection) -> list[nn.Module]:
    """Return the decoder layers that keep only their input if the other layers are not recomputed."""
    return list(find_decoder_layers(model)[1])[: training.gradient_checkpointing_layers or 0]


def disable_recomputation(model: Any) -> None:
    """Undo `enable_recomputation`."""
    undo(model)
    if (hook := vars(model).pop("recomputation_hook", None)) is not None:
        hook.remove()
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
    if hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()


def _draws(model: Any) -> bool:
    """Return whether training draws random numbers, which the recomputation has to repeat.

    OPT, Seed-OSS and others call torch's dropout function instead of a module: only their configuration shows it.
    """
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    settings = model.config.get_text_config().to_dict()
    noise = [value for name, value in settings.items() if "drop" in name or "jitter" in name]
    return any(isinstance(value, float) and value > 0 for value in noise)


def feed_forward_parts(model: nn.Module) -> list[nn.Module]:
    """Return the children of the decoder layers with weight matrices, adapted or not, except token mixers."""
    from peft.tuners.lora import LoraLayer

    parts: list[nn.Module] = []
    for block in find_decoder_layers(model)[1]:
        for child in block.children():
            mixes = hasattr(child, "layer_idx")  # with which attention and state-space mixers find their cache
            if not mixes and not isinstance(child, LoraLayer) and not is_linear(child) and _has_matrices(child):
                parts.append(child)
    return parts


def _has_matrices(part: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    layers = any(isinstance(module, LoraLayer) or is_linear(module) for module in part.modules())
    return layers or any(len(model_shape(parameter)) > 1 for parameter in part.parameters())


def _recomputed(forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return run(partial(forward, **kwargs) if kwargs else forward, *args)

    return checkpointed


def _run_with_offload(offload: "HostCopies", run: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    # These hooks see only the tensors that the checkpoint itself keeps: inside it, its own hooks apply.
    offload.layer += 1
    with torch.autograd.graph.saved_tensors_hooks(offload.keep, offload.give_back):
        return run(function, *args)


def free_host_memory() -> int:
    """Return the bytes of this host's memory that may be filled with activations: those free but for a tenth of all."""
    memory = psutil.virtual_memory()
    return max(0, memory.available - memory.total // 10)


class HostCopies:
    """Activations in pinned host memory, copied on a separate stream, with those of the next layer prefetched.

    The backward pass needs the layers in reverse order. CPU tensors are not copied.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._buffers: dict[int, Tensor] = {}
        """Page-locked memory by position in the pass, reused in every pass."""
        self._copies: list[_Copy] = []
        self.layer = 0
        """Number of the layer that runs; its copies return to the device together."""

    def start_pass(self, *_: Any) -> None:
        """Forget the copies that an earlier pass did not fetch (a forward pre-hook)."""
        self._copies, self.layer = [], 0

    def keep(self, tensor: Tensor) -> "Tensor | _Copy":
        """Start copying an activation to the host; return other tensors, such as masks, as they are.

        The first one of a pass is the embedding, which needs no gradient.
        """
        return self.copy(tensor) if tensor.requires_grad or not self._copies else tensor

    def copy(self, tensor: Tensor) -> "Tensor | _Copy":
        """Start copying a tensor to the host, unless the host has no room, or it is empty or not floating-point."""
        if tensor.device.type != "cuda" or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        position = len(self._copies)
        buffer = self._buffers.get(position)
        if buffer is None or buffer.numel() < tensor.numel() or buffer.dtype != tensor.dtype:
            if free_host_memory() < tensor.nbytes:
                return tensor
            buffer = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            self._buffers[position] = buffer
        strides = torch.empty_like(tensor, device="meta").stride()  # its own, unless elements overlap
        host = buffer.as_strided(tensor.shape, strides)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        copy = _Copy(self.layer, host, tensor.device)
        self._copies.append(copy)
        return copy

    def give_back(self, kept: "Tensor | _Copy") -> Tensor:
        """Return the activation on its device, and prefetch the others of its layer and those of the one before it."""
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        while self._copies and self._copies[-1].layer >= kept.layer - 1:
            self._fetch(self._copies.pop())
        assert kept.arrived is not None and kept.device_copy is not None
        kept.arrived.wait()
        tensor, kept.device_copy = kept.device_copy, None
        tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def _fetch(self, copy: "_Copy") -> None:
        if copy.device_copy is not None:
            return
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            copy.device_copy = copy.host.to(copy.device, non_blocking=True)
            copy.arrived = torch.cuda.Event()
            copy.arrived.record()


class _Copy:
    def __init__(self, layer: int, host: Tensor, device: torch.device) -> None:
        self.layer, self.host, self.device = layer, host, device
        self.device_copy: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


def keep_attention(
    store: Callable[[Tensor], Any], load: Callable[[Any], Tensor]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpoint's forward pass and of its recomputation.

    `store` returns what is kept of a tensor, and `load` the tensor again.
    """
    results: Results = deque()
    return _Keep(results, store), _Return(results, load)


class _Keep(TorchDispatchMode):
    def __init__(self, results: Results, store: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._results, self._store = results, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in OPERATORS:
            # Detached: autograd will make the results themselves part of the graph.
            self._results.append([self._store(x.detach()) if isinstance(x, Tensor) else x for x in result])
        return result


class _Return(TorchDispatchMode):
    def __init__(self, results: Results, load: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self._results, self._load = results, load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in OPERATORS:
            return func(*args, **(kwargs or {}))
        return tuple(x if x is None or isinstance(x, int) else self._load(x) for x in self._results.popleft())


def draws_in_attention(model: Any) -> bool:
    """Return whether the model has attention dropout, for which recomputation would draw another mask."""
    settings = model.config.get_text_config().to_dict()
    return any(settings.get(name) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"))
