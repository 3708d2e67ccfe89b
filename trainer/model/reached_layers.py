"""Detect the layers that an adapter can train: layers that are called as modules and receive a gradient.

Attention indexers select tokens without a gradient, some models read a layer's weight directly, a decoder without an
encoder never calls its cross-attention, and text never reaches the experts for images. Such layers are detected rather
than listed: the model's own code runs once on the CPU, on a copy without weights in which linear layers and experts
only pass on their input. Layers that differ only in their index run only once.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contract.known_versions import replaces
from trainer.model.expert_layers import has_fused_experts
from trainer.parallel.engine.linear_layers import get_logical_shape, is_linear

NOT_CALLED = "never called as modules in a forward pass over text"
NO_GRADIENT = "no gradient of the loss reaches them"
FEW_TOKENS, MANY_TOKENS = 16, 256
"""Sequence lengths of the two passes: some layers need many tokens, for example to compress 128 into one."""
MAX_COPIED = 1_000_000
"""Parameters with more elements than this are expanded from a single element; nothing writes to them."""
EXPERT_NAME = re.compile(r"(.*experts\.)\d+(\..*)")
_CACHE: dict[tuple[type, str], "GradientCoverage"] = {}


@dataclass(frozen=True)
class GradientCoverage:
    """Lists the linear layers and experts that receive no gradient, or receive one only from long sequences."""

    unreached: dict[str, str]
    """Paths of the layers that an adapter cannot train, with the reason."""
    only_in_long_sequences: frozenset[str] = frozenset()
    """Paths of the layers that receive a gradient only from sequences longer than `FEW_TOKENS`."""


@replaces("linear layers and experts of a copy on the meta device")
def probe_gradient_coverage(model: Any) -> GradientCoverage:
    """Run a copy of the model to find the layers without a gradient; return an empty result if the run fails."""
    config = copy.deepcopy(model.config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None))):
        for name in vars(part):
            if "layerdrop" in name:
                setattr(part, name, 0.0)
            elif name.endswith("chunk_size") and isinstance(getattr(part, name), int):
                setattr(part, name, 8)  # recurrent layers in plain torch pad to whole chunks
    config.use_cache, config._attn_implementation = False, "eager"
    vars(config).pop("quantization_config", None)
    key = type(model), config.to_json_string(use_diff=False)
    if key not in _CACHE:
        _CACHE[key] = GradientCoverage({})
        with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            _CACHE[key] = _observe_gradients(type(model), config)
    return _CACHE[key]


def _observe_gradients(model_class: Any, config: Any) -> GradientCoverage:
    try:
        few, drop_repeated = _GradientProbe(model_class, config, FEW_TOKENS), True
    except Exception:  # models that need all of their layers raise errors of any type
        few, drop_repeated = _GradientProbe(model_class, config, FEW_TOKENS, drop_repeated=False), False
    late: set[str] = set()
    if few.called - few.reached:
        with suppress(Exception):
            late = _GradientProbe(model_class, config, MANY_TOKENS, drop_repeated=drop_repeated).reached - few.reached
    reasons = {path: NO_GRADIENT if path in few.called else NOT_CALLED for path in few.linear - few.reached - late}
    return GradientCoverage(reasons, frozenset(late))


class _GradientProbe:
    """Records which linear layers (except the head) and experts a pass calls, and which receive a gradient."""

    def __init__(self, model_class: Any, config: Any, tokens: int, *, drop_repeated: bool = True) -> None:
        """Build a copy of the model and run a forward pass over `tokens` tokens.

        With `drop_repeated`, only the first of several layers that differ only in their index is run.
        """
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights
        from transformers.pytorch_utils import Conv1D

        with no_init_weights(), init_empty_weights():
            model = model_class(copy.deepcopy(config)).train().requires_grad_(False)
        head, self.called = model.get_output_embeddings(), set[str]()
        self._probes: dict[str, Tensor] = {}
        experts = set[str]()
        add_dropped = _drop_repeated_layers(model) if drop_repeated else set
        for path, module in model.named_modules():
            _fill_parameters(module)
            if module is head:
                module.forward = lambda hidden: hidden
            elif isinstance(module, Conv1D) or is_linear(module):
                self._probes[path] = torch.zeros((), requires_grad=True)
                module.forward = partial(self._probe_forward, path, module)
            elif has_fused_experts(module):
                experts.add(path)
                module.forward = partial(self._sum_inputs, path)
        logits = model(input_ids=torch.arange(3, 3 + tokens)[None] % config.get_text_config().vocab_size).logits
        leaves = {id(leaf) for leaf in _find_leaves(logits)}
        reached = {path for path, probe in self._probes.items() if id(probe) in leaves}
        # If experts are modules, a few tokens reach only some of them.
        patterns = {EXPERT_NAME.sub(r"\1*\2", path) for path in reached}
        reached |= {path for path in self._probes if EXPERT_NAME.sub(r"\1*\2", path) in patterns}
        reached |= experts & self.called
        self.linear, self.reached = (set(add_dropped(paths)) for paths in ({*self._probes, *experts}, reached))
        self.called = set(add_dropped(self.called))

    def _probe_forward(self, path: str, module: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return a tensor with the layer's output shape that depends on `x` and on the layer's probe."""
        self.called.add(path)
        width = getattr(module, "out_features", None) or module.nf
        return x[..., :1].float().expand(*x.shape[:-1], width) + self._probes[path]

    def _sum_inputs(self, path: str, hidden: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        """Return a tensor that depends on the hidden states and routing weights of experts."""
        self.called.add(path)
        floats = [x for x in (*others, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        return hidden + sum(tensor.sum() for tensor in floats)


def _fill_parameters(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        value = torch.full((), 1.0 if parameter.dim() < 2 else 0.02).expand(parameter.shape)
        content = value if parameter.numel() > MAX_COPIED else value.clone()
        setattr(module, name, nn.Parameter(content, requires_grad=False))


def _drop_repeated_layers(model: Any) -> Any:
    """Keep one decoder layer of each kind, and return a function that maps paths back to all layers.

    For a path in a kept layer, the function yields the path in every layer of the same kind; it yields other
    paths unchanged.
    """
    path, layers = find_decoder_layers(model)
    numbers: dict[Any, list[int]] = {}
    for number, layer in enumerate(layers):
        numbers.setdefault(build_layer_key(layer), []).append(number)
    indices_by_first = {indices[0]: indices for indices in numbers.values()}
    layers._modules = {str(number): layers[number] for number in indices_by_first}  # under their original indices

    def add_dropped(paths: Any) -> Iterator[str]:
        for kept in paths:
            match = re.fullmatch(rf"{re.escape(path)}\.(\d+)(\..*)", kept)
            if match is None:
                yield kept
            else:
                yield from (f"{path}.{index}{match[2]}" for index in indices_by_first[int(match[1])])

    return add_dropped


def find_decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the path and layers of the ModuleList with the most parameters; `("", ModuleList())` if none exists."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(get_logical_shape(weight).numel() for weight in layers.parameters()) for _, layers in lists]
    return lists[sizes.index(max(sizes))] if lists else ("", nn.ModuleList())


def build_layer_key(layer: nn.Module) -> Any:
    """Return a key built from modules, settings and weight shapes; it is equal for layers that differ only in index."""
    numbers = [
        (name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and "idx" not in name and name != "layer_id"
    ]
    weights = [(tuple(weight.shape), weight.requires_grad) for weight in layer.parameters()]
    lists = [path for path, module in layer.named_modules() if isinstance(module, nn.ModuleList)]
    # A layer may use its own index to select an entry of its ModuleList, as in Zamba 2.
    identity = None if all(path.endswith("experts") for path in lists) else id(layer)
    return identity, repr(layer), tuple(numbers), tuple(weights)


def _find_leaves(result: Tensor) -> Iterator[Tensor]:
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]
