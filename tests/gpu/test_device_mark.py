"""Whether a GPU has come to the begin of a phase."""

import time

import pytest
import torch

from trainer.ranks.device_mark import DeviceMark

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("device", [0, 1])
def test_a_kernel_in_front_of_the_mark_keeps_the_gpu_from_it(device: int) -> None:
    if torch.cuda.device_count() <= device:
        pytest.skip(f"needs {device + 1} NVIDIA GPUs")
    torch.zeros(1, device="cuda")  # as a rank does before it is on its own card
    mark = DeviceMark()
    mark.note(0)
    assert not mark.is_ahead()
    with torch.cuda.device(device):
        mark.note(4)
        torch.cuda.synchronize()
        assert not mark.is_ahead()
        torch.cuda._sleep(10**9)  # about half a second
        mark.note(5)
        assert mark.is_ahead()
        torch.cuda.synchronize()
        assert not mark.is_ahead()
        started = time.perf_counter()
        for _ in range(1000):
            mark.note(6)
        assert time.perf_counter() - started < 0.05
