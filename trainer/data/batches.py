"""Micro-batches of an optimizer step: the same global batch in the same order on any number of ranks.

Shapes: B sequences in a micro-batch, L the longest of them, D documents.

By tokens, steps have sequences of similar length: an epoch's order is cut into windows of global batches, each window
is sorted by length and its batches are shuffled, so that a step's sequences come from one 32nd of the lengths. Within a
step, micro-batches have about equally many padded tokens: few long rows or many short ones.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config import UserError
from trainer.data.samples import Gather, Sample, Samples, SampleStream, split_documents
from trainer.data.shared_prompts import find_shared_keys, share_prompts
from trainer.data.step_count import steps_per_epoch
from trainer.data.vision import ImageInputs

if TYPE_CHECKING:
    from trainer.data.streams import MixedStream, PackedStream

IGNORED = -100  # torch's cross-entropy ignores these targets
# Long enough for the convolutions of recurrent models, short enough to cost nothing.
_DUMMY_LENGTH = 8


@dataclass(frozen=True)
class SequencePart:
    """The part of every sequence that this rank computes (`parallel.sequence`): number `rank` of `size` equal parts."""

    rank: int
    size: int
    group: Any = None
    """Process group of the ranks that share a sequence."""

    def cut(self, batch: "MicroBatch") -> "MicroBatch":
        """Return this rank's part of a flat batch [1, T], T a multiple of `size`.

        Targets were shifted before: the last token of a part has the first one of the next part as its target. The
        bounds of the documents remain those of the whole batch.
        """
        assert batch.position_ids is not None
        length = batch.input_ids.shape[1] // self.size
        first = self.rank * length
        before = replace(batch, targets=batch.targets[:, :first]).target_count
        part = replace(
            batch,
            input_ids=batch.input_ids[:, first : first + length],
            targets=batch.targets[:, first : first + length],
            tokens=min(max(batch.tokens - first, 0), length),
            position_ids=batch.position_ids[:, first : first + length],
            sequence=self,
            targets_before=before,
        )
        if batch.weights is None:
            return part
        return replace(part, weights=batch.weights[before : before + part.target_count])


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward pass of one rank: tensors on the host, int64 [B, L] unless stated otherwise.

    Without packing, `attention_mask` marks the padding, which is on the right. Packs have `position_ids` instead. Flat
    packs, which hold all documents in one row [1, T] without padding, also have the bounds of the documents.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    """`targets[t] = input_ids[t + 1]` if token t + 1 is trained and in the same document, else IGNORED."""
    tokens: int
    """Tokens without padding and without rows added to fill the step."""
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    """Positions from 0 in every document; padding counts as a separate document."""
    unpadded: torch.Tensor | None = None
    """0 at the padding of packs in several rows, else 1. Models do not get it, since it would join documents."""
    cu_seqlens: torch.Tensor | None = None
    """Bounds of the documents, int32 [D + 1]."""
    max_seqlen: int = 0
    """Length of the longest document if there are `cu_seqlens`."""
    weights: torch.Tensor | None = None
    """Weights of the targets in the order of their rows, fp32 [K]; None if all are 1."""
    shared_keys: dict[str, Any] = field(default_factory=dict)
    """Result of `find_shared_keys` for documents that share a prompt."""
    sequence: SequencePart | None = None
    """Which part of a flat batch this is, if ranks share it; `cu_seqlens` are then the bounds in the whole batch."""
    targets_before: int = 0
    """Targets of the whole batch before this part."""
    images: dict[str, Any] = field(default_factory=dict)
    """Inputs of the model for the images, with positions if the model has them in three dimensions."""

    @property
    def target_count(self) -> int:
        """Number of tokens with a loss."""
        return int((self.targets != IGNORED).sum())

    @property
    def target_weight(self) -> float:
        """Sum of the targets' weights."""
        return self.target_count if self.weights is None else float(self.weights.double().sum())


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """A micro-batch of pairs: documents 2 i and 2 i + 1, in order of rows, are the answers chosen and rejected."""

    document_targets: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Number of targets of each document, int64 [D]; empty without a pair."""
    reference: torch.Tensor | None = None
    """`Sample.reference` of the documents, fp32 [D]; None if it is not cached."""
    margins: torch.Tensor | None = None
    """`Sample.margins` of the pairs, fp32 [D / 2]; None without a pair."""

    @property
    def target_count(self) -> int:
        """Number of pairs; one that several ranks share counts once."""
        return len(self.document_targets) // 2 if self.sequence is None or self.sequence.rank == 0 else 0

    @property
    def target_weight(self) -> float:
        """Number of pairs, which all count the same."""
        return self.target_count


class GlobalBatches:
    """The split of global batches of G = batch_size * accumulation * world_size samples over ranks and micro-steps.

    Sample j of a global batch belongs to micro-step j // (batch_size * world_size) of rank (j // batch_size) %
    world_size, so that (1 rank, 4 micro-steps) and (2 ranks, 2 micro-steps) train on the same samples in the same step.
    """

    def __init__(self, *, batch_size: int, accumulation: int, rank: int, world_size: int) -> None:
        self.batch_size, self.accumulation = batch_size, accumulation
        self.rank, self.world_size = rank, world_size

    @property
    def global_batch_size(self) -> int:
        """Samples in a global batch, G."""
        return self.batch_size * self.accumulation * self.world_size

    def parts(self) -> list[slice]:
        """Slices of a global batch that this rank takes, one per micro-step."""
        stride = self.batch_size * self.world_size
        firsts = [step * stride + self.rank * self.batch_size for step in range(self.accumulation)]
        return [slice(first, first + self.batch_size) for first in firsts]


class Batches(GlobalBatches):
    """This rank's part of every global batch; the order of an epoch only depends on the seed and the epoch.

    `by_tokens` is described above; `layout` are arguments of `collate`.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        by_tokens: bool = False,
        **layout: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, accumulation=accumulation, rank=rank, world_size=world_size)
        self.samples = samples
        self._lengths = samples.lengths()[0] if by_tokens else None
        self.seed, self.shuffle = seed, shuffle
        self._layout = {"packed": samples.packed, **layout}
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of an epoch, over all ranks."""
        return len(self.samples)

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps of an epoch; the last may be incomplete."""
        return steps_per_epoch(len(self.samples), self.global_batch_size)

    def step_batches(self, epoch: int, offset: int) -> tuple[list[MicroBatch], int]:
        """Return this rank's micro-batches of the step `offset` samples into the epoch, and the samples of all ranks.

        The last step of an epoch takes the remaining samples. A micro-step without a sample for this rank gets a row
        without targets, so that every rank runs the same number of micro-steps.
        """
        taken = self.order(epoch)[offset : offset + self.global_batch_size]
        if self._lengths is None:
            parts = [taken[part] for part in self.parts()]
        else:
            cut = like_tokens(self._lengths[taken], self.accumulation * self.world_size)
            parts = [taken[part] for part in cut[self.rank :: self.world_size]]
        rows = [[self.samples[index] for index in part.tolist()] for part in parts]
        return [collate(part, **self._layout) for part in rows], len(taken)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the epoch's permutation of the samples."""
        if self._order is None or self._order[0] != epoch:
            count = len(self.samples)
            generator = np.random.default_rng([self.seed, epoch])
            order = generator.permutation(count) if self.shuffle else np.arange(count)
            if self._lengths is not None:
                order = like_lengths_together(order, self._lengths, self.global_batch_size, generator)
            self._order = epoch, order
        return self._order[1]


