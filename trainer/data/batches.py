"""Micro-batches for optimizer steps: the same global batches in the same order on any number of ranks.

Shapes: B sequences per micro-batch, L tokens in the longest sequence, D documents.

With `dataset.batching: tokens`, the sequences in a step have similar lengths: an epoch's order is cut into windows of
32 global batches, each window is sorted by length, and its batches are shuffled. Within a step, all micro-batches have
about the same number of padded tokens: a few long rows or many short ones.
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
from trainer.data.shared_prompts import build_shared_key_arguments, share_prompts
from trainer.data.vision import ImageInputs

if TYPE_CHECKING:
    from trainer.data.streams import MixedStream, PackedStream

IGNORE_INDEX = -100  # torch's cross-entropy ignores these targets
_PAIR_FIELDS = ("reference", "margins")
# Long enough for the convolutions in recurrent models, and short enough to be cheap.
_DUMMY_LENGTH = 8


@dataclass(frozen=True)
class SequencePart:
    """Identifies this rank's part of each sequence: part `rank` of `size` equal parts (`parallel.sequence`)."""

    rank: int
    size: int
    group: Any = None
    """Process group of the ranks that share a sequence."""

    def slice_batch(self, batch: "MicroBatch") -> "MicroBatch":
        """Return this rank's part of a flat batch [1, T], where T is a multiple of `size`.

        Targets are already shifted, so the target of a part's last token is the first token of the next part. The
        document bounds still refer to the complete batch.
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
    """Inputs for one forward pass on a rank: host tensors, int64 [B, L] unless stated otherwise.

    Without packing, `attention_mask` is 0 at padding, which is on the right. Packs have `position_ids` instead. Flat
    packs, which have all documents in one row [1, T] without padding, also have document bounds.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    """`targets[t] = input_ids[t + 1]` if token t + 1 is trained and in the same document, else IGNORE_INDEX."""
    tokens: int
    """Number of tokens, excluding padding and rows added to fill the step."""
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    """Positions, which start at 0 in every document; padding counts as a separate document."""
    unpadded: torch.Tensor | None = None
    """For packs in several rows: 0 at padding, otherwise 1. Not passed to models, where it would merge documents."""
    cu_seqlens: torch.Tensor | None = None
    """Document bounds: 0 and the cumulative lengths, int32 [D + 1]."""
    max_seqlen: int = 0
    """Length of the longest document; 0 without `cu_seqlens`."""
    weights: torch.Tensor | None = None
    """Loss weights of the K targets, row by row, fp32 [K]; None if all are 1."""
    shared_keys: dict[str, Any] = field(default_factory=dict)
    """Result of `build_shared_key_arguments` for documents that share a prompt."""
    sequence: SequencePart | None = None
    """This rank's part of a flat batch shared by several ranks; `cu_seqlens` then covers the whole batch."""
    targets_before: int = 0
    """Number of targets in the whole batch before this part."""
    images: dict[str, Any] = field(default_factory=dict)
    """Model inputs for the images, including 3D positions if the model uses them."""

    @property
    def target_count(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())

    @property
    def target_weight(self) -> float:
        return self.target_count if self.weights is None else float(self.weights.double().sum())


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """A micro-batch of pairs: documents 2i and 2i + 1, counted row by row, are a chosen and a rejected answer."""

    document_targets: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Number of targets in each document, int64 [D]; empty without pairs."""
    reference: torch.Tensor | None = None
    """`Sample.reference` for each document, fp32 [D]; None if not cached."""
    margins: torch.Tensor | None = None
    """`Sample.margins` for each pair, fp32 [D / 2]; None without pairs."""

    @property
    def target_count(self) -> int:
        """Number of pairs, or 0 on all but the first rank of a shared sequence, so that a sum counts pairs once."""
        return len(self.document_targets) // 2 if self.sequence is None or self.sequence.rank == 0 else 0

    @property
    def target_weight(self) -> float:
        """Number of pairs, since each pair has weight 1."""
        return self.target_count


class GlobalBatches:
    """Splits global batches of batch_size * accumulation * world_size samples across ranks and micro-steps.

    Sample j of a global batch belongs to micro-step j // (batch_size * world_size) on rank (j // batch_size) %
    world_size, so a step with (1 rank, 4 micro-steps) trains on the same samples as one with (2 ranks, 2 micro-steps).
    """

    def __init__(self, *, batch_size: int, accumulation: int, rank: int, world_size: int) -> None:
        self.batch_size, self.accumulation = batch_size, accumulation
        self.rank, self.world_size = rank, world_size

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.accumulation * self.world_size

    def list_rank_slices(self) -> list[slice]:
        """Return this rank's slices of a global batch, one per micro-step."""
        stride = self.batch_size * self.world_size
        firsts = [step * stride + self.rank * self.batch_size for step in range(self.accumulation)]
        return [slice(first, first + self.batch_size) for first in firsts]


