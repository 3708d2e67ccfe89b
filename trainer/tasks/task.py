"""Interface that a run uses to train any kind of model, implemented in language.py and images/task.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from trainer.config import RunConfig
from trainer.monitor.metrics import Record
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.protocol import Engine
from trainer.tasks.lm_eval_scores import Scores


class Batch(Protocol):
    @property
    def tokens(self) -> int:
        """Size of the batch in the first unit of `Task.batch_units` (tokens or images)."""

    @property
    def target_count(self) -> int:
        """Number of targets, the divisor of the held-out loss."""

    @property
    def target_weight(self) -> float:
        """Sum of the targets' weights, the divisor of a step's summed loss."""


class BatchSource(Protocol):
    @property
    def samples_per_epoch(self) -> int | None:
        """Number of samples across all ranks; None for a stream, which is one endless epoch."""

    def build_step_batches(self, epoch: int, offset: int) -> tuple[Sequence[Any], int]:
        """Return this rank's micro-batches for the step starting at `offset`, and its sample count across all ranks."""


class StepLoss(Protocol):
    """Computes the summed loss of a batch, fp32 and differentiable."""

    @property
    def load_balancing_loss(self) -> torch.Tensor | float:
        """The router's load-balancing loss, which is added to the training loss."""

    def pop_metrics(self, *, training: bool = True) -> dict[str, float]:
        """Return additional training or evaluation metrics since the last call; a collective call."""
        return {}

    def __call__(self, model: Any, batch: Any, device: torch.device) -> torch.Tensor: ...


class Task(Protocol):
    title: ClassVar[str]
    """Name in messages, such as "a language model"."""
    batch_units: ClassVar[tuple[str, ...]]
    """Units of a batch's size: ("tokens", "target_tokens") or ("images",)."""
    peft_type: ClassVar[str | None]
    """PEFT's task_type."""
    formats: ClassVar[tuple[str, ...]]
    """Formats supported by `zerolora export`."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Commands that do not support this kind of adapter, with the reason and a fix (trainer/setup/kinds.py)."""
    predicts_time: ClassVar[bool] = False
    """Whether `zerolora estimate` predicts the time of a step."""
    sample_every: int = 0
    """Steps between samples during training; 0 for none."""
    flat_packs: bool = False
    """Whether packed sequences are one row without padding; set by `check_trainable`."""

    def load_base(self, dtype: torch.dtype, engine_config: dict[str, Any], shards: LayerShards | None) -> Any:
        """Load the frozen model onto the device, partitioned on the fly at ZeRO stage 3."""

    def must_keep_embeddings(self) -> bool:
        """Return whether the per-layer all-gather must leave the embedding and the head unsharded."""
        return False

    def find_added_token_ids(self) -> list[int]:
        """Return the ids of the embedding rows that are trained with the adapter."""
        return []

    def run_dummy_forward(self, model: Any) -> object:
        """Run a forward pass on the smallest input that the model accepts."""

    def build_loss(self, model: Any, *, fused_head: bool | None) -> StepLoss:
        """Build the loss for a model; called before the engine is created."""

    def check_trainable(self, engine: Engine, loss: Any, *, varlen: bool) -> None:
        """Check the running model before the first step. Raises UserError if it cannot be trained as configured."""

    def check_base(self) -> None:
        """Raise UserError if a stored weight of the base model is not finite; called after a non-finite loss."""

    def build_batches(self) -> BatchSource:
        """Return this rank's training batches."""

    def build_evaluation_batches(self) -> Iterable[Any]:
        """Return this rank's batches of held-out data; every rank has the same number."""

    def compute_scores(self, engine: Engine, *, base: bool = False) -> Scores:
        """Compute the scores configured in `evaluation`, for the base model if `base` is set; a collective call."""
        return Scores({}, {}, set())

    def compute_loss_metrics(self, loss: float) -> dict[str, float]:
        return {}

    def build_flops_meter(self, model: Any) -> Any:
        """Return a meter for the model's FLOPs; None if the FLOPs or the GPU's peak are unknown."""
        return None

    def generate_samples(self, engine: Engine, when: str, step: int, folder: Any) -> None:
        """Generate samples for the sample prompts and save them in the run's `folder`; a collective call.

        `when` is "before", "after" or "step-N".
        """

    def prepare_companion_files(self) -> Callable[[Path], None]:
        """Return a function that writes the files that accompany saved weights; rank 0 only.

        The function may be called in another thread while training continues; this method may not.
        """

    @classmethod
    def build_model_card(cls, config: RunConfig, run_dir: Path, records: list[Record], name: str) -> str:
        """Return the model card for a finished run with these metrics.

        `name` is the adapter's repository (owner/name) or the absolute path of its folder.
        """
