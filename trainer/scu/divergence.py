"""What the outputs carry: K = mean KL(adapted || base), bits a token, on reference text, and its gradient.

    term = lambda K, in nats a token, as the loss is; no sigma and no N

The reference documents of a step follow from its number alone: the same on every number of epochs, starts and resumes.
Each rank takes rows of its own; every rank knows how many tokens all of them have, so nothing is sent for that.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.contract.whole_files import write_json
from trainer.data.batches import MicroBatch, collate, with_documents
from trainer.data.samples import Sample
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.patches.loss_head import TokenLoss, to_device

REFERENCE_FILE = "scu_reference.json"


class Reference:
    """Documents in an order drawn from `seed`, a new one for each pass; `rows` of them for each rank and step."""

    def __init__(
        self, documents: Sequence[Sample], *, rows: int, rank: int, world_size: int, seed: int, pad_token_id: int,
        packed: bool, flat: bool,
    ) -> None:  # fmt: skip
        self.documents = documents
        self.rows, self.rank, self.world_size, self.seed = rows, rank, world_size, seed
        self._shape: dict[str, Any] = {"packed": packed, "flat": flat}
        self._pad = pad_token_id

    def mine(self, step: int) -> list[int]:
        """Which documents this rank takes in optimizer step `step` (from 1), as places in `documents`."""
        return self._chosen(step)[self.rank * self.rows : (self.rank + 1) * self.rows]

    def batch(self, documents: Sequence[int]) -> MicroBatch:
        """These documents together, by their places."""
        return collate([self.documents[index] for index in documents], self._pad, **self._shape)

    def behind(self, batch: MicroBatch, documents: Sequence[int]) -> MicroBatch:
        """A packed batch of training text with these documents in its pack."""
        return with_documents(batch, [self.documents[index] for index in documents], self._pad)

    def tokens(self, step: int) -> int:
        """Places at which all ranks compare adapter and base in that step."""
        return sum(len(self.documents[index].input_ids) - 1 for index in self._chosen(step))

    def _chosen(self, step: int) -> list[int]:
        together, count = self.rows * self.world_size, len(self.documents)
        places = range((step - 1) * together, step * together)
        orders = {turn: self._order(turn) for turn in {place // count for place in places}}
        return [int(orders[place // count][place % count]) for place in places]

    def _order(self, turn: int) -> Any:
        return np.random.default_rng([self.seed, turn]).permutation(len(self.documents))


class BaseStates:
    """The base's last hidden states of every reference document, on the host: what the head takes, [T - 1, H] each."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._states = states

    @classmethod
    def compute(cls, engine: Engine, token_loss: TokenLoss, reference: Reference) -> "BaseStates | None":
        """By forward passes without the adapter, all documents on every rank; every rank must call it.

        None where the logits are not made in chunks from such states.
        """
        model, states = engine.module, list[Tensor]()
        was_training = model.training
        model.eval()
        for begin in range(0, len(reference.documents), reference.rows):
            chosen = range(begin, min(begin + reference.rows, len(reference.documents)))
            batch = reference.batch(chosen)
            if not token_loss.in_chunks(batch, engine.device):
                break
            found = token_loss.of_base(engine, batch, engine.device)
            lengths = [len(reference.documents[index].input_ids) - 1 for index in chosen]
            states += (part.clone() for part in found.cpu().split(lengths))
        model.train(was_training)
        return cls(states) if states else None

    def of(self, documents: Sequence[int], device: torch.device) -> Tensor:
        """Those of a batch of these documents, one after the other [K, H], on the device, without waiting for it."""
        return to_device(torch.cat([self._states[index] for index in documents]), device)


