"""What cannot be drawn of a run: a chart takes what fits on it, and a finished run stays one."""

import re
from pathlib import Path

import numpy as np
import pytest

import trainer.checkpoint.run_folder
from tests.runs_in_process import make_ground, train
from trainer.monitor.report.charts import SIDE, Chart, Curve, render_chart
from trainer.monitor.report.curves import Series


@pytest.mark.parametrize("band", [(-0.1, 0.5), (0.0, 500.0), (-2.0, -1.0)])
def test_a_band_that_powers_of_ten_do_not_reach_is_drawn_as_far_as_they_do(band: tuple[float, float]) -> None:
    line = Series(np.arange(5.0), np.array([1e-3, 1e-2, 1e-1, 1.0, 10.0]))
    chart = Chart("S", "%", (Curve(line, "line", "blue", ""),), low=0.0, band=band)
    assert chart.is_logarithmic
    [(y, height)] = re.findall(r'class="band"[^>]* y="([\d.-]+)" height="([\d.-]+)"', render_chart(chart))
    assert 0.0 <= float(y) <= SIDE and 0.0 <= float(height) <= SIDE - float(y)


def test_a_page_that_cannot_be_drawn_ends_no_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> Path:
        raise ValueError("math domain error")

    monkeypatch.setattr(trainer.checkpoint.run_folder, "write_report", broken)
    said = train(make_ground(tmp_path))
    assert "not written: ValueError: math domain error; the run is complete" in said
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
