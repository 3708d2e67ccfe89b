"""Copies for a checkpoint on a card: of the step that was queued, whatever is queued after them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runs_in_process import make_ground, train
from trainer.checkpoint.host_copies import HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPES = ((4096, 4096), (1000, 17), (3,))


def busy() -> torch.Tensor:
    """Some milliseconds of the device's time."""
    square = torch.randn(8192, 8192, device="cuda")
    for _ in range(4):
        square = square @ square * 1e-2
    return square


def test_copies_are_of_what_was_queued_before_them_and_not_of_the_next_update() -> None:
    copies, tensors = HostCopies(), [torch.zeros(shape, device="cuda") for shape in SHAPES]
    for save in range(1, 6):
        busy()
        for tensor in tensors:
            tensor.add_(1.0)  # the update of the step
        # What is gathered for the copy alone is freed at once, and its memory asked for again.
        found = [copies.copy(f"{index}", tensor) for index, tensor in enumerate(tensors)]
        found += [copies.copy(f"twice-{index}", tensor * 2) for index, tensor in enumerate(tensors)]
        later = [torch.full(shape, -1.0, device="cuda") for shape in SHAPES]
        copies.record_event()
        busy()  # the next forward and backward pass
        copies.make_updates_wait()
        for tensor in tensors:
            tensor.mul_(-5.0)
        copies.wait()
        for index, shape in enumerate(SHAPES):
            assert torch.equal(found[index], torch.full(shape, float(save)))
            assert torch.equal(found[len(SHAPES) + index], torch.full(shape, 2.0 * save))
        for tensor in tensors:
            tensor.fill_(float(save))
        assert all((value == -1.0).all() for value in later)


def test_the_host_does_not_wait_for_copies() -> None:
    copies, tensor = HostCopies(), torch.ones(1 << 26, device="cuda")
    copies.copy("one", tensor)  # the first copy allocates the memory
    torch.cuda.synchronize()
    marks = [torch.cuda.Event() for _ in range(2)]
    busy()
    marks[0].record()
    found = copies.copy("one", tensor)
    copies.record_event()
    copies.make_updates_wait()
    assert not marks[0].query(), "the device was done before the host was: more for it to do is needed"
    tensor.zero_()
    marks[1].record()
    copies.wait()
    assert found.sum(dtype=torch.float64) == 1 << 26
    marks[1].synchronize()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_checkpoint_saved_during_training_equals_one_saved_at_the_end(tmp_path: Path, optimizer: str) -> None:
    common: dict[str, Any] = {
        "training__precision": "bf16", "training__lr_scheduler": "constant", "training__warmup_ratio": 0.0,
        "training__optimizer": optimizer, "training__save_total_limit": 9,
    }  # fmt: skip
    ground, at = make_ground(tmp_path), 3
    train(ground, **common, training__max_steps=8, training__save_steps=1, output_dir=str(tmp_path / "during"))
    train(ground, **common, training__max_steps=at, training__save_steps=0, output_dir=str(tmp_path / "end"))
    during, end = (tmp_path / name / f"checkpoint-{at}" for name in ("during", "end"))
    names = sorted(file.name for file in end.glob("*.safetensors"))
    assert names == ["adapter_model.safetensors", "rank-00000.safetensors", "training_state-00000.safetensors"]
    for name in names:
        ours, wanted = load_file(during / name), load_file(end / name)
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(ours[key], wanted[key]) for key in wanted), name
