"""What holds for every test: no network, one thread, the CPU where there is no GPU; markers that skip with a reason."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before torch, transformers or deepspeed is imported: they read these once. Child processes inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not (Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where torch sees no GPU."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """Commands that a test calls in this process install handlers, which forked workers would inherit."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
