"""What a run asks of the kind of model that it trains; all else is the same for every kind.

A language model reads tokens and predicts the next one (language.py); an image model reads noisy latents and predicts
the noise (images/task.py).
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.protocol import Engine


class Batch(Protocol):
    """What one rank computes in one forward pass."""

    @property
    def tokens(self) -> int:
        """Its size, in the unit that the task counts."""
        ...

    @property
    def target_count(self) -> int:
        """What the sum of its losses is divided by."""
        ...


class BatchSource(Protocol):
    """What a run draws from, on one rank; the size of micro-batches may be changed between two steps."""

    batch_size: int
    accumulation: int

    @property
    def samples_per_epoch(self) -> int | None:
        """Over all ranks; None for a stream, which is one epoch without end."""
        ...

    def step(self, epoch: int, offset: int) -> tuple[Sequence[Any], int]:
        """This rank's micro-batches `offset` samples into the epoch, and how many samples all ranks take."""
        ...


class StepLoss(Protocol):
    """The summed loss of a batch, fp32 and differentiable."""

    @property
    def balancing(self) -> torch.Tensor | float:
        """Added to it in training only."""
        ...

    def __call__(self, model: Any, batch: Any, device: torch.device) -> torch.Tensor: ...


class Task(Protocol):
    """One kind of model, of one run on one rank."""

    @property
    def counted(self) -> str:
        """What a batch is counted in: tokens or images."""
        ...

    @property
    def peft_type(self) -> str | None:
        """PEFT's task_type."""
        ...

    def load_base(self, dtype: torch.dtype, engine_config: dict[str, Any], shards: LayerShards | None) -> Any:
        """The frozen model on the device, partitioned while it is read where stage 3 asks for it."""
        ...

    def keep_embeddings(self) -> bool:
        """Whether layer gather leaves embedding and head whole."""
        ...

    def added_tokens(self) -> list[int]:
        """Rows of the embedding that are trained with the adapter."""
        ...

    def small_pass(self, model: Any) -> object:
        """A forward pass over as little as the model takes."""
        ...

    def loss(self, model: Any, *, fused_head: bool | None) -> StepLoss:
        """The loss of this model, before the engine starts."""
        ...

    def check(self, engine: Engine, loss: Any, *, varlen: bool) -> None:
        """What must be seen on the running model, before the first step. Raises UserError."""
        ...

    def batches(self) -> BatchSource:
        """This rank's micro-batches of every step."""
        ...

    def evaluation(self) -> Iterable[Any]:
        """This rank's batches of what is held out; every rank has as many."""
        ...

    def meter(self, model: Any) -> Any:
        """Counts the model's FLOPs; None where they or the card's peak are not known."""
        ...

    def sample(self, engine: Engine, when: str, step: int, folder: Any) -> None:
        """What the model makes of the sample prompts, kept in the run's `folder`; every rank must call it.

        `when` is before, after, or step-N.
        """
        ...

    def files_beside(self) -> Callable[[Path], None]:
        """What writes into a folder of saved weights what they need in order to be used; rank 0.

        A thread may call what it returns while training goes on, but not this method.
        """
        ...

    def card(self, run_dir: Path, name: str) -> str:
        """The model card of the finished run."""
        ...
