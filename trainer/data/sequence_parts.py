"""The part of a micro-batch that one rank computes if several ranks share its sequences (`parallel.sequence`)."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data.batches import MicroBatch


@dataclass(frozen=True)
class SequencePart:
    """The part of every sequence that this rank computes: number `rank` of `size` equal parts."""

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
