"""Check before training that no token sees later ones, and no packed document another, by running the model.

A model may ignore without an error what separates documents (restarted positions, or bounds), and would then be trained
on the wrong texts.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from trainer.config import UserError
from trainer.data.batches import IGNORED, MicroBatch, SequencePart, collate
from trainer.data.samples import Sample
from trainer.model.model_kind import supports_sdpa
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.patches.loss_head import TokenLoss, to_device
from trainer.patches.packed_attention import (
    FLAT_ATTENTION,
    VARLEN,
    can_share_keys,
    disable_varlen,
    pass_positions_to_masks,
    set_varlen,
)
from trainer.patches.per_document import (
    PerDocument,
    compute_per_document,
    find_tensors,
    has_separate_documents,
    is_mask,
)

LENGTHS, LONGER = (5, 4), (37, 40)
"""Tokens of two documents; longer ones for layers that combine several tokens into one, as in DeepSeek-V4."""
SEEN, SEEN_BY_EXPERTS = 1e-4, 0.05
"""A changed token is seen at another position if the logits there change by more than this fraction of their change at
a position that must see it (root mean squares). Without experts an unseen token changes nothing at all. With experts
it may: they get different batches of tokens, round sums differently, and the choice of experts can flip."""
AMPLIFIED = 10.0
"""A layer mixes documents if it makes a change at the second one this many times larger, as a fraction of the first."""
ROUNDED = 0.05
"""Difference of equal logits, as a fraction of them, that may be due to rounding in 16 bits."""


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
            if base.config._attn_implementation != VARLEN or not supports_sdpa(base):
                break
            disable_varlen(base)
        probe = _Probe(token_loss, model, base, pad_token_id, device)
        if not probe.flat:
            pass_positions_to_masks(base)
        found = probe.separate_documents()
        longer = _Probe(token_loss, model, base, pad_token_id, device, LONGER)
        longer.flat = probe.flat
        if not found and longer.differs_from_alone():
            found = "documents of a pack have other logits than alone"
        if not found:
            return probe.flat
        fault = fault or found
    raise UserError(f"dataset.packing=true: in {type(base).__name__} {fault}; set dataset.packing: false")


@torch.no_grad()
def share_prompt_keys(token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device) -> str | None:
    """Make the answers of a pair share the keys of their prompt, or return why the model cannot.

    Every rank must call it. An answer must not see the other one, and must have the logits that it has alone.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    if not can_share_keys(base) or has_separate_documents(base):
        return "its layers are not attention that can be replaced"
    prompt, chosen = _distant_tokens(model, sum(LENGTHS)).split(LENGTHS)
    rejected, other_chosen, length = chosen.flip(0), chosen + 1, sum(LENGTHS)

    def logits(chosen: torch.Tensor, *, shared: bool) -> torch.Tensor:
        """Return the logits of the answers chosen and rejected, one after the other."""
        ids = torch.cat([prompt, chosen, prompt, rejected]).tolist()
        sample = Sample(ids, ([False] * LENGTHS[0] + [True] * LENGTHS[1]) * 2, [length, length])
        batch = collate([sample], pad_token_id, packed=False, flat=False, pairs=True, shared=shared)
        found, targets = token_loss.logits(model, batch, device)
        return found[targets != IGNORED]

    with _evaluating(model):
        alone = logits(chosen, shared=False)
        set_varlen(base)
        together = logits(chosen, shared=True)
        change = logits(other_chosen, shared=True) - together
    first, allowed = LENGTHS[1], _allowed(model)
    if _size(change[first:]) > allowed * _size(change[:first]):
        reason = "the answers of a pair would see each other"
    elif _size(together - alone) > (allowed if alone.dtype == torch.float32 else ROUNDED) * _size(alone):
        reason = "the answers would have other logits than alone"
    else:
        return None
    base.set_attn_implementation(before)
    return reason


@torch.no_grad()
def check_parts(token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device, part: SequencePart) -> None:
    """Raise UserError if logits of a part of a sequence differ from those in the whole; every rank must call it.

    They differ if layers other than attention combine tokens; such a model cannot be trained on split sequences.
    """
    length = 6 * part.size
    documents = [length - 2 * part.size + 1, 2 * part.size - 1]
    sample = Sample(_distant_tokens(model, length).tolist(), [True] * length, documents)
    whole = collate([sample], pad_token_id, packed=True, flat=True)
    part_batch = part.cut(whole)
    before = int((whole.targets[:, : 6 * part.rank] != IGNORED).sum())

    def logits(batch: MicroBatch) -> torch.Tensor:
        found, targets = token_loss.logits(model, batch, device)
        return found[targets != IGNORED]

    with _evaluating(model):
        expected, found = logits(whole)[before : before + part_batch.target_count], logits(part_batch)
    allowed = _allowed(model) if found.dtype == torch.float32 else ROUNDED
    differs = torch.tensor(_size(found - expected) > allowed * _size(expected), device=device).int()
    if sum_over_ranks(differs):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        raise UserError(
            f"parallel.sequence={part.size}: {type(base).__name__} combines tokens outside of attention, so a part of "
            "a sequence has different logits than in the whole; use 1"
        )


