"""The held-out loss of a run."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainer.evaluation import Evaluation


@pytest.mark.parametrize(("second", "words"), [(2.0, ""), (math.nan, "the held-out loss is nan"), (math.inf, "is inf")])
def test_a_held_out_loss_that_is_not_finite_is_told(second: float, words: str) -> None:
    engine: Any = SimpleNamespace(device=torch.device("cpu"), eval=lambda: None, train=lambda: None)
    batches = [SimpleNamespace(sum=1.0, target_count=3), SimpleNamespace(sum=second, target_count=3)]
    task: Any = SimpleNamespace(build_evaluation_batches=lambda: batches, batch_units="images")
    said: list[str] = []

    def loss(engine: Any, batch: Any, device: torch.device) -> torch.Tensor:
        return torch.tensor(batch.sum)

    loss.pop_metrics = lambda *, training: {"eval/more": float(training)}  # type: ignore[attr-defined]
    found, measured = Evaluation(task, engine, cast(Any, loss), said.append, has_held_out=True).measure_loss()
    assert measured == {"eval/more": 0.0}
    assert found == pytest.approx((1.0 + second) / 6, nan_ok=True)
    assert len(said) == bool(words) and words in "".join(said)