class Batches(GlobalBatches):
    """Provides this rank's part of every global batch. The order of an epoch depends only on the seed and the epoch.

    `by_tokens` selects `dataset.batching: tokens`; `collate_options` is passed to `collate_samples`.
    """

    def __init__(
        self, samples: Samples, *, batch_size: int, accumulation: int, rank: int, world_size: int, seed: int,
        shuffle: bool, by_tokens: bool = False, **collate_options: Any,
    ) -> None:  # fmt: skip
        super().__init__(batch_size=batch_size, accumulation=accumulation, rank=rank, world_size=world_size)
        self.samples = samples
        self._lengths = samples.count_tokens()[0] if by_tokens else None
        self.seed, self.shuffle = seed, shuffle
        self._collate_options = {"packed": samples.packed, **collate_options}
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def samples_per_epoch(self) -> int:
        return len(self.samples)

    def build_step_batches(self, epoch: int, offset: int) -> tuple[list[MicroBatch], int]:
        """Return this rank's micro-batches for the step starting at `offset`, and its sample count across all ranks.

        The last step in an epoch has only the remaining samples. A micro-step with no sample for this rank has one row
        without targets, so that every rank runs the same number of micro-steps.
        """
        selected = self.get_order(epoch)[offset : offset + self.global_batch_size]
        if self._lengths is None:
            micro_batches = [selected[part] for part in self.list_rank_slices()]
        else:
            parts = balance_tokens(self._lengths[selected], self.accumulation * self.world_size)
            micro_batches = [selected[part] for part in parts[self.rank :: self.world_size]]
        rows = [[self.samples[index] for index in indices.tolist()] for indices in micro_batches]
        return [collate_samples(part, **self._collate_options) for part in rows], len(selected)

    def get_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            count = len(self.samples)
            generator = np.random.default_rng([self.seed, epoch])
            order = generator.permutation(count) if self.shuffle else np.arange(count)
            if self._lengths is not None:
                order = group_similar_lengths(order, self._lengths, self.global_batch_size, generator)
            self._order = epoch, order
        return self._order[1]


class StreamBatches(GlobalBatches):
    """Provides this rank's part of global batches from a stream, which every rank reads completely.

    When the stream ends, it restarts as the next epoch. Consecutive steps continue the stream. A repeated step, or the
    first one after `load_state_dict`, starts from the saved state; for any other offset, the stream is read again from
    the beginning. With `gather`, tokenization is split across ranks. `collate_options` is passed to `collate_samples`.
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
        **collate_options: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, accumulation=accumulation, rank=rank, world_size=world_size)
        self.stream, self._gather = stream, gather
        self._collate_options = {"packed": stream.packed, **collate_options}
        self._position = -1
        self._epoch = 0
        self._samples_in_epoch = 0  # number of samples read so far in this epoch
        self._samples: MixedStream | PackedStream | None = None
        self._remaining: Iterator[Sample] = iter(())
        self._state: dict[str, Any] = {}  # state before the last step
        self._skipped: dict[str, int] = {}  # skipped records per source in earlier epochs

    @property
    def samples_per_epoch(self) -> None:
        """None, since a stream is one endless epoch."""

    def build_step_batches(self, epoch: int, offset: int) -> tuple[list[MicroBatch], int]:
        """Return this rank's micro-batches for the step starting at `offset`, and its sample count across all ranks.

        `epoch` is ignored. Raises UserError, and keeps the state from before the step, if the data cannot be read or
        has no samples.
        """
        try:
            if offset != self._position:
                self._seek(offset)
            self._state = self.state_dict()
            samples = self._read(self.global_batch_size)
        except UserError:
            self._samples, self._position = None, -1
            raise
        parts = [samples[part] for part in self.list_rank_slices()]
        return [collate_samples(part, **self._collate_options) for part in parts], len(samples)

    def state_dict(self) -> dict[str, Any]:
        if self._samples is None:  # nothing has been read since the run resumed
            return self._state
        return {
            "offset": self._position,
            "epoch": self._epoch,
            "in_epoch": self._samples_in_epoch,
            "skipped": self._skipped,
            "samples": self._samples.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the stream position. `build_step_batches` resumes there if its `offset` matches the state's."""
        self._state = state
        self._position = -1

    def _seek(self, offset: int) -> None:
        state = self._state
        if state.get("offset") != offset:
            self._position, self._skipped = 0, {}
            self._start(0, None)
            self._read(offset)
            return
        self._position = offset
        self._start(int(state["epoch"]), state["samples"])
        self._samples_in_epoch = int(state["in_epoch"])
        self._skipped = state.get("skipped", {})

    @property
    def skipped(self) -> dict[str, int]:
        if self._samples is None:
            return self._skipped
        return {source: self._skipped.get(source, 0) + count for source, count in self._samples.skipped.items()}

    def _start(self, epoch: int, state: dict[str, Any] | None) -> None:
        self._epoch, self._samples_in_epoch = epoch, 0
        self._samples = self.stream.read(epoch, state, self.rank, self._gather)
        self._remaining = iter(self._samples)

    def _read(self, count: int) -> list[Sample]:
        samples: list[Sample] = []
        while len(samples) < count:
            sample = next(self._remaining, None)
            if sample is not None:
                samples.append(sample)
                self._samples_in_epoch += 1
            elif self._samples_in_epoch:
                self._skipped = self.skipped
                self._start(self._epoch + 1, None)
            else:
                raise UserError(
                    "dataset.streaming=true: the stream has no record to train on; check it with `zerolora inspect`"
                )
        self._position += count
        return samples


