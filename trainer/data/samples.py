"""Training samples made of tokenized documents, from disk or from a stream."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow import Array, Table, int8
from pyarrow.types import is_boolean

from trainer.config.errors import sanitize

_IMAGE_TOKENS = re.compile(r"(<[^<>]{1,40}>|\[IMG\])\1{3,}")


@dataclass(frozen=True)
class Sample:
    """One sequence: its tokens, their weights as targets (0: no target), and the lengths of its documents."""

    input_ids: list[int]
    loss_weights: Sequence[float]
    document_lengths: list[int]
    reference: tuple[float, ...] = ()
    """Cached log-probability of each document's answer under the reference model, in nats."""
    margins: tuple[float, ...] = ()
    """Margin for each pair of answers; 0 for pairs without a margin."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """Images of each document, in order (see `read_stored_image`); empty if no document has images."""


class Samples:
    """An indexable view of memory-mapped documents: sample i has the documents `members[starts[i]:starts[i + 1]]`.

    With mix weights, a document may be in several samples. If `packed`, samples may have several documents,
    which batches must keep separate.
    """

    def __init__(
        self, documents: Table, starts: NDArray[np.int64], members: NDArray[np.int64], *, packed: bool
    ) -> None:
        self._documents, self._starts, self._members = documents, starts, members
        self.packed = packed
        self.reference: NDArray[np.float64] | None = None
        """`Sample.reference` for all documents in pairs, sample by sample."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        members = self._members[self._starts[index] : self._starts[index + 1]].tolist()
        sample = join_samples([self._load_document(member) for member in members])
        if self.reference is None:
            return sample
        reference = self.reference[self.count_answers_before(index) : self.count_answers_before(index + 1)]
        return replace(sample, reference=tuple(reference.tolist()))

    def count_answers_before(self, index: int) -> int:
        """Return the number of answers, two per pair, in the samples before `index`."""
        return 2 * int(self._starts[min(index, len(self))])

    def _load_document(self, index: int) -> Sample:
        columns = (self._documents.column(name)[index].values for name in ("input_ids", "trained", "weights"))
        input_ids, trained, weights = (_to_numpy(column).tolist() for column in columns)
        rejected = self._documents.column("rejected")[index].as_py()
        margins = (self._documents.column("margin")[index].as_py(),) if rejected else ()
        stored = self._documents.column("images")[index].as_py()
        lengths = split_row_lengths(len(input_ids), rejected)
        images = (tuple(stored),) * len(lengths) if stored else ()
        return Sample(input_ids, weights or trained, lengths, margins=margins, images=images)

    def iterate_image_chunks(self) -> Iterator[list[bytes]]:
        """Yield all images, including held-out ones, in lists without duplicates. Lists may share images."""
        for chunk in self._documents.column("images").chunks:
            yield chunk.flatten().unique().to_pylist()

    def count_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of tokens and the number of target tokens in every sample."""
        chunks = [self._documents.column(name).chunks for name in ("length", "targets")]
        columns = [np.concatenate([_to_numpy(chunk) for chunk in column])[self._members] for column in chunks]
        tokens, targets = (np.add.reduceat(column, self._starts[:-1], dtype=np.int64) for column in columns)
        return tokens, targets

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


def _to_numpy(array: Array) -> NDArray[Any]:
    # Arrow's `to_numpy` imports pandas, which takes half a second; DLPack has no bit arrays.
    if is_boolean(array.type):
        return np.from_dlpack(array.cast(int8())).astype(bool)
    return np.from_dlpack(array)


Gather = Callable[[Any], list[Any]]
"""Gathers one object per rank; every rank receives the list."""


@dataclass(frozen=True)
class SampleStream:
    read: Callable[..., Any]
    """Starts a pass over the sources, given epoch, state, rank and `gather` (see `stream_samples`)."""
    packed: bool


def split_row_lengths(tokens: int, rejected: int) -> list[int]:
    """Return the lengths of a row's documents; if `rejected` > 0, the last `rejected` tokens are a second document."""
    return [tokens - rejected, rejected] if rejected else [tokens]


def split_documents(sample: Sample) -> Iterator[Sample]:
    start = 0
    for number, length in enumerate(sample.document_lengths):
        end, images = start + length, sample.images[number : number + 1]
        has_images = any(images)
        yield Sample(sample.input_ids[start:end], sample.loss_weights[start:end], [length], images=images * has_images)
        start = end


def decode_parts(document: Sample, tokenizer: Any) -> Iterator[tuple[float, str]]:
    """Yield (weight, text) for each run of tokens with equal weights.

    The tokens of a run are decoded together, because a character may span several tokens. Repeated image tokens
    are shown once, with their count.
    """
    at = 0
    for weight, run in groupby(map(float, document.loss_weights)):
        count = len(list(run))
        text = sanitize(tokenizer.decode(document.input_ids[at : at + count], skip_special_tokens=False))
        if document.images:
            text = _IMAGE_TOKENS.sub(lambda same: f"{same[1]} x {len(same[0]) // len(same[1]):,}", text)
        yield weight, text
        at += count


def join_samples(samples: list[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    images = [document for sample in samples for document in sample.images or ((),) * len(sample.document_lengths)]
    return Sample(
        [token for sample in samples for token in sample.input_ids],
        [weight for sample in samples for weight in sample.loss_weights],
        [length for sample in samples for length in sample.document_lengths],
        margins=tuple(margin for sample in samples for margin in sample.margins),
        images=tuple(images) if any(images) else (),
    )
