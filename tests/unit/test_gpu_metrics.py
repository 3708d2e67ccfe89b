"""The card's own figures: absent without complaint, in every place that metrics go to."""

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainer.monitor.metrics
from trainer.config import LoggingSection
from trainer.monitor.metrics import Metrics, read_gpu_metrics


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_gpu_metrics.py looks at the real card")
def test_absent_without_complaint_where_there_is_no_gpu(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert read_gpu_metrics() == {}
    shown = StringIO()
    metrics = Metrics(tmp_path, LoggingSection(report_to=()), Console(file=shown), first_step=0, total_steps=1)
    metrics.log(1, {"train/loss": 1.0})
    metrics.close()
    assert "gpu" not in (tmp_path / "metrics.jsonl").read_text() + shown.getvalue()
    assert not recwarn.list


def test_steps_carry_the_cards_figures_and_evaluations_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trainer.monitor.metrics, "read_gpu_metrics", lambda: {"gpu/utilization": 7.0, "gpu/memory_gib": 3.0}
    )
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
