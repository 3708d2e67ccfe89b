"""Check before training that no token sees later ones, and no packed document another, by running the model.

A model may ignore without an error what separates documents (restarted positions, or bounds), and would then be trained
on the wrong texts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.config import UserError
from trainer.data.batches import IGNORED, collate
from trainer.data.samples import Sample
from trainer.patches.loss_head import TokenLoss, to_device
from trainer.patches.packed_attention import FLAT_ATTENTION, VARLEN, disable_varlen

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

    A model that ignores the bounds of our variable-length attention gets transformers' sdpa with a mask. Raises
    UserError if a document still sees another, or a token those that follow it.
    """
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    flat = base.config._attn_implementation in FLAT_ATTENTION
    seen = _find_attention_fault(token_loss, model, pad_token_id, device, flat=flat)
    if seen and base.config._attn_implementation == VARLEN:
        disable_varlen(base)
        flat = False
        seen = _find_attention_fault(token_loss, model, pad_token_id, device, flat=flat)
    if seen:
        raise UserError(f"dataset.packing=true: in {type(base).__name__} {seen}; set dataset.packing: false")
    return flat


@torch.no_grad()
def _find_attention_fault(
    token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device, *, flat: bool
) -> str | None:
    """Return what is wrong with the attention over a pack of two documents; None if it is correct."""
    length = sum(LENGTHS)
    tokens = _distant_tokens(model, length)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [length - 2, V] at all tokens but the last of each document."""
        sample = Sample(ids.tolist(), [True] * length, list(LENGTHS))
        batch = collate([sample], pad_token_id, packed=True, flat=flat)
        found = token_loss.logits(model, batch, device)[0][0].float()
        return found if len(found) < length else found[to_device(batch.targets[0] != IGNORED, device)]

    other_first, other_last = tokens.clone(), tokens.clone()
    other_first[: LENGTHS[0]] += 1
    other_last[-2] += 1
    with _evaluating(model):
        before = logits(tokens)
        by_first, by_last = (logits(ids) - before for ids in (other_first, other_last))
    allowed, first = _allowed(model), LENGTHS[0] - 1
    if _size(by_last[:-1]) > allowed * _size(by_last[-1:]):
        return "tokens attend to later tokens"
    if _size(by_first[first:]) > allowed * _size(by_first[:first]):
        return "documents of a pack attend to each other"
    return None


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