class _Probe:
    def __init__(
        self,
        token_loss: TokenLoss,
        model: Any,
        base: Any,
        pad_token_id: int,
        device: torch.device,
        lengths: tuple[int, int] = LENGTHS,
    ) -> None:
        self.flat = base.config._attn_implementation in FLAT_ATTENTION
        self._loss, self._model, self._base, self._device = token_loss, model, base, device
        self._pad_token_id, self._lengths = pad_token_id, lengths
        self._tokens = _distant_tokens(model, sum(lengths))

    def separate_documents(self) -> str | None:
        """Make layers that carry state between documents compute each alone; return what remains wrong, if anything.

        These layers use their kernels if that keeps documents apart.
        """
        other_first, other_last = self._tokens.clone(), self._tokens.clone()
        other_first[: LENGTHS[0]] += 1
        other_last[-2] += 1
        allowed, first = _allowed(self._model), LENGTHS[0] - 1
        separate: dict[type, list[PerDocument]] = {}
        fault, leaks = None, True
        while leaks:
            observer = _Observer(self._base, allowed)
            with observer.watch():
                before = self._logits(self._tokens)
            with observer.watch():
                by_first = self._logits(other_first) - before
            if _size(by_first[first:]) > allowed * _size(by_first[:first]):
                fault = fault or "documents of a pack attend to each other"
            kinds = observer.leaking()
            by_kernels = [each for kind in kinds for each in separate.get(kind, ()) if each.by_kernels]
            for each in by_kernels:
                each.by_kernels = False
            new = kinds - separate.keys()
            separate |= {kind: compute_per_document(self._base, kind) for kind in new}
            leaks = bool(by_kernels or new)
        by_last = self._logits(other_last) - before
        if _size(by_last[:-1]) > allowed * _size(by_last[-1:]):
            # A separated layer that turned out to need its mask: the documents were the fault.
            return fault if fault and separate else "tokens attend to later tokens"
        return fault if _size(by_first[first:]) > allowed * _size(by_first[:first]) else None

    def differs_from_alone(self) -> bool:
        """Return whether most tokens of the second document have other logits than without the first."""
        first = self._lengths[0]
        together, alone = self._logits(self._tokens)[first - 1 :], self._logits(self._tokens[first:])
        narrow = self._base.get_input_embeddings().weight.element_size() == 2
        change, size = (each.square().mean(-1).median() for each in (together - alone, alone))
        return bool(change > (ROUNDED if narrow else SEEN) ** 2 * size)

    @torch.no_grad()
    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits at all tokens but the last of each document."""
        length, packed = len(ids), len(ids) == sum(self._lengths)
        sample = Sample(ids.tolist(), [True] * length, list(self._lengths) if packed else [length])
        batch = collate([sample], self._pad_token_id, packed=packed, flat=packed and self.flat)
        with _evaluating(self._model):
            found = self._loss.logits(self._model, batch, self._device)[0][0].float()
        return found if len(found) < length else found[to_device(batch.targets[0] != IGNORED, self._device)]


class _Observer:
    """Finds the innermost layers that mix documents, from two passes with different first documents."""

    def __init__(self, base: torch.nn.Module, allowed: float) -> None:
        self._modules, self._allowed = dict(base.named_modules()), allowed
        self._before: dict[tuple[str, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """What a module got and returned in the first pass, by its path and the number of the call."""
        self._calls: Counter[str] = Counter()
        self._leaking: set[str] = set()
        self._whole = {""}
        """Modules that cannot compute a document alone: they get tensors that belong to no token."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        is_second = bool(self._before)
        self._calls.clear()
        hooks = [
            module.register_forward_hook(partial(self._observe, path, is_second), with_kwargs=True)
            for path, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _observe(self, path: str, is_second: bool, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        shape = (1, sum(LENGTHS))
        given, results = find_tensors((args, kwargs)), find_tensors(output)
        if not given or not results or not given[0].shape[:2] == results[0].shape[:2] == shape:
            return
        results = [tensor for tensor in results if tensor.shape[:2] == shape]
        self._calls[path] += 1
        call = path, self._calls[path]
        if not is_second:  # copies: some models add to a result in place
            self._before[call] = given[0].clone(), [tensor.clone() for tensor in results]
            if any(tensor.shape[:2] != shape and not is_mask(tensor, shape) for tensor in given):
                self._whole.add(path)
        elif call in self._before:
            old_given, old_results = self._before[call]
            seen_before = _seen(old_given, given[0])
            has_experts = any("experts" in name for name, _ in self._modules[path].named_modules(prefix=path))
            # Less than SEEN is lost in 16 bits anyway, where kernels round differently next to other documents.
            unseen = SEEN if given[0].element_size() == 2 else 0.0
            # Experts may already have been chosen differently, and any layer can make that a little more visible.
            limit = max(self._allowed, AMPLIFIED * seen_before) if seen_before or has_experts else unseen
            if seen_before <= self._allowed and max(map(_seen, old_results, results)) > limit:
                self._leaking.add(path)

    def leaking(self) -> set[type]:
        """Return the classes of the layers, except attention, which gets bounds or a mask."""
        inner = [at for at in self._leaking if not any(other.startswith(f"{at}.") for other in self._leaking)]
        modules = [self._modules[path] for path in inner if path not in self._whole]
        return {type(module) for module in modules if not hasattr(module, "is_causal")}


def _seen(old: torch.Tensor, new: torch.Tensor) -> float:
    """Return the change at the second document as a fraction of that at the first one."""
    first, second = (new - old)[0].abs().float().split(LENGTHS)  # rotary factors may be complex
    return _size(second) / max(_size(first), torch.finfo(torch.float32).tiny)


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
    return float(change.float().square().mean().sqrt())
