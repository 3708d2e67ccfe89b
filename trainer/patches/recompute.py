"""Set up gradient checkpointing: recompute parts of the model in the backward pass, and keep only their inputs.

non_reentrant         recompute every decoder layer, or the first ones
selective             recompute only the MLP of every layer, which has most of the activations
offload_activations   keep the inputs in pinned host memory; copies overlap with the computation
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
from trainer.contract.known_versions import build_api_error, replaces
from trainer.model.reached_layers import find_decoder_layers
from trainer.parallel.engine.linear_layers import get_logical_shape, is_linear
from trainer.parallel.ranks import process_state
from trainer.patches.replace import replace, undo

_aten = torch.ops.aten
ATTENTION_OPERATORS = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
}
AttentionResults = deque[list[Any]]


@replaces("`_gradient_checkpointing_func` of decoder layers and the forward of their MLPs")
def enable_recomputation(model: Any, training: TrainingSection) -> str | None:
    """Set up `training.gradient_checkpointing`; return a line for the console, or None if checkpointing is off.

    Raises UserError if `selective` finds no feed-forward part.
    """
    mode = training.gradient_checkpointing
    if mode == "none":
        return None
    offload = HostCopies() if training.offload_activations else None
    checkpoint_function: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if _uses_random_numbers(model):
        checkpoint_function = _repeat_random_numbers
    if not training.recompute_attention:
        settings = model.config.get_text_config().to_dict()
        if any(settings.get(name) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")):
            raise UserError(
                "training.recompute_attention=false: the model has attention dropout, which draws a new mask when the "
                "layer is recomputed; use auto"
            )
        store, load = (offload.copy, offload.fetch) if offload else (lambda tensor: tensor, lambda tensor: tensor)
        checkpoint_function = partial(checkpoint_function, context_fn=partial(build_attention_contexts, store, load))
    storage = "on the device"
    if offload is not None:
        checkpoint_function = partial(_run_with_offload, offload, checkpoint_function)
        model.recomputation_hook = model.register_forward_pre_hook(offload.reset)
        storage = "in host memory"
    if mode == "selective":
        parts = find_feed_forward_modules(model)
        if not parts:
            raise UserError(
                "training.gradient_checkpointing=selective: no feed-forward part was found in this model's layers; "
                "use non_reentrant"
            )
        for part in parts:
            replace(part, "forward", _checkpoint_forward(part.forward, checkpoint_function))
        return f"recomputed in the backward pass: {len(parts)} feed-forward parts; their inputs are kept {storage}"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    if not layers:
        raise build_api_error(
            "transformers", "no layer has `_gradient_checkpointing_func` after gradient checkpointing was enabled"
        )
    for layer in layers:
        replace(layer, "_gradient_checkpointing_func", checkpoint_function)
    which = "every layer"
    if first := training.gradient_checkpointing_layers:
        which = _recompute_first_layers(model, layers, first)
    exception = " except attention" if not training.recompute_attention else ""
    return f"recomputed in the backward pass: {which}{exception}; their inputs are kept {storage}"


def _repeat_random_numbers(function: Callable[..., Any], *args: Any, **contexts: Any) -> Any:
    """Run a checkpoint that draws the same random numbers in its recomputation as in its forward pass.

    During CUDA graph capture, this holds only for our operators. Other random numbers would change the
    gradients, which trainer/parallel/engine/cuda_graphs.py detects.
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


def _recompute_first_layers(model: nn.Module, layers: list[Any], first: int) -> str:
    """Recompute only the first `first` layers if the model supports that; return which layers are recomputed."""
    blocks = list(find_decoder_layers(model)[1])
    if not set(blocks) <= set(layers):
        return f"every layer, because this model does not support training.gradient_checkpointing_layers={first}"
    for block in blocks[first:]:
        replace(block, "gradient_checkpointing", False)
    return f"the first {min(first, len(blocks))} of {len(blocks)} layers"


def disable_recomputation(model: Any) -> None:
    undo(model)
    if (hook := vars(model).pop("recomputation_hook", None)) is not None:
        hook.remove()
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
    if hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()


def _uses_random_numbers(model: Any) -> bool:
    """Return whether training draws random numbers, which the recomputation must repeat.

    OPT, Seed-OSS and others call torch's dropout function instead of a module, so their configuration is checked too.
    """
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    settings = model.config.get_text_config().to_dict()
    rates = [value for name, value in settings.items() if "drop" in name or "jitter" in name]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def find_feed_forward_modules(model: nn.Module) -> list[nn.Module]:
    """Return the children of decoder layers that have weight matrices (adapted or not), except token mixers."""
    from peft.tuners.lora import LoraLayer

    parts: list[nn.Module] = []
    for block in find_decoder_layers(model)[1]:
        for child in block.children():
            is_mixer = hasattr(child, "layer_idx")  # attention and state-space mixers find their cache with it
            if not is_mixer and not isinstance(child, LoraLayer) and not is_linear(child) and _has_matrices(child):
                parts.append(child)
    return parts