def iterate_evaluation_batches(
    samples: Samples, *, batch_size: int, rank: int, world_size: int, **collate_options: Any
) -> Iterator[MicroBatch]:
    """Yield this rank's batches in order. All ranks yield the same number, so the last may have no targets."""
    for start in range(0, len(samples), batch_size * world_size):
        first = start + rank * batch_size
        rows = [samples[index] for index in range(first, min(first + batch_size, len(samples)))]
        yield collate_samples(rows, packed=samples.packed, **collate_options)


def collate_samples(
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
    """Collate samples into padded rows, or into one row without padding if `flat` is set.

    Without samples, the batch is a dummy row without targets. With `pairs`, the samples are preference data;
    unless they are packed, each document gets its own row. With `shared`, the batch is flat, and a pair's
    prompt occurs only before the chosen answer. With `sequence`, a flat batch is padded with an additional
    document and cut to this rank's part.
    """
    if pairs:
        documents = [document for sample in samples for document in split_documents(sample)]
        if shared:
            batch = _collate_shared(documents, pad_token_id)
        else:
            rows = samples if packed else documents
            batch = collate_samples(rows, pad_token_id, packed=packed, flat=flat, sequence=sequence, images=images)
        if sequence is not None:  # every rank needs the labels of all answers
            batch = replace(batch, weights=_collect_weights(documents, list(map(_build_targets, documents))))
        counts = [sum(weight > 0 for weight in document.loss_weights[1:]) for document in documents]
        fields = {name: [value for sample in samples for value in getattr(sample, name)] for name in _PAIR_FIELDS}
        tensors: dict[str, Any] = {name: torch.tensor(values) for name, values in fields.items() if values}
        return PairBatch(**vars(batch), document_targets=torch.tensor(counts, dtype=torch.long), **tensors)
    tokens = sum(len(sample.input_ids) for sample in samples)
    if images is not None:
        rows = samples if images.dummy is None or any(row.images for row in samples) else [*samples, images.dummy]
        batch = collate_samples(rows, pad_token_id, packed=packed, flat=flat)
        return replace(batch, tokens=tokens, images=images.build_inputs(batch.input_ids, batch.position_ids, rows))
    rows = list(samples) or [Sample([pad_token_id] * _DUMMY_LENGTH, [False] * _DUMMY_LENGTH, [_DUMMY_LENGTH])]
    if sequence is not None and (short := -sum(len(row.input_ids) for row in rows) % sequence.size):
        rows.append(Sample([pad_token_id] * short, [False] * short, [short]))
    row_targets = [_build_targets(row) for row in rows]
    weights = _collect_weights(rows, row_targets)
    if flat:
        batch = _join_rows(rows, row_targets, tokens, weights)
        return batch if sequence is None else sequence.slice_batch(batch)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    longest = int(lengths.max())
    input_ids = torch.full((len(rows), longest), pad_token_id)
    targets = torch.full((len(rows), longest), IGNORE_INDEX)
    for index, (row, ids) in enumerate(zip(rows, row_targets, strict=True)):
        input_ids[index, : len(ids)] = torch.tensor(row.input_ids)
        targets[index, : len(ids)] = torch.from_numpy(ids)
    batch = MicroBatch(input_ids, targets, tokens, weights=weights)
    unpadded = (torch.arange(longest) < lengths[:, None]).long()
    if not packed:
        return replace(batch, attention_mask=unpadded)
    positions = [_build_positions([*row.document_lengths, longest - len(row.input_ids)]) for row in rows]
    return replace(batch, position_ids=torch.from_numpy(np.stack(positions)), unpadded=unpadded)


def merge_batches(batches: Sequence[MicroBatch], pad_token_id: int) -> MicroBatch:
    is_flat = batches[0].cu_seqlens is not None
    longest = max(batch.input_ids.shape[1] for batch in batches)
    padding = {"input_ids": pad_token_id, "targets": IGNORE_INDEX}
    parts: dict[str, Any] = {"tokens": sum(batch.tokens for batch in batches)}
    for name in ("input_ids", "targets", "attention_mask", "position_ids", "unpadded"):
        rows, value = [getattr(batch, name) for batch in batches], padding.get(name, 0)
        if rows[0] is not None and not is_flat:
            rows = [torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=value) for row in rows]
        if rows[0] is not None:
            parts[name] = torch.cat(rows, dim=1 if is_flat else 0)
    if is_flat:
        lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches if batch.cu_seqlens is not None])
        parts["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        parts["max_seqlen"] = max(batch.max_seqlen for batch in batches)
    if any(batch.weights is not None for batch in batches):
        weights = [torch.ones(batch.target_count) if batch.weights is None else batch.weights for batch in batches]
        parts["weights"] = torch.cat(weights)
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
        position_ids=torch.from_numpy(_build_positions(lengths)[None]),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(lengths),
        weights=weights,
    )


