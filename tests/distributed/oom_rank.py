"""Ranks of which one runs out of memory in the middle of backward passes; see test_oom.py.

deepspeed --module tests.distributed.oom_rank SHORTAGE.json CONFIG [key=value ...]     a whole run, as trainer.train
deepspeed --module tests.distributed.oom_rank SHORTAGE.json PLAN.json                  several, one after the other
SHORTAGE.json: {"rank", "above": largest micro-batch that it can hold, "after": optimizer steps that go well before}
               and, where it is over again: {"until": optimizer steps by then, "grow_after": steps between two looks}
PLAN.json: {"folder", "cases": [{"name", "overrides"}, ...]}, as matrix.py takes them
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import trainer.language
import trainer.memory.oom_recovery
import trainer.train
from tests.distributed.matrix import run_case
from trainer.data import MicroBatch
from trainer.patches.loss_head import TokenLoss
from trainer.ranks.group import Ranks, leave_process_group
from trainer.ranks.signals import StopRequest


def inject(shortage: dict[str, int]) -> None:
    """Every TokenLoss of a run raises torch's own error in the backward pass of the first layer, with too many rows."""

    class Short(TokenLoss):
        def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
            rows = len(batch.input_ids)
            is_short = shortage["after"] <= model.global_steps < shortage.get("until", sys.maxsize)
            fits = rows <= shortage["above"] or not is_short or not torch.is_grad_enabled()
            if fits or int(os.environ["RANK"]) != shortage["rank"]:
                return super().__call__(model, batch, device)

            def fail(*_: Any) -> None:  # the last layer has its gradients by now, the first has none
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to hold {rows} rows.")

            first = next(module for name, module in model.module.named_modules() if name.endswith("layers.0"))
            handle = first.register_full_backward_pre_hook(fail)
            loss = super().__call__(model, batch, device)
            handle.remove()  # the hook stays in the graph that was built under it
            return loss

    trainer.language.TokenLoss = Short  # type: ignore[attr-defined]
    if "grow_after" in shortage:  # a CPU does not say how much room there is
        trainer.memory.oom_recovery.GROW_AFTER = shortage["grow_after"]
        trainer.memory.oom_recovery.has_room_for_twice = lambda: True


def run_plan(path: Path) -> int:
    plan = json.loads(path.read_text())
    folder, ranks, stop = Path(plan["folder"]), Ranks.from_environment(), StopRequest()
    for case in plan["cases"]:
        try:
            run_case(folder, case, ranks, stop)
        except trainer.memory.oom_recovery.OutOfMemory as error:  # on every rank, so that the next case can follow
            (folder / f"{case['name']}-failed-{ranks.rank}.txt").write_text(str(error))
    leave_process_group()
    return 0


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    inject(json.loads(Path(arguments[0]).read_text()))
    if arguments[1].endswith(".json"):
        sys.exit(run_plan(Path(arguments[1])))
    sys.exit(trainer.train.main(arguments[1:]))