class StreamBatches(GlobalBatches):
    """Global batches from a stream: every rank reads all samples and keeps its own.

    A stream that ends starts again as the next epoch. Consecutive steps continue the stream. A repeated step, or one
    after `load_state_dict`, starts at its state; any other offset reads up to it. With `gather`, the ranks tokenize for
    each other. `layout` are arguments of `collate`.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        batch_size: int,
        accumulation: int,
        rank: int,
        world_size: int,
        gather: Gather | None = None,
        **layout: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, accumulation=accumulation, rank=rank, world_size=world_size)
        self.stream, self._gather = stream, gather
        self._layout = {"packed": stream.packed, **layout}
        self._position = -1
        self._epoch = 0
        self._in_epoch = 0  # samples of this epoch
        self._samples: MixedStream | PackedStream | None = None
        self._rest: Iterator[Sample] = iter(())
        self._state: dict[str, Any] = {}  # before the last step
        self._skipped: dict[str, int] = {}  # records per source, in earlier epochs

    @property
    def samples_per_epoch(self) -> None:
        """None: a stream is one endless epoch."""

    def step_batches(self, epoch: int, offset: int) -> tuple[list[MicroBatch], int]:
        """Return this rank's micro-batches after `offset` samples of the stream; `epoch` is ignored.

        Raises UserError if the data cannot be read or is exhausted; the state is then that before the step.
        """
        try:
            if offset != self._position:
                self._go_to(offset)
            self._state = self.state_dict()
            taken = self._take(self.global_batch_size)
        except UserError:
            self._samples, self._position = None, -1
            raise
        parts = [taken[part] for part in self.parts()]
        return [collate(part, **self._layout) for part in parts], len(taken)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream after the last step, as plain values."""
        if self._samples is None:  # nothing was read since the run resumed
            return self._state
        return {
            "offset": self._position,
            "epoch": self._epoch,
            "in_epoch": self._in_epoch,
            "skipped": self._skipped,
            "samples": self._samples.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the step at the state's offset start there; nothing is read yet."""
        self._state = state
        self._position = -1

    def _go_to(self, offset: int) -> None:
        known = self._state
        if known.get("offset") != offset:
            self._position, self._skipped = 0, {}
            self._start(0, None)
            self._take(offset)
            return
        self._position = offset
        self._start(int(known["epoch"]), known["samples"])
        self._in_epoch = int(known["in_epoch"])
        self._skipped = known.get("skipped", {})

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped records per source so far."""
        if self._samples is None:
            return self._skipped
        return {source: self._skipped.get(source, 0) + count for source, count in self._samples.skipped.items()}

    def _start(self, epoch: int, state: dict[str, Any] | None) -> None:
        self._epoch, self._in_epoch = epoch, 0
        self._samples = self.stream.read(epoch, state, self.rank, self._gather)
        self._rest = iter(self._samples)

    def _take(self, count: int) -> list[Sample]:
        """Return the next samples, across the ends of epochs."""
        taken: list[Sample] = []
        while len(taken) < count:
            sample = next(self._rest, None)
            if sample is not None:
                taken.append(sample)
                self._in_epoch += 1
            elif self._in_epoch:
                self._skipped = self.skipped
                self._start(self._epoch + 1, None)
            else:
                raise UserError("dataset.streaming=true: the stream holds nothing to train on; see `zerolora inspect`")
        self._position += count
        return taken


def evaluation_batches(
    samples: Samples, *, batch_size: int, rank: int, world_size: int, **layout: Any
) -> Iterator[MicroBatch]:
    """Yield this rank's batches of one pass in order; rows without targets make their number equal on all ranks."""
    for start in range(0, len(samples), batch_size * world_size):
        first = start + rank * batch_size
        rows = [samples[index] for index in range(first, min(first + batch_size, len(samples)))]
        yield collate(rows, packed=samples.packed, **layout)


def collate(
    samples: Sequence[Sample],
    pad_token_id: int,
    *,
    packed: bool,
    flat: bool,
    pairs: bool = False,
    shared: bool = False,
    sequence: SequencePart | None = None,
    images: ImageInputs | None = None,
) -> MicroBatch:
    """Return samples as tensors, padded to the longest or `flat` in one row; no samples make a row without targets.

    With `pairs`, the samples are of preference data; without packing each document gets a row. If `shared`, the prompt
    of a pair is in one of its documents only, and the batch is flat. `sequence` cuts a flat
    batch, after padding it with a document.
    """
    if pairs:
        documents = [document for sample in samples for document in split_documents(sample)]
        if shared:
            batch = _collate_shared(documents, pad_token_id)
        else:
            rows = samples if packed else documents
            batch = collate(rows, pad_token_id, packed=packed, flat=flat, sequence=sequence, images=images)
        if sequence is not None:  # labels of answers, which every rank needs
            batch = replace(batch, weights=_weights(documents, list(map(_targets, documents))))
        counts = torch.tensor(
            [sum(weight > 0 for weight in document.trained[1:]) for document in documents], dtype=torch.long
        )
        given = {name: [value for one in samples for value in getattr(one, name)] for name in ("reference", "margins")}
        known: dict[str, Any] = {name: torch.tensor(values) for name, values in given.items() if values}
        return PairBatch(**vars(batch), document_targets=counts, **known)
    tokens = sum(len(sample.input_ids) for sample in samples)
    if images is not None:
        rows = images.fill(samples)
        batch = collate(rows, pad_token_id, packed=packed, flat=flat)
        return replace(batch, tokens=tokens, images=images.build(batch.input_ids, batch.position_ids, rows))
    rows = list(samples) or [Sample([pad_token_id] * _DUMMY_LENGTH, [False] * _DUMMY_LENGTH, [_DUMMY_LENGTH])]
    if sequence is not None and (short := -sum(len(row.input_ids) for row in rows) % sequence.size):
        rows.append(Sample([pad_token_id] * short, [False] * short, [short]))
    found = [_targets(row) for row in rows]
    weights = _weights(rows, found)
    if flat:
        batch = _join_rows(rows, found, tokens, weights)
        return batch if sequence is None else sequence.cut(batch)
    longest = max(len(row.input_ids) for row in rows)
    input_ids = np.full((len(rows), longest), pad_token_id, dtype=np.int64)
    targets = np.full((len(rows), longest), IGNORED, dtype=np.int64)
    extra = np.zeros((len(rows), longest), dtype=np.int64)
    for index, row in enumerate(rows):
        length = len(row.input_ids)
        input_ids[index, :length] = row.input_ids
        targets[index, :length] = found[index]
        extra[index] = _positions([*row.document_lengths, longest - length]) if packed else np.arange(longest) < length
    batch = MicroBatch(torch.from_numpy(input_ids), torch.from_numpy(targets), tokens, weights=weights)
    extra_BL = torch.from_numpy(extra)
    if not packed:
        return replace(batch, attention_mask=extra_BL)
    widths = torch.tensor([len(row.input_ids) for row in rows])
    return replace(batch, position_ids=extra_BL, unpadded=(torch.arange(longest) < widths[:, None]).long())


def merge_batches(batches: Sequence[MicroBatch], pad_token_id: int) -> MicroBatch:
    """Return the rows of several micro-batches of the same layout as one, in order."""
    is_flat = batches[0].cu_seqlens is not None
    longest = max(batch.input_ids.shape[1] for batch in batches)
    padding = {"input_ids": pad_token_id, "targets": IGNORED, "attention_mask": 0, "position_ids": 0, "unpadded": 0}
    parts: dict[str, Any] = {"tokens": sum(batch.tokens for batch in batches)}
    for name, value in padding.items():
        rows = [getattr(batch, name) for batch in batches]
        if rows[0] is not None and not is_flat:
            rows = [torch.nn.functional.pad(each, (0, longest - each.shape[1]), value=value) for each in rows]
        if rows[0] is not None:
            parts[name] = torch.cat(rows, dim=1 if is_flat else 0)
    if is_flat:
        lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches if batch.cu_seqlens is not None])
        parts["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        parts["max_seqlen"] = max(batch.max_seqlen for batch in batches)
    if any(batch.weights is not None for batch in batches):
        given = [torch.ones(batch.target_count) if batch.weights is None else batch.weights for batch in batches]
        parts["weights"] = torch.cat(given)
    return MicroBatch(**parts)


def _join_rows(
    rows: Sequence[Sample], targets: Sequence[NDArray[np.int64]], tokens: int, weights: torch.Tensor | None
) -> MicroBatch:
    lengths = [length for row in rows for length in row.document_lengths]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return MicroBatch(
        torch.tensor([[token for row in rows for token in row.input_ids]]),
        torch.from_numpy(np.concatenate(targets)[None]),
        tokens,
        position_ids=torch.from_numpy(_positions(lengths)[None]),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(lengths),
        weights=weights,
    )


def _collate_shared(documents: Sequence[Sample], pad_token_id: int) -> MicroBatch:
    """Return the documents of pairs as a flat batch in which each prompt is computed once."""
    shortened, shared = share_prompts(documents)
    batch = collate(shortened, pad_token_id, packed=True, flat=True)
    if not any(shared):
        return batch
    lengths = [len(document.input_ids) for document in shortened]
    assert batch.position_ids is not None
    positions = batch.position_ids + torch.tensor(shared).repeat_interleave(torch.tensor(lengths))
    return replace(batch, position_ids=positions, shared_keys=find_shared_keys(lengths, shared))


def _targets(sample: Sample) -> NDArray[np.int64]:
    ids = np.asarray(sample.input_ids, dtype=np.int64)
    targets = np.full(len(ids), IGNORED, dtype=np.int64)
    targets[:-1] = np.where(np.asarray(sample.trained[1:]) > 0, ids[1:], IGNORED)
    # The first token of a document is no target: in a pack, the token before it belongs to another document.
    targets[np.cumsum(sample.document_lengths) - 1] = IGNORED
    return targets


def _weights(rows: Sequence[Sample], targets: Sequence[NDArray[np.int64]]) -> torch.Tensor | None:
    """Return the weights of the targets of all rows, fp32; None if all are 1."""
    extra_BL = [np.flatnonzero(row_targets != IGNORED) + 1 for row_targets in targets]
    parts = [np.asarray(row.trained, dtype=np.float32)[at] for row, at in zip(rows, extra_BL, strict=True)]
    weights = np.concatenate(parts)
    return torch.from_numpy(weights) if (weights != 1.0).any() else None


def _positions(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])