def _has_matrices(part: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    has_layers = any(isinstance(module, LoraLayer) or is_linear(module) for module in part.modules())
    return has_layers or any(len(get_logical_shape(parameter)) > 1 for parameter in part.parameters())


def _checkpoint_forward(forward: Callable[..., Any], checkpoint_function: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint_function(partial(forward, **kwargs) if kwargs else forward, *args)

    return checkpointed


def _run_with_offload(offload: "HostCopies", checkpoint_function: Any, function: Callable[..., Any], *args: Any) -> Any:
    # These hooks see only the tensors that the checkpoint itself saves, because its own hooks apply inside it.
    offload.layer += 1
    with torch.autograd.graph.saved_tensors_hooks(offload.copy_input, offload.fetch):
        return checkpoint_function(function, *args)


def compute_host_memory_budget() -> int:
    """Return how many bytes of host memory activations may use: free memory minus a tenth of the total."""
    return max(0, int(process_state.read_free_host_memory() * 2**30) - psutil.virtual_memory().total // 10)


class HostCopies:
    """Keeps activations in pinned host memory, copied on a separate stream and prefetched one layer ahead.

    The backward pass needs the layers in reverse order. CPU tensors are not copied.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._buffers: dict[int, Tensor] = {}
        """Pinned buffers, reused in every pass, by the position of the copy in the pass."""
        self._copies: list[_Copy] = []
        self.layer = 0
        """Index of the current layer; its copies are fetched together."""

    def reset(self, *_: Any) -> None:
        """Drop the copies that an earlier pass did not fetch; used as a forward pre-hook."""
        self._copies, self.layer = [], 0

    def copy_input(self, tensor: Tensor) -> "Tensor | _Copy":
        """Start copying an activation to the host; return other tensors, such as masks, unchanged.

        The first activation of a pass is the embedding, which needs no gradient.
        """
        return self.copy(tensor) if tensor.requires_grad or not self._copies else tensor

    def copy(self, tensor: Tensor) -> "Tensor | _Copy":
        """Start copying a floating-point tensor to the host; return it unchanged if host memory is full."""
        if tensor.device.type != "cuda" or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        position = len(self._copies)
        buffer = self._buffers.get(position)
        if buffer is None or buffer.numel() < tensor.numel() or buffer.dtype != tensor.dtype:
            if compute_host_memory_budget() < tensor.nbytes:
                return tensor
            buffer = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            self._buffers[position] = buffer
        strides = torch.empty_like(tensor, device="meta").stride()  # the tensor's, unless its elements overlap
        host = buffer.as_strided(tensor.shape, strides)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        copy = _Copy(self.layer, host, tensor.device)
        self._copies.append(copy)
        return copy

    def fetch(self, copy: "Tensor | _Copy") -> Tensor:
        """Return the activation on its device, and prefetch the rest of its layer and the previous layer."""
        if isinstance(copy, Tensor):
            return copy
        self._start_fetch(copy)
        while self._copies and self._copies[-1].layer >= copy.layer - 1:
            self._start_fetch(self._copies.pop())
        assert copy.arrived is not None and copy.device_copy is not None
        copy.arrived.wait()
        tensor, copy.device_copy = copy.device_copy, None
        tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def _start_fetch(self, copy: "_Copy") -> None:
        if copy.device_copy is not None:
            return
        with torch.cuda.stream(self._stream):
            copy.device_copy = copy.host.to(copy.device, non_blocking=True)
            copy.arrived = torch.cuda.Event()
            copy.arrived.record()


class _Copy:
    def __init__(self, layer: int, host: Tensor, device: torch.device) -> None:
        self.layer, self.host, self.device = layer, host, device
        self.device_copy: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


def build_attention_contexts(
    store: Callable[[Tensor], Any], load: Callable[[Any], Tensor]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts that keep attention results in a checkpoint's forward pass and reuse them in its recomputation.

    `store` converts a tensor to the object that is kept, and `load` converts it back.
    """
    results: AttentionResults = deque()
    return _SaveAttention(results, store), _ReuseAttention(results, load)


class _SaveAttention(TorchDispatchMode):
    def __init__(self, results: AttentionResults, store: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._results, self._store = results, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ATTENTION_OPERATORS:
            # Detached, because autograd makes the results themselves part of the graph.
            self._results.append([self._store(x.detach()) if isinstance(x, Tensor) else x for x in result])
        return result


class _ReuseAttention(TorchDispatchMode):
    def __init__(self, results: AttentionResults, load: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self._results, self._load = results, load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ATTENTION_OPERATORS:
            return func(*args, **(kwargs or {}))
        return tuple(x if x is None or isinstance(x, int) else self._load(x) for x in self._results.popleft())
