"""Which of its marks a GPU has come to."""

import time

import pytest
import torch

from trainer.parallel.ranks.watchdog import EVENT_COUNT, DeviceEvents

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("device", [0, 1])
def test_a_kernel_in_front_of_a_mark_keeps_the_gpu_from_it(device: int) -> None:
    if torch.cuda.device_count() <= device:
        pytest.skip(f"needs {device + 1} NVIDIA GPUs")
    torch.zeros(1, device="cuda")  # as a rank does before it is on its own card
    marks = DeviceEvents()
    marks.record(0)
    assert marks.find_last_reached_event() is None
    with torch.cuda.device(device):
        for _ in range(EVENT_COUNT + 5):
            marks.record(4)
        torch.cuda.synchronize()
        assert marks.find_last_reached_event() == EVENT_COUNT + 5
        torch.cuda._sleep(10**9)  # about half a second
        for _ in range(3):
            marks.record(5)
        assert marks.find_last_reached_event() == EVENT_COUNT + 5
        torch.cuda.synchronize()
        assert marks.find_last_reached_event() == EVENT_COUNT + 8
        started = time.perf_counter()
        for _ in range(1000):
            marks.record(6)
        assert time.perf_counter() - started < 0.05
