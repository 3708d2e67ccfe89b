"""Check before training that no token sees later ones, and no packed document another, by running the model.

A model may ignore without an error what separates documents (restarted positions, or bounds), and would then be trained
on the wrong texts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from trainer.config import UserError
from trainer.data.batches import IGNORED, collate
from trainer.data.samples import Sample
from trainer.patches.loss_head import TokenLoss, to_device
from trainer.patches.packed_attention import FLAT_ATTENTION, VARLEN, disable_varlen
from trainer.patches.per_document import PerDocument, compute_per_document, find_tensors, is_mask

LENGTHS = (5, 4)
SEEN, SEEN_BY_EXPERTS = 1e-4, 0.05
"""A changed token is seen at another position if the logits there change by more than this fraction of their change at
a position that must see it (root mean squares). Without experts an unseen token changes nothing at all. With experts
it may: they get different batches of tokens, round sums differently, and the choice of experts can flip."""


@torch.no_grad()
def check_causal(token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device, base_model: str) -> None:
    """Raise UserError if logits depend on later tokens (the model is not causal); every rank must call it."""
    length = sum(LENGTHS)
    tokens = _distant_tokens(model, length)
    other_last = tokens.clone()
    other_last[-2] += 1  # the last one has no target, and may have no logits

    def logits(ids: torch.Tensor) -> torch.Tensor:
        sample = Sample(ids.tolist(), [True] * length, [length])
        found = token_loss.logits(model, collate([sample], pad_token_id, packed=False, flat=False), device)[0][0]
        return found[: length - 1].float()

    with _evaluating(model):
        change = logits(other_last) - logits(tokens)
    if _size(change[:-1]) > _allowed(model) * _size(change[-1:]):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        raise UserError(
            f"base_model={base_model}: in {type(base).__name__} tokens attend to later tokens, so there is "
            "nothing to predict; use a causal language model"
        )


def keep_documents_apart(token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device) -> bool:
    """Return whether packs must be laid out flat; every rank must call it.

    Layers that carry state from one document to the next compute each document alone from now on. A model that ignores
    the bounds of our variable-length attention gets transformers' sdpa with a mask. Raises UserError if a document
    still sees another, or a token those that follow it.
    """
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    fault = None
    for attention in dict.fromkeys((base.config._attn_implementation, "sdpa")):
        if attention != base.config._attn_implementation:
            if base.config._attn_implementation != VARLEN:
                break
            disable_varlen(base)
        probe = _Probe(token_loss, model, base, pad_token_id, device)
        found = probe.find_fault()
        fault = fault or found
        if not found or (probe.separate_documents() and not probe.find_fault()):
            return probe.flat
    raise UserError(f"dataset.packing=true: in {type(base).__name__} {fault}; set dataset.packing: false")


class _Probe:
    """Passes over a pack of two documents."""

    def __init__(self, token_loss: TokenLoss, model: Any, base: Any, pad_token_id: int, device: torch.device) -> None:
        self.flat = base.config._attn_implementation in FLAT_ATTENTION
        self._loss, self._model, self._base, self._device = token_loss, model, base, device
        self._pad_token_id = pad_token_id
        self._tokens = _distant_tokens(model, sum(LENGTHS))
        self._other_first = self._tokens.clone()
        self._other_first[: LENGTHS[0]] += 1

    @torch.no_grad()
    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [length - 2, V] at all tokens but the last of each document."""
        length = sum(LENGTHS)
        sample = Sample(ids.tolist(), [True] * length, list(LENGTHS))
        batch = collate([sample], self._pad_token_id, packed=True, flat=self.flat)
        with _evaluating(self._model):
            found = self._loss.logits(self._model, batch, self._device)[0][0].float()
        return found if len(found) < length else found[to_device(batch.targets[0] != IGNORED, self._device)]

    def find_fault(self) -> str | None:
        """Return what is wrong with the layers over a pack; None if they are correct."""
        other_last = self._tokens.clone()
        other_last[-2] += 1
        before = self._logits(self._tokens)
        by_first, by_last = (self._logits(ids) - before for ids in (self._other_first, other_last))
        allowed, first = _allowed(self._model), LENGTHS[0] - 1
        if _size(by_last[:-1]) > allowed * _size(by_last[-1:]):
            return "tokens attend to later tokens"
        if _size(by_first[first:]) > allowed * _size(by_first[:first]):
            return "documents of a pack attend to each other"
        return None

    def separate_documents(self) -> bool:
        """Let layers that carry state between documents compute each alone, by kernels if these do; False for none."""
        separate: dict[type, list[PerDocument]] = {}
        while kinds := self._find_leaking():
            by_kernels = [each for kind in kinds for each in separate.get(kind, ()) if each.by_kernels]
            for each in by_kernels:
                each.by_kernels = False
            new = kinds - separate.keys()
            for kind in new:
                separate[kind] = compute_per_document(self._base, kind)
            if not by_kernels and not new:
                break
        return bool(separate)

    def _find_leaking(self) -> set[type]:
        """Return the classes of the innermost layers, except attention, that mix documents which entered them apart.

        Attention gets bounds or a mask. Other layers may only get tensors with a row for each token, and masks.
        """
        shape, whole = (1, sum(LENGTHS)), {""}
        seen: list[dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]] = []

        def observe(path: str, _: Any, args: Any, kwargs: Any, output: Any) -> None:
            given, results = (find_tensors(value) for value in ((args, kwargs), output))
            if given and results and given[0].shape[:2] == results[0].shape[:2] == shape:
                # Copies: some models add to a result in place.
                before, after = ([tensor.to(torch.float32, copy=True) for tensor in each] for each in (given, results))
                seen[-1][path] = before[:1], [tensor for tensor in after if tensor.shape[:2] == shape]
                if any(tensor.shape[:2] != shape and not is_mask(tensor, shape) for tensor in given):
                    whole.add(path)

        modules = dict(self._base.named_modules())
        hooks = [m.register_forward_hook(partial(observe, path), with_kwargs=True) for path, m in modules.items()]
        for ids in (self._tokens, self._other_first):
            seen.append({})
            self._logits(ids)
        for hook in hooks:
            hook.remove()
        leaking = [path for path in seen[0].keys() & seen[1].keys() if self._leaks(seen[0][path], seen[1][path])]
        inner = [path for path in leaking if not any(other.startswith(f"{path}.") for other in leaking)]
        return {type(modules[path]) for path in inner if path not in whole and not hasattr(modules[path], "is_causal")}

    def _leaks(self, before: tuple[list[torch.Tensor], ...], after: tuple[list[torch.Tensor], ...]) -> bool:
        """Return whether another first document changes results at the second one, but not what is given there."""

        def seen(old: torch.Tensor, new: torch.Tensor) -> bool:
            first, second = (new - old)[0].split(LENGTHS)
            return _size(second) > _allowed(self._model) * _size(first)

        given, results = (any(map(seen, *each)) for each in zip(before, after, strict=True))
        return results and not given


def _distant_tokens(model: Any, length: int) -> torch.Tensor:
    return torch.arange(length) * (model.config.get_text_config().vocab_size // length)


def _allowed(model: Any) -> float:
    has_experts = any("experts" in name for name, _ in model.named_modules())
    return SEEN_BY_EXPERTS if has_experts else SEEN


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        yield
    model.train(training)


def _size(change: torch.Tensor) -> float:
    return float(change.square().mean().sqrt())