def _collate_shared(documents: Sequence[Sample], pad_token_id: int) -> MicroBatch:
    """Collate the documents of preference pairs into a flat batch in which each prompt occurs once."""
    shortened, shared = share_prompts(documents)
    batch = collate_samples(shortened, pad_token_id, packed=True, flat=True)
    if not any(shared):
        return batch
    lengths = [len(document.input_ids) for document in shortened]
    assert batch.position_ids is not None
    positions = batch.position_ids + torch.tensor(shared).repeat_interleave(torch.tensor(lengths))
    return replace(batch, position_ids=positions, shared_keys=build_shared_key_arguments(lengths, shared))


def _build_targets(sample: Sample) -> NDArray[np.int64]:
    ids = np.asarray(sample.input_ids, dtype=np.int64)
    targets = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
    targets[:-1] = np.where(np.asarray(sample.loss_weights[1:]) > 0, ids[1:], IGNORE_INDEX)
    # The first token of a document is not a target: in a pack, the token before it belongs to another document.
    targets[np.cumsum(sample.document_lengths) - 1] = IGNORE_INDEX
    return targets


def _collect_weights(rows: Sequence[Sample], targets: Sequence[NDArray[np.int64]]) -> torch.Tensor | None:
    """Return the fp32 weights of all rows' targets; None if all weights are 1."""
    positions = [np.flatnonzero(row_targets != IGNORE_INDEX) + 1 for row_targets in targets]
    parts = [np.asarray(row.loss_weights, dtype=np.float32)[at] for row, at in zip(rows, positions, strict=True)]
    weights = np.concatenate(parts)
    return torch.from_numpy(weights) if (weights != 1.0).any() else None


def _build_positions(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])


IntArray = NDArray[np.int64]
SORT_WINDOW = 32
"""Number of global batches sorted together."""


def group_similar_lengths(
    order: IntArray, lengths: IntArray, global_batch: int, generator: np.random.Generator
) -> IntArray:
    """Reorder an epoch so that each global batch has samples of similar lengths. An incomplete batch stays last."""
    windows = []
    for start in range(0, len(order), SORT_WINDOW * global_batch):
        window = order[start : start + SORT_WINDOW * global_batch]
        end = len(window) - len(window) % global_batch
        window = window[np.argsort(-lengths[window], kind="stable")]
        # An incomplete last batch gets the shortest samples.
        windows += [*generator.permutation(window[:end].reshape(-1, global_batch)), window[end:]]
    return np.concatenate(windows) if windows else order


def balance_tokens(lengths: IntArray, count: int) -> list[IntArray]:
    """Split a step's samples into `count` micro-batches of similar padded size, and return the samples' positions.

    No micro-batch has more padded tokens than the largest one in an even split by rows. Some may be empty.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    longest = int(descending[0])
    limits = range(longest * -(-len(order) // count))
    # The smallest limit for which `count` micro-batches suffice.
    limit = bisect_left(limits, -count, lo=longest, key=lambda limit: -len(_fill_micro_batches(descending, limit)))
    ends = _fill_micro_batches(descending, limit)
    ends += [len(order)] * (count - len(ends))
    return [order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _fill_micro_batches(descending_lengths: IntArray, limit: int) -> list[int]:
    """Fill micro-batches in order with at most `limit` padded tokens each, and return their end indices."""
    ends, start = [], 0
    while start < len(descending_lengths):
        start = min(len(descending_lengths), start + max(1, limit // int(descending_lengths[start])))
        ends.append(start)
    return ends
