"""Make recurrent layers start every packed document from an empty state.

transformers separates packed documents in attention. State-space layers, linear attention and short convolutions carry
their state across documents, unless their kernels (flash-linear-attention, mamba-ssm, causal-conv1d) receive document
bounds. Otherwise a layer computes its documents as rows of a batch, padded on the right; causal layers never read
padding. The bounds reach the layers through a context variable, because many models do not pass on arguments. Gradient
checkpointing restores the variable for the recomputation.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.contract.known_versions import replaces
from trainer.parallel.engine.partitioned import is_partitioned
from trainer.patches.mamba import CONVOLUTION, explain_unused_kernels
from trainer.patches.replace import replace

CONVOLUTION_NAME = "causal_conv1d_fn"
"""Name, in transformers' modeling files, of the short convolution before a recurrent layer."""
_MARK = "_zerolora_one_call"


class DocumentLayout:
    """Locates the documents in a micro-batch [B, L], and groups them into batches."""

    def __init__(self, position_ids: Tensor, move: Callable[[Tensor], Tensor], *, one_call: bool) -> None:
        """Find the documents on the CPU, by where position IDs restart at 0; `move` copies indices to the device.

        Documents of similar length form a batch, so that at most half of its tokens are padding. With `one_call`, all
        documents form one batch: if calls gather weights, every rank must make the same number of calls.
        """
        self.shape = position_ids.shape
        is_first = position_ids.flatten() == 0
        starts = is_first.nonzero().squeeze(1)
        bounds = torch.cat([starts, starts.new_tensor([len(is_first)])])
        lengths = bounds.diff()
        buckets = torch.zeros_like(lengths) if one_call else lengths.double().log2().ceil().long()
        self.groups: list[Tensor] = []
        """Token indices of each batch of documents [n, l]; the last index of a document is repeated as padding."""
        positions, offset = torch.empty_like(is_first, dtype=torch.long), 0
        for bucket in buckets.unique():
            begins, sizes = starts[buckets == bucket, None], lengths[buckets == bucket, None]
            columns = torch.arange(int(sizes.max()))
            index = begins + columns.minimum(sizes - 1)
            positions[index[columns < sizes]] = offset + (columns < sizes).flatten().nonzero().squeeze(1)
            offset += index.numel()
            self.groups.append(move(index))
        self.positions = move(positions)
        """Positions of the micro-batch's tokens in the concatenated groups [B L]."""
        numbers = (is_first.cumsum(0) - 1).int()[None]
        self.bounds = {"cu_seq_lens_q": move(bounds.int()), "seq_idx": move(numbers)}
        """Arguments by which transformers' kernels separate the documents in a row."""


_DOCUMENTS: ContextVar[DocumentLayout | None] = ContextVar("documents", default=None)


class PerDocumentForward:
    """Runs a layer on each document separately: as one packed row with `by_kernels`, otherwise as rows of a batch."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        kinds = [parameter.kind for parameter in signature(forward).parameters.values()]
        self.by_kernels = Parameter.VAR_KEYWORD in kinds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        documents = _DOCUMENTS.get()
        if documents is None:
            return self._forward(*args, **kwargs)
        token = _DOCUMENTS.set(None)  # layers within this one must not separate documents again
        try:
            if self.by_kernels:
                try:
                    return self._forward_as_row(documents, args, kwargs)
                except ValueError:  # raised by transformers for bounds without the kernels' packages
                    self.by_kernels = False
            return self._forward_as_batches(documents, args, kwargs)
        finally:
            _DOCUMENTS.reset(token)

    def _forward_as_row(self, documents: DocumentLayout, args: Any, kwargs: Any) -> Any:
        shape = documents.shape
        args, kwargs = _select_tokens((args, kwargs), shape, None)
        return _join_all([self._forward(*args, **kwargs, **documents.bounds)], [(1, shape.numel())], shape)

    def _forward_as_batches(self, documents: DocumentLayout, args: Any, kwargs: Any) -> Any:
        results = []
        for index in documents.groups:
            batch_args, batch_kwargs = _select_tokens((args, kwargs), documents.shape, index)
            results.append(self._forward(*batch_args, **batch_kwargs))
        return _join_all(results, [index.shape for index in documents.groups], documents.shape, documents.positions)


def _select_tokens(value: Any, shape: torch.Size, index: Tensor | None) -> Any:
    """Select the tokens at `index` [n, l] from tensors [B, L, ...]; without an index, all tokens as [1, B L, ...].

    Masks become None, since a single document needs none.
    """

    def select(tensor: Tensor) -> Tensor | None:
        if is_mask(tensor, shape):
            return None
        rows = tensor.flatten(0, 1)
        # index_select, because the derivative of rows[index] sorts the indices.
        return rows[None] if index is None else rows.index_select(0, index.flatten()).unflatten(0, index.shape)

    return tree_map_only(Tensor, select, value)


def is_mask(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Return whether this is a mask [..., L, L] for tokens [B, L]."""
    return tensor.dim() == 4 and tensor.shape[-2:] == (shape[1], shape[1])


