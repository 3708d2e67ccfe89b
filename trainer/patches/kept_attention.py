"""Keep the output and log-sum-exp of attention, so that a recomputed layer does not compute attention again.

Both are results of one operator of torch below autograd, so any model's code can stay as it is: in the forward pass of
a layer a dispatch mode keeps them, and in the recomputation another one returns them instead of calling the operator.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
OPERATORS = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
}
Results = deque[list[Any]]


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
