"""Ranks, one of them running out of memory in the middle of backward passes; see test_oom.py.

python -m tests.distributed.oom_rank SHORTAGE.json CONFIG [key=value ...]     as trainer.train
SHORTAGE.json: {"rank", "above": largest micro-batch that it can hold, "after": optimizer steps that go well before}
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trainer.tasks.language
import trainer.train
from trainer.data.batches import MicroBatch
from trainer.patches.loss_head import TokenLoss


@contextmanager
def short_of(shortage: dict[str, int]) -> Iterator[None]:
    """Every TokenLoss of a run raises torch's own error in the backward pass of the first layer, with too many rows."""

    class Short(TokenLoss):
        def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
            rows = len(batch.input_ids)
            is_short = shortage["after"] <= model.global_steps and torch.is_grad_enabled()
            fits = rows <= shortage["above"] or not is_short
            if fits or int(os.environ["RANK"]) != shortage["rank"]:
                return super().__call__(model, batch, device)

            def fail(*_: Any) -> None:  # the last layer has its gradients by now, the first has none
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to hold {rows} rows.")

            first = next(module for name, module in model.module.named_modules() if name.endswith("layers.0"))
            handle = first.register_full_backward_pre_hook(fail)
            loss = super().__call__(model, batch, device)
            handle.remove()  # the hook stays in the graph that was built under it
            return loss

    with patch.object(trainer.tasks.language, "TokenLoss", Short):
        yield


if __name__ == "__main__":
    with short_of(json.loads(Path(sys.argv[1]).read_text())):
        sys.exit(trainer.train.main(sys.argv[2:]))