def _join_all(parts: Sequence[Any], shapes: Sequence[Any], shape: torch.Size, positions: Tensor | None = None) -> Any:
    """Join per-token results into [B, L, ...]; return other results, such as states, from the first part."""
    if isinstance(parts[0], tuple | list):
        return tuple(_join_all(items, shapes, shape, positions) for items in zip(*parts, strict=True))
    if not all(isinstance(part, Tensor) and part.shape[:2] == size for part, size in zip(parts, shapes, strict=True)):
        return parts[0]
    rows = torch.cat([part.flatten(0, 1) for part in parts])
    return (rows if positions is None else rows.index_select(0, positions)).unflatten(0, shape)


def find_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@replaces("forward of recurrent layers over packed documents")
def install_per_document_forwards(base: Any, kind: type[nn.Module]) -> list[PerDocumentForward]:
    if _MARK not in vars(base):
        replace(base, _MARK, any(map(is_partitioned, base.parameters())))
        replace(base, "forward", _receive_documents(base.forward))
        for layer in base.modules():
            if hasattr(layer, "_gradient_checkpointing_func"):
                checkpoint = partial(_keep_documents, layer._gradient_checkpointing_func)
                replace(layer, "_gradient_checkpointing_func", checkpoint)
    modeling_file = sys.modules[kind.__module__]
    if hasattr(modeling_file, CONVOLUTION_NAME) and explain_unused_kernels(*CONVOLUTION):
        replace(modeling_file, CONVOLUTION_NAME, partial(_convolve, getattr(modeling_file, CONVOLUTION_NAME)))
    layers = [module for module in base.modules() if type(module) is kind]
    forwards = [PerDocumentForward(layer.forward) for layer in layers]
    for layer, forward in zip(layers, forwards, strict=True):
        replace(layer, "forward", forward)
    return forwards


def _convolve(
    original: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve each document of [B, C, L] separately with `weight` [C, K], as causal-conv1d does."""
    from transformers.activations import ACT2FN

    if seq_idx is None:
        return original(hidden, weight, bias, activation=activation, **kwargs)
    padding, length = weight.shape[-1] - 1, hidden.shape[-1]
    padded, numbers = F.pad(hidden, (padding, 0)), F.pad(seq_idx, (padding, 0), value=-1)
    result = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for tap, factor in enumerate(weight.to(result.dtype).unbind(1)):
        same = (numbers[:, tap : tap + length] == seq_idx)[:, None]
        result = result + padded[..., tap : tap + length] * same * factor[:, None]
    if bias is not None:
        result = result + bias[:, None]
    return (ACT2FN[activation](result) if activation else result).to(hidden.dtype)


def has_separate_documents(base: nn.Module) -> bool:
    return _MARK in vars(base)


def describe_separate_documents(model: nn.Module) -> list[str]:
    counts: Counter[tuple[str, bool]] = Counter()
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), PerDocumentForward):
            counts[type(module).__name__, forward.by_kernels] += 1
    methods = {True: "separated by their kernels", False: "computed in batches of similar length"}
    return [f"packed documents: {count} {name} layers, {methods[kernels]}" for (name, kernels), count in counts.items()]


def build_document_inputs(
    base: nn.Module, position_ids: Tensor | None, move: Callable[[Tensor], Tensor]
) -> dict[str, DocumentLayout]:
    """Return the argument that passes a pack's document layout to the model's layers; empty if no layer needs it."""
    if position_ids is None or not has_separate_documents(base):
        return {}
    return {"documents": DocumentLayout(position_ids, move, one_call=vars(base)[_MARK])}


def _receive_documents(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def forward_with_documents(*args: Any, documents: DocumentLayout | None = None, **kwargs: Any) -> Any:
        token = _DOCUMENTS.set(documents)
        try:
            return forward(*args, **kwargs)
        finally:
            _DOCUMENTS.reset(token)

    return forward_with_documents


def _keep_documents(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Run `checkpoint`, and recompute `function` with the document layout of its forward pass."""
    return checkpoint(partial(copy_context().run, function), *args)
