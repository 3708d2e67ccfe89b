"""GPUs of one host that are lost, or have a NaN, and checkpoints that other numbers of them read."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.chaos.places import OnGpus
from tests.restarting import STEPS, fail_twice_for_a_nan, lose_one_and_come_back, losses, train, write_short_run

pytestmark = pytest.mark.gpu
COUNT = torch.cuda.device_count()


@dataclass
class SomeGpus(OnGpus):
    """The first ones of this machine."""

    count: int

    def environment(self) -> dict[str, str]:
        """With the others hidden."""
        found = super().environment()
        cards = found.get("CUDA_VISIBLE_DEVICES", "").split(",")
        seen = cards if cards != [""] else [str(number) for number in range(COUNT)]
        return found | {"CUDA_VISIBLE_DEVICES": ",".join(seen[: self.count])}


@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
def test_the_other_gpu_continues_alone_until_both_are_back(tmp_path: Path) -> None:
    lose_one_and_come_back(write_short_run(tmp_path), "GPU 1", SomeGpus(2))


@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
def test_rank_and_step_of_a_non_finite_loss_are_reported(tmp_path: Path) -> None:
    """Its numbers are read while the next one runs."""
    fail_twice_for_a_nan(write_short_run(tmp_path), place=SomeGpus(2))


@pytest.mark.skipif(COUNT < 4, reason="needs four GPUs")
def test_four_gpus_restart_and_three_and_two_read_their_checkpoint(tmp_path: Path) -> None:
    """The restart to the bit, other numbers of ranks within 1e-5: the global batch of 12 stays."""
    folder = write_short_run(tmp_path)
    same = ["lora.dropout=0", "training.precision=fp32", "training.lr_scheduler=constant", "training.batch_size=1"]
    same += ["training.global_batch_size=12"]
    longer = f"training.max_steps={STEPS + 4}"
    code, seen = train(folder, "calm", "", *same, longer, place=SomeGpus(4))
    assert code == 0, seen
    code, seen = train(folder, "fewer", "3:kill:11", *same, place=SomeGpus(4))
    assert code == 0 and "restart 1 of 3: resuming from checkpoint-4" in seen, seen
    assert losses(folder / "fewer") == losses(folder / "calm")[:STEPS]
    for count, steps in ((3, STEPS + 2), (2, STEPS + 4)):
        settings = [*same, f"training.max_steps={steps}", "training.resume_from_checkpoint=auto"]
        code, seen = train(folder, "fewer", "", *settings, place=SomeGpus(count))
        assert code == 0 and "resumed from" in seen, seen
        assert json.loads((folder / "fewer" / "run.json").read_text())["world_size"] == count
    assert losses(folder / "fewer") == pytest.approx(losses(folder / "calm"), abs=1e-5)
