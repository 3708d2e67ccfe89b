"""K = mean KL(adapted || base) in bits per token on reference text, with its gradient.

    penalty = lambda K, in nats per token like the loss; without sigma and N

A step's reference documents depend on its number alone, and are thus the same after resuming. Each rank takes its own
rows and can compute the token count of all ranks without communication.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.contract.whole_files import write_json
from trainer.data.batches import MicroBatch, collate
from trainer.data.samples import Sample
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.patches.loss_head import TokenLoss, to_device

REFERENCE_FILE = "scu_reference.json"


class Reference:
    """Documents in an order drawn from `seed`, reshuffled for each pass; `rows` of them per rank and step."""

    def __init__(
        self, documents: Sequence[Sample], *, rows: int, rank: int, world_size: int, seed: int, pad_token_id: int,
        packed: bool, flat: bool,
    ) -> None:  # fmt: skip
        self.documents = documents
        self.rows, self.rank, self.world_size, self.seed = rows, rank, world_size, seed
        self._shape: dict[str, Any] = {"packed": packed, "flat": flat}
        self._pad = pad_token_id

    def select(self, step: int) -> list[int]:
        """Return the indices of this rank's documents in optimizer step `step` (from 1)."""
        return self._select_all_ranks(step)[self.rank * self.rows : (self.rank + 1) * self.rows]

    def batch(self, documents: Sequence[int]) -> MicroBatch:
        """Collate the documents with these indices."""
        return collate([self.documents[index] for index in documents], self._pad, **self._shape)

    def tokens(self, step: int) -> int:
        """Return the number of positions at which all ranks together compare adapter and base in a step."""
        return sum(len(self.documents[index].input_ids) - 1 for index in self._select_all_ranks(step))

    def _select_all_ranks(self, step: int) -> list[int]:
        together, count = self.rows * self.world_size, len(self.documents)
        places = range((step - 1) * together, step * together)
        turns = {place // count for place in places}
        orders = {turn: np.random.default_rng([self.seed, turn]).permutation(count) for turn in turns}
        return [int(orders[place // count][place % count]) for place in places]


class BaseStates:
    """The base's last hidden states of every reference document, on the host, [T - 1, H] each."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._states = states

    @classmethod
    def compute(cls, engine: Engine, token_loss: TokenLoss, reference: Reference) -> "BaseStates | None":
        """Compute the states of all documents on every rank, without the adapter; a collective call.

        Returns None if the loss is not computed in chunks from such states.
        """
        model, states = engine.module, list[Tensor]()
        was_training = model.training
        model.eval()
        for begin in range(0, len(reference.documents), reference.rows):
            chosen = range(begin, min(begin + reference.rows, len(reference.documents)))
            batch = reference.batch(chosen)
            if not token_loss.in_chunks(batch, engine.device):
                break
            found = token_loss.compute_base_states(engine, batch, engine.device)
            lengths = [len(reference.documents[index].input_ids) - 1 for index in chosen]
            states += (part.clone() for part in found.cpu().split(lengths))
        model.train(was_training)
        return cls(states) if states else None

    def load(self, documents: Sequence[int], device: torch.device) -> Tensor:
        """Copy the concatenated states of these documents [K, H] to the device, asynchronously."""
        return to_device(torch.cat([self._states[index] for index in documents]), device)


class Divergence:
    """K of the model in training, measured on a few reference documents per step."""

    def __init__(
        self,
        engine: Engine,
        token_loss: TokenLoss,
        reference: Reference,
        *,
        drawn: Sequence[Sample] = (),
        base_states: BaseStates | None = None,
        held_out: Reference | None = None,
    ) -> None:
        """`drawn`: all of the base's own samples, which a resumed run needs again.

        With `base_states` steps need no forward pass of the base. `held_out` documents are used by no step.
        """
        self.drawn, self._base_states, self.held_out = drawn, base_states, held_out
        self._engine, self._token_loss, self.reference = engine, token_loss, reference
        self._sum: Tensor | None = None
        self._held_out_states: BaseStates | None = None

    def penalty(self, step: int, lambda_: float) -> Tensor:
        """Return lambda K in nats per token, of which the mean over the ranks is the penalty; a collective call.

        While lambda is 0, K is measured without a gradient.
        """
        selected = self.reference.select(step)
        sum_local = self._token_loss.divergence(
            self._engine,
            self.reference.batch(selected),
            self._engine.device,
            base_states=self._base_output(selected),
            with_gradient=lambda_ > 0,
        )
        self._sum = sum_local.detach()
        if lambda_ == 0:
            return torch.zeros_like(self._sum)
        return sum_local * (lambda_ * self.reference.world_size / self.reference.tokens(step))

    def _base_output(self, documents: Sequence[int]) -> Tensor:
        if self._base_states is not None:
            return self._base_states.load(documents, self._engine.device)
        return self._token_loss.compute_base_states(self._engine, self.reference.batch(documents), self._engine.device)

    def local(self) -> Tensor | None:
        """Return this rank's sum of divergences in the step (nats, fp64); None before `penalty`."""
        return None if self._sum is None else self._sum.double()

    def bits(self, step: int, sum_global: float) -> float:
        """Return K of a step in bits per token from the sum over the ranks, clamped at 0 against rounding."""
        return max(0.0, sum_global / self.reference.tokens(step) / math.log(2.0))

    def measure_held_out(self) -> float:
        """Return K of the current model on the held-out documents in bits per token, as rank 0 measures it.

        A collective call. The base's hidden states are computed by the first call only, where they can be cached.
        """
        held_out, device = self.held_out, self._engine.device
        assert held_out is not None, "no documents were held out"
        if self._held_out_states is None:
            self._held_out_states = BaseStates.compute(self._engine, self._token_loss, held_out)
        states, total = self._held_out_states, torch.zeros((), dtype=torch.float64, device=device)
        for begin in range(0, len(held_out.documents), held_out.rows):
            chosen = range(begin, min(begin + held_out.rows, len(held_out.documents)))
            batch = held_out.batch(chosen)
            base = (
                states.load(chosen, device)
                if states
                else self._token_loss.compute_base_states(self._engine, batch, device)
            )
            total += self._token_loss.divergence(self._engine, batch, device, base_states=base, with_gradient=False)
        if self.reference.rank:
            total.zero_()
        tokens = sum(len(document.input_ids) - 1 for document in held_out.documents)
        bits = sum_over_ranks(total).item() / tokens / math.log(2.0)
        return 0.0 if bits < 0.0 else bits  # rounding; keeps NaN

    def write(self, run_dir: Path) -> None:
        """Write the base's samples, which exist nowhere else."""
        if self.drawn:
            write_json(run_dir / REFERENCE_FILE, [document.input_ids for document in self.drawn])