Index = NDArray[np.int64]
WINDOW = 32
"""Number of global batches sorted together."""


def like_lengths_together(order: Index, lengths: Index, global_batch: int, generator: np.random.Generator) -> Index:
    """Return an epoch's order with samples of similar lengths in each global batch; an incomplete batch stays last."""
    windows = []
    for start in range(0, len(order), WINDOW * global_batch):
        window = order[start : start + WINDOW * global_batch]
        whole = len(window) - len(window) % global_batch
        window = window[np.argsort(-lengths[window], kind="stable")]
        # The shortest remain for the incomplete last batch.
        batches = window[:whole].reshape(-1, global_batch)
        windows += [*generator.permutation(batches), window[whole:]]
    return np.concatenate(windows) if windows else order


def like_tokens(lengths: Index, count: int) -> list[Index]:
    """Return the positions of a step's samples for each of `count` micro-batches, with padded tokens balanced.

    No micro-batch has more padded tokens than with equally many rows each; some are empty if there are few samples.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    longest, most = int(descending[0]), int(descending[0]) * -(-len(order) // count)
    # The least limit with which `count` micro-batches hold all samples.
    least = bisect_left(range(most), -count, lo=longest, key=lambda limit: -len(_bounds(descending, limit)))
    bounds = _bounds(descending, least)
    bounds += [len(order)] * (count - len(bounds))
    return [order[start:end] for start, end in zip([0, *bounds[:-1]], bounds, strict=True)]


def _bounds(descending: Index, most: int) -> list[int]:
    """Return the ends of micro-batches of at most `most` padded tokens, filled one after the other."""
    bounds, start = [], 0
    while start < len(descending):
        start = min(len(descending), start + max(1, most // int(descending[start])))
        bounds.append(start)
    return bounds