class Divergence:
    """K of the model in training, measured on a few reference documents a step."""

    def __init__(
        self,
        engine: Engine,
        token_loss: TokenLoss,
        reference: Reference,
        *,
        drawn: Sequence[Sample] = (),
        base_states: BaseStates | None = None,
        packed: bool = False,
        kept: Reference | None = None,
    ) -> None:
        """`drawn`: all of the base's own samples, which a run that goes on needs again.

        With `base_states` the base makes no pass in a step. `packed`: `loss` may compute them with the training text.
        `kept` are documents that no step sees.
        """
        self.drawn, self._base_states, self.packed, self.kept = drawn, base_states, packed, kept
        self._engine, self._token_loss, self.reference = engine, token_loss, reference
        self.with_reference: Callable[..., tuple[Tensor, Tensor]] = token_loss.with_reference
        """As that of `TokenLoss`, or what plays it back."""
        self._sum: Tensor | None = None
        self._of_pack: Tensor | None = None
        self._kept_states: BaseStates | None = None

    def loss(self, step: int, batch: MicroBatch) -> Tensor:
        """The loss sum of a packed batch, nats, by a pass that computes K of step `step` too, for `term` to take."""
        mine = self.reference.mine(step)
        base_states, together = self._of_base(mine), self.reference.behind(batch, mine)
        loss, self._of_pack = self.with_reference(
            self._engine, together, self._engine.device, own=batch, base_states=base_states
        )
        return loss

    def term(self, step: int, lambda_: float) -> Tensor:
        """lambda K in nats a token; its mean over the ranks is the term. Every rank must call it.

        While lambda is 0 K is measured without a gradient.
        """
        sum_local, self._of_pack = self._of_pack, None
        if sum_local is None:
            mine = self.reference.mine(step)
            sum_local = self._token_loss.divergence(
                self._engine,
                self.reference.batch(mine),
                self._engine.device,
                base_states=self._of_base(mine),
                with_gradient=lambda_ > 0,
            )
        self._sum = sum_local.detach()
        if lambda_ == 0:
            return torch.zeros_like(self._sum)
        return sum_local * (lambda_ * self.reference.world_size / self.reference.tokens(step))

    def _of_base(self, mine: Sequence[int]) -> Tensor:
        if self._base_states is not None:
            return self._base_states.of(mine, self._engine.device)
        return self._token_loss.of_base(self._engine, self.reference.batch(mine), self._engine.device)

    def local(self) -> Tensor | None:
        """This rank's sum of divergences of the step, nats, fp64; None before `term`."""
        return None if self._sum is None else self._sum.double()

    def bits(self, step: int, sum_global: float) -> float:
        """K of a step, bits a token, from the sum over the ranks. What rounding leaves below 0 is 0."""
        return max(0.0, sum_global / self.reference.tokens(step) / math.log(2.0))

    def of_kept(self) -> float:
        """K of the model as it is on the documents kept apart, bits a token, by forward passes over all of them.

        Those of the base are made by the first call alone, where what they give is no logits. Every rank must call it,
        and gets the number of rank 0.
        """
        kept, device = self.kept, self._engine.device
        assert kept is not None, "no documents were kept apart"
        if self._kept_states is None:
            self._kept_states = BaseStates.compute(self._engine, self._token_loss, kept)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for begin in range(0, len(kept.documents), kept.rows):
            places = range(begin, min(begin + kept.rows, len(kept.documents)))
            batch, states = kept.batch(places), self._kept_states
            base_states = states.of(places, device) if states else self._token_loss.of_base(self._engine, batch, device)
            total += self._token_loss.divergence(
                self._engine, batch, device, base_states=base_states, with_gradient=False
            )
        if self.reference.rank:
            total.zero_()
        tokens = sum(len(document.input_ids) - 1 for document in kept.documents)
        bits = sum_over_ranks(total).item() / tokens / math.log(2.0)
        return 0.0 if bits < 0.0 else bits  # what rounding leaves; a NaN stays one

    def write(self, run_dir: Path) -> None:
        """Keep documents that are nowhere else."""
        if self.drawn:
            write_json(run_dir / REFERENCE_FILE, [document.input_ids for document in self.drawn])
