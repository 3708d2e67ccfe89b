"""The card's figures through the real driver."""

import pytest
import torch

from trainer.monitor.metrics import read_gpu_metrics

pytestmark = pytest.mark.gpu


def test_the_cards_figures_are_those_of_the_current_device() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    ballast = torch.zeros(2**28, dtype=torch.float32, device="cuda")  # 1 GiB
    values = read_gpu_metrics()
    assert set(values) == {"gpu/utilization", "gpu/power_watts", "gpu/memory_gib"}
    assert 0 <= values["gpu/utilization"] <= 100
    assert 5 < values["gpu/power_watts"] < 2000
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert ballast.numel() * 4 / 2**30 <= values["gpu/memory_gib"] <= total
