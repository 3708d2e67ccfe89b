"""K = mean KL(adapted || base) in bits per token on reference text, with its gradient.

    penalty = lambda K, in nats per token like the loss; independent of sigma and N

The reference documents for a step depend only on the step number, so they are the same after a resume. Each rank uses
its own rows, and computes the token count of all ranks without communication.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.data.batches import MicroBatch, collate_samples
from trainer.data.samples import Sample
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.patches.loss_head import TokenLoss, to_device


@dataclass(frozen=True, kw_only=True)
class ReferenceDocuments:
    """Reference documents, shuffled with `seed` for each pass; every rank uses `rows` of them per step."""

    documents: Sequence[Sample]
    rows: int
    rank: int
    world_size: int
    seed: int
    pad_token_id: int
    packed: bool
    flat: bool

    def select(self, step: int) -> list[int]:
        """Return the indices of this rank's documents for optimizer step `step` (1-based)."""
        return self._select_all_ranks(step)[self.rank * self.rows : (self.rank + 1) * self.rows]

    def build_batch(self, indices: Sequence[int]) -> MicroBatch:
        chosen = [self.documents[index] for index in indices]
        return collate_samples(chosen, self.pad_token_id, packed=self.packed, flat=self.flat)

    def count_tokens(self, step: int) -> int:
        """Return the number of positions at which a step compares the adapted and the base model, on all ranks."""
        return sum(len(self.documents[index].input_ids) - 1 for index in self._select_all_ranks(step))

    def _select_all_ranks(self, step: int) -> list[int]:
        rows_per_step, count = self.rows * self.world_size, len(self.documents)
        positions = range((step - 1) * rows_per_step, step * rows_per_step)
        passes = {position // count for position in positions}
        orders = {index: np.random.default_rng([self.seed, index]).permutation(count) for index in passes}
        return [int(orders[position // count][position % count]) for position in positions]


def cache_base_states(engine: Engine, token_loss: TokenLoss, reference: ReferenceDocuments) -> list[Tensor] | None:
    """Return the base model's last hidden states [T - 1, H] for each document, in host memory; a collective call.

    Returns None if the loss is not computed in chunks from hidden states.
    """
    model, states = engine.module, list[Tensor]()
    was_training = model.training
    model.eval()
    for begin in range(0, len(reference.documents), reference.rows):
        chosen = range(begin, min(begin + reference.rows, len(reference.documents)))
        batch = reference.build_batch(chosen)
        if not token_loss.computes_in_chunks(batch, engine.device):
            break
        hidden = token_loss.compute_base_states(engine, batch, engine.device)
        lengths = [len(reference.documents[index].input_ids) - 1 for index in chosen]
        states += (part.clone() for part in hidden.cpu().split(lengths))
    model.train(was_training)
    return states or None


class Divergence:
    """Measures K, the KL divergence of the trained model from its base model, on a few reference documents per step."""

    def __init__(
        self,
        engine: Engine,
        token_loss: TokenLoss,
        reference: ReferenceDocuments,
        *,
        base_states: list[Tensor] | None = None,
    ) -> None:
        """Prepare the measurement; with `base_states`, no step needs a forward pass of the base model."""
        self._base_states = base_states
        self._engine, self._token_loss, self.reference = engine, token_loss, reference
        self.local_sum: Tensor | None = None
        """This rank's KL sum of the latest step (fp64, in nats)."""
        self.held_out: Divergence | None = None
        """Measures K on texts that no step uses, for scu.scale_to_target."""

    def compute_penalty(self, step: int, lambda_: float) -> Tensor:
        """Return this rank's lambda K in nats per token; the penalty is the mean over ranks. A collective call.

        While lambda is 0, K is measured without a gradient.
        """
        selected = self.reference.select(step)
        sum_local = self._token_loss.compute_divergence(
            self._engine,
            self.reference.build_batch(selected),
            self._engine.device,
            base_states=self._get_base_states(selected),
            with_gradient=lambda_ > 0,
        )
        self.local_sum = sum_local.detach().double()
        if lambda_ == 0:
            return torch.zeros_like(sum_local)
        return sum_local * (lambda_ * self.reference.world_size / self.reference.count_tokens(step))

    def measure_all(self) -> float:
        """Return K over all documents in bits per token; some are repeated to fill the last step. A collective call."""
        total = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        count = math.ceil(len(self.reference.documents) / (self.reference.rows * self.reference.world_size))
        for step in range(1, count + 1):
            self.compute_penalty(step, 0.0)
            assert self.local_sum is not None
            total += self.local_sum
        return sum_over_ranks(total).item() / sum(map(self.reference.count_tokens, range(1, count + 1))) / math.log(2.0)

    def _get_base_states(self, indices: Sequence[int]) -> Tensor:
        if self._base_states is not None:
            return to_device(torch.cat([self._base_states[index] for index in indices]), self._engine.device)
        batch = self.reference.build_batch(indices)
        return self._token_loss.compute_base_states(self._engine, batch, self._engine.device)

    def compute_bits(self, step: int, sum_global: float) -> float:
        """Convert a step's KL sum over all ranks (nats) to K in bits per token; a negative rounding error becomes 0."""
        return max(0.0, sum_global / self.reference.count_tokens(step) / math.log(2.0))
