"""The card's own figures: read by a thread, absent without complaint, in every place that metrics go to."""

import json
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.config import LoggingSection
from trainer.monitor.metrics import GpuMetrics, Metrics


class Driver:
    """NVML's functions for a card with unreadable power and with higher load at every reading."""

    class NVMLError(Exception):
        """What NVML raises for everything."""

    def __init__(self) -> None:
        self.looks = 0
        self.open = True

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self.looks += 1
        return SimpleNamespace(gpu=self.looks, memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=3 * 2**30)

    def nvmlShutdown(self) -> None:
        self.open = False


def test_a_thread_reads_again_and_what_the_card_does_not_tell_is_left_out() -> None:
    driver = Driver()
    gpu = GpuMetrics(driver, "card", every_s=0.01)
    assert set(gpu.values()) == {"gpu/utilization", "gpu/memory_gib"}
    assert gpu.values()["gpu/memory_gib"] == 3.0
    deadline = time.monotonic() + 300
    while gpu.values()["gpu/utilization"] < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gpu.values()["gpu/utilization"] >= 3
    gpu.close()
    gpu.close()
    looks = driver.looks
    time.sleep(0.05)
    assert driver.looks == looks and not driver.open


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_gpu_metrics.py looks at the real card")
def test_absent_without_complaint_where_there_is_no_gpu(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert GpuMetrics.open() is None
    shown = StringIO()
    metrics = Metrics(tmp_path, LoggingSection(report_to=()), Console(file=shown), first_step=0, total_steps=1)
    metrics.log(1, {"train/loss": 1.0})
    metrics.close()
    assert "gpu" not in (tmp_path / "metrics.jsonl").read_text() + shown.getvalue()
    assert not recwarn.list


def test_steps_carry_the_cards_figures_and_evaluations_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuMetrics, "open", classmethod(lambda cls: cls(Driver(), "card", every_s=60)))
    section = LoggingSection(report_to=("tensorboard",))
    metrics = Metrics(tmp_path, section, Console(file=StringIO()), first_step=0, total_steps=1)
    metrics.log(1, {"train/loss": 1.0})
    metrics.log(1, {"eval/loss": 1.0})
    metrics.close()
    step, evaluation = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert step["gpu/memory_gib"] == 3.0 and "gpu/memory_gib" not in evaluation
    events = EventAccumulator(str(next((tmp_path / "tensorboard").iterdir())))
    events.Reload()
    assert {"gpu/utilization", "gpu/memory_gib"} <= set(events.Tags()["scalars"])
