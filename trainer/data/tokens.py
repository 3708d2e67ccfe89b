"""Tokenize texts, convert trained character spans to token weights, and check the tokens by decoding them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from trainer.config import UserError
from trainer.data.records import PlainText

Span = tuple[int, int]
WeightedSpan = tuple[int, int, float]
# Text for warnings.
NO_END_TOKEN = "no end token after the last answer, so the model does not learn to stop"


@dataclass(frozen=True)
class EncodedDocument:
    """One document, or both documents of a pair: token ids, their loss weights, and the record's `warnings`."""

    input_ids: list[int]
    loss_weights: list[float]
    warnings: tuple[str, ...] = ()
    rejected_tokens: int = 0
    """Number of tokens in the second document, the rejected answer of a pair; 0 for a single document."""
    is_truncated: bool = False
    """Whether the beginning of a pair's prompts was removed."""
    images: tuple[bytes, ...] = ()


def encode_spans(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    spans: Sequence[Sequence[WeightedSpan]],
    origins: Sequence[str],
) -> list[EncodedDocument]:
    """Tokenize texts without adding special tokens; tokens that overlap a span have its weight.

    Raises UserError if the trained tokens do not decode to the spans' text.
    """
    if not texts:
        return []
    for text, origin in zip(texts, origins, strict=True):
        _reject_surrogates(text, origin)
    batch = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    encoded: list[EncodedDocument] = []
    for index, text in enumerate(texts):
        ids: list[int] = batch["input_ids"][index]
        starts, ends = _compute_extents(batch["offset_mapping"][index])
        weights = np.zeros(len(ids))
        for start, end, weight in spans[index]:
            inside = (ends > start) & (starts < end)
            _check_span(tokenizer, [ids[at] for at in np.flatnonzero(inside).tolist()], text[start:end], origins[index])
            weights[inside] = np.maximum(weights[inside], weight)
        encoded.append(EncodedDocument(ids, weights.tolist()))
    return encoded


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[PlainText], train_on: frozenset[str], origins: Sequence[str]
) -> list[EncodedDocument]:
    """Encode each prompt and completion as one string, with beginning- and end-of-text tokens.

    The loss covers the completion and, so that the model learns to stop, the end-of-text token. It also covers the
    prompt if `train_on` contains `user` or `all`.
    """
    joined = [text.prompt + text.completion for text in texts]
    starts = [0 if train_on & {"user", "all"} else len(text.prompt) for text in texts]
    spans = [[(start, len(text), 1.0)] if text else [] for start, text in zip(starts, joined, strict=True)]
    first = detect_bos_token_id(tokenizer)
    last = tokenizer.eos_token_id
    encoded: list[EncodedDocument] = []
    for text, body in zip(texts, encode_spans(tokenizer, joined, spans, origins), strict=True):
        ids, weights = body.input_ids, body.loss_weights
        if ids and first is not None and ids[0] != first:
            ids, weights = [first, *ids], [0.0, *weights]
        if ids and text.completion and isinstance(last, int) and ids[-1] != last:
            ids, weights = [*ids, last], [*weights, 1.0]
        encoded.append(EncodedDocument(ids, weights, () if isinstance(last, int) else (NO_END_TOKEN,)))
    return encoded


def _reject_surrogates(text: str, origin: str) -> None:
    """Raise UserError for unpaired surrogates such as U+D83D, which JSON can contain and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate, before = f"\\u{ord(text[error.start]):04x}", text[: error.start][-20:]
        raise UserError(
            f"{origin}: has an unpaired surrogate ({surrogate}, after {before!r}); fix or remove it"
        ) from None


def detect_bos_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the beginning-of-text token if the tokenizer adds it to plain text; None if it does not."""
    first: list[int] = tokenizer("a", verbose=False)["input_ids"][:1]
    bos = tokenizer.bos_token_id
    return bos if isinstance(bos, int) and first == [bos] else None


def _compute_extents(offsets: Sequence[Span]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and end of each token in characters, without gaps.

    Byte-level tokenizers may report a token without its whitespace, such as (5, 5) for a line break. Since tokens
    cover the whole text, each token is made to start no later than the end of the previous one.
    """
    # Three times as fast as np.asarray.
    pairs = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    ends = np.maximum.accumulate(pairs[:, 1]) if len(pairs) else pairs[:, 1]
    before = np.concatenate([np.zeros(min(1, len(pairs)), dtype=np.int64), ends[:-1]])
    return np.minimum(pairs[:, 0], before), ends


def _check_span(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str, origin: str) -> None:
    """Raise UserError if the trained tokens do not decode to their text, ignoring whitespace."""

    def decode(tokens: list[int]) -> str:
        return "".join(tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False).split())

    expected, actual = "".join(text.split()), decode(ids)
    if expected == actual:
        return
    # Tokenizers that change the text (lower case, unknown characters) are compared with their own decoding. The first
    # and last token may extend beyond the span, but must overlap it.
    alone = decode(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    before = actual.find(alone)
    after = len(actual) - before - len(alone)
    if before < 0 or before >= max(1, len(decode(ids[:1]))) or after >= max(1, len(decode(ids[-1:]))):
        raise UserError(
            f"{origin}: the trained tokens decode to {actual[:60]!r}, but the text is {expected[:60]!r}, so the "
            "tokenizer's offsets are wrong; set model.tokenizer to another tokenizer"
        )
