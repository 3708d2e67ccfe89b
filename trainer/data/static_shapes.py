"""Micro-batches of few shapes: padded to sizes for which a captured graph can be replayed.

B rows, L tokens per row, D documents of a flat pack, K positions per row with an output head.
"""

from dataclasses import dataclass, replace

import torch

from trainer.data.batches import IGNORED, MicroBatch

PARTS = 16
"""Padding adds at most 1 / PARTS of the length."""
HEAD_PARTS = 8
"""The head is computed at a multiple of one part in HEAD_PARTS of the tokens."""
LEAST_DOCUMENTS = 4


@dataclass(frozen=True)
class StaticShape:
    """Sizes to which a batch is padded."""

    rows: int
    """Rows, B."""
    length: int
    """Tokens per row, L."""
    targets: int
    """Positions per row with an output head, K."""
    packed: bool = False
    documents: int = 0
    """Documents, D, if the batch has their bounds."""
    longest: int = 0
    """Upper bound of the documents' lengths, if there are bounds."""

    def holds(self, other: "StaticShape") -> bool:
        """Return whether a batch of the other shape may be padded to this one."""
        if (self.rows, self.length, self.packed) != (other.rows, other.length, other.packed):
            return False
        if self.is_even or other.is_even:
            return (self.documents, self.longest) == (
                other.documents,
                other.longest,
            ) and self.targets >= other.targets
        return self.targets >= other.targets and self.documents >= other.documents and self.longest >= other.longest

    @property
    def is_even(self) -> bool:
        """Return whether documents of equal length fill the row, so that attention can compute them as a batch."""
        return self.documents * self.longest == self.rows * self.length


def rounded_up(count: int) -> int:
    """Round up to a multiple of the power of two below `count` over PARTS: adds at most one part in PARTS."""
    unit = max(1, (1 << count.bit_length() - 1) // PARTS)
    return -(-count // unit) * unit


def sizes_of(batch: MicroBatch) -> tuple[int, int]:
    """Return L and K of an unpadded batch."""
    return batch.input_ids.shape[1], max(1, int((batch.targets != IGNORED).any(0).sum()))


def shape_of(batch: MicroBatch, usual: tuple[int, int] = (0, 0)) -> StaticShape:
    """Return the shape to which a batch is padded; a batch of one of the `usual` sizes is not padded."""
    rows, (own, wanted) = len(batch.input_ids), sizes_of(batch)
    length = own if own == usual[0] else rounded_up(own)
    unit = max(1, length // HEAD_PARTS)
    targets = wanted if (own, wanted) == usual else min(length, -(-wanted // unit) * unit)
    if batch.cu_seqlens is None:
        return StaticShape(rows, length, targets, packed=batch.position_ids is not None)
    documents = len(batch.cu_seqlens) - 1
    if documents * batch.max_seqlen == own == length:
        return StaticShape(rows, length, targets, True, documents, batch.max_seqlen)
    bounds = max(LEAST_DOCUMENTS, 1 << documents.bit_length())  # one more at least, for the padding
    longest = 1 << (max(batch.max_seqlen, length - own) - 1).bit_length()
    # Documents that only seem to be of one length would be computed as if they were.
    return StaticShape(rows, length, targets, True, bounds, longest + (bounds * longest == length))


def pad_to_shape(batch: MicroBatch, shape: StaticShape, pad_token_id: int = 0) -> MicroBatch:
    """Return the batch padded to a shape, with the same losses and gradients.

    The padding on the right is a separate document without targets; added documents have no tokens.
    """
    added = shape.length - batch.input_ids.shape[1]
    more = torch.zeros(shape.rows, added, dtype=batch.input_ids.dtype)
    positions, bounds = batch.position_ids, batch.cu_seqlens
    if positions is not None:
        # Not beyond the documents' positions: learned positions may end there.
        more_positions = torch.arange(added) % (batch.max_seqlen or batch.input_ids.shape[1])
        positions = torch.cat([positions, more_positions.expand(shape.rows, -1)], 1)
    if bounds is not None:
        missing = shape.documents + 1 - len(bounds)
        bounds = torch.cat([bounds, bounds.new_full((missing,), shape.length)])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, more + pad_token_id], 1),
        targets=torch.cat([batch.targets, more + IGNORED], 1),
        attention_mask=None,
        position_ids=positions,
        cu_seqlens=bounds,
        max_seqlen=shape.longest or batch.max_seqlen,
    )
