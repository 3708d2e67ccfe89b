"""Pad micro-batches to a few shapes, so that captured CUDA graphs can be replayed.

B rows, L tokens per row, D documents in a flat pack, K positions per row for the output head.
"""

from dataclasses import dataclass, replace

import torch

from trainer.data.batches import IGNORE_INDEX, MicroBatch

LENGTH_STEPS = 16
"""Padding adds at most 1 / LENGTH_STEPS of the length."""
HEAD_STEPS = 8
"""The number of positions per row for the output head is rounded up to a multiple of the length / HEAD_STEPS."""
MIN_DOCUMENTS = 4


@dataclass(frozen=True)
class StaticShape:
    """Sizes to which a batch is padded: B, L, K and, for flat packs, D."""

    rows: int
    length: int
    targets: int
    packed: bool = False
    documents: int = 0
    """Number of documents, D, if the batch has `cu_seqlens`."""
    longest: int = 0
    """Upper bound on the document lengths, if the batch has `cu_seqlens`."""

    def can_hold(self, other: "StaticShape") -> bool:
        if (self.rows, self.length, self.packed) != (other.rows, other.length, other.packed):
            return False
        if self.has_equal_documents or other.has_equal_documents:
            fits = (self.documents, self.longest) == (other.documents, other.longest)
        else:
            fits = self.documents >= other.documents and self.longest >= other.longest
        return fits and self.targets >= other.targets

    @property
    def has_equal_documents(self) -> bool:
        """Whether documents of equal length fill the row, so that attention can compute them as a batch."""
        return self.documents * self.longest == self.rows * self.length


def round_up(count: int) -> int:
    """Round `count` up to a multiple of 2^floor(log2 count) / LENGTH_STEPS, to limit the distinct values."""
    unit = max(1, (1 << count.bit_length() - 1) // LENGTH_STEPS)
    return -(-count // unit) * unit


def measure_sizes(batch: MicroBatch) -> tuple[int, int]:
    """Return the row length L and the number of head positions K of an unpadded batch."""
    return batch.input_ids.shape[1], max(1, int((batch.targets != IGNORE_INDEX).any(0).sum()))


def choose_shape(batch: MicroBatch, common_size: tuple[int, int] = (0, 0)) -> StaticShape:
    """Return the shape to which a batch should be padded; sizes equal to the `common_size` (L, K) are not padded."""
    rows, (unpadded_length, unpadded_targets) = len(batch.input_ids), measure_sizes(batch)
    length = unpadded_length if unpadded_length == common_size[0] else round_up(unpadded_length)
    unit = max(1, length // HEAD_STEPS)
    targets = min(length, -(-unpadded_targets // unit) * unit)
    if (unpadded_length, unpadded_targets) == common_size:
        targets = unpadded_targets
    if batch.cu_seqlens is None:
        return StaticShape(rows, length, targets, packed=batch.position_ids is not None)
    documents = len(batch.cu_seqlens) - 1
    if documents * batch.max_seqlen == unpadded_length == length:
        return StaticShape(rows, length, targets, True, documents, batch.max_seqlen)
    bounds = max(MIN_DOCUMENTS, 1 << documents.bit_length())  # at least one more document, for the padding
    longest = 1 << (max(batch.max_seqlen, length - unpadded_length) - 1).bit_length()
    # The shape must not be `has_equal_documents`: its documents have different lengths.
    return StaticShape(rows, length, targets, True, bounds, longest + (bounds * longest == length))


def pad_to_shape(batch: MicroBatch, shape: StaticShape, pad_token_id: int = 0) -> MicroBatch:
    """Return the batch padded to a shape, with the same losses and gradients.

    The padding on the right is a separate document without targets; added documents have no tokens.
    """
    added = shape.length - batch.input_ids.shape[1]
    more = torch.zeros(shape.rows, added, dtype=batch.input_ids.dtype)
    positions, bounds = batch.position_ids, batch.cu_seqlens
    if positions is not None:
        # Padding repeats positions from 0, since a table of learned positions may have no later ones.
        more_positions = torch.arange(added) % (batch.max_seqlen or batch.input_ids.shape[1])
        positions = torch.cat([positions, more_positions.expand(shape.rows, -1)], 1)
    if bounds is not None:
        missing = shape.documents + 1 - len(bounds)
        bounds = torch.cat([bounds, bounds.new_full((missing,), shape.length)])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, more + pad_token_id], 1),
        targets=torch.cat([batch.targets, more + IGNORE_INDEX], 1),
        attention_mask=None,
        position_ids=positions,
        cu_seqlens=bounds,
        max_seqlen=shape.longest or batch.max_seqlen,
    )
