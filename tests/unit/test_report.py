"""The report: numbers against a hand count, plots that show what they say, a page that needs no other file."""

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from trainer.checkpoint.run_record import write_run_record
from trainer.config import LoggingSection, RunConfig, UserError
from trainer.monitor.metrics import Metrics, read_metrics
from trainer.monitor.report.__main__ import main
from trainer.monitor.report.plots import _draw_loss, _draw_s, running_mean, series
from trainer.monitor.report.write import training_seconds, write_report

STEPS = 80


def make_run(run_dir: Path, *, scu: bool = False, name: str = "a run", evaluate: bool = True) -> None:
    """A run whose loss falls from 4 to 2, written by the real writers."""
    config = RunConfig.model_validate(
        {
            "base_model": "models/tiny",
            "output_dir": str(run_dir),
            "dataset": {"path": "data/train.jsonl", "val_split": 0.1, "max_length": 512},
            "training": {"batch_size": 2, "gradient_accumulation_steps": 3},
            "logging": {"run_name": name},
        }
    )
    write_run_record(run_dir, config, world_size=2, device="cpu")
    console = Console(file=None, quiet=True)
    section = LoggingSection(report_to=(), run_name=name)
    metrics = Metrics(run_dir, section, console, first_step=0, total_steps=STEPS)
    for step in range(1, STEPS + 1):
        loss = 4.0 - 2.0 * step / STEPS
        values = {
            "train/loss": loss,
            "train/grad_norm": 1.0,
            "train/learning_rate": 1e-4,
            "train/epoch": 2 * step / STEPS,
            "train/tokens": 1000.0 * step,
            "train/target_tokens": 400.0 * step,
            "perf/tokens_per_second_per_gpu": 100.0 + step % 3,
            "memory/peak_gib": 1.25,
        }
        if scu:
            share = 0.03 - 0.01 * step / STEPS
            values |= {"scu/s_ratio": share, "scu/target": 0.02, "scu/error": share - 0.02, "scu/lambda": 0.5}
            values |= {"scu/data_bpt": loss / np.log(2), "scu/param_bpt": 0.05}
        metrics.log(step, values)
        if evaluate and step in (1, STEPS // 2, STEPS):
            metrics.log(step, {"eval/loss": {1: 4.0, STEPS // 2: 1.5, STEPS: 2.0}[step]})
    metrics.close()


def rows_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))


def test_the_summary_says_what_was_measured(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = write_report(tmp_path).read_text()
    rows = rows_of(page)
    assert rows["model"] == "models/tiny"
    assert rows["data"] == "data/train.jsonl"
    assert rows["held out"] == "10.0% of the records"
    assert rows["optimizer steps"] == "80 (2.00 epochs)"
    assert rows["tokens"] == "80,000, 32,000 of them with loss"
    assert rows["batch"] == "12 sequences = 2 x 3 micro-steps x 2 ranks"
    assert rows["training loss"] == "first 3.9750, last 2.0000, lowest 2.0000"
    assert rows["held-out loss"] == "before 4.0000, after 2.0000, lowest 1.5000 at step 40"
    assert rows["relative change"] == "−50.0%"  # noqa: RUF001
    assert rows["tokens/s per rank"] == "101 (median)"
    assert rows["peak memory of rank 0"] == "1.25 GiB"
    assert "torch 2" in rows["versions"]
    assert "<b>4.000 → 2.000</b><span>−50.0%</span>" in page  # noqa: RUF001
    assert "<b>202</b><span>101 on each of 2</span>" in page


def test_the_page_stands_alone_and_its_plots_are_the_png_files(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "http" not in page
    sources = re.findall(r'src="(.*?)"', page)
    assert {source.split(",")[0] for source in sources} == {"data:image/png;base64"}
    embedded = {base64.b64decode(source.split(",")[1]) for source in sources}
    files = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert set(files) == {"loss.png", "learning_rate.png", "gradient_norm.png", "throughput.png", "memory.png"}
    assert embedded == set(files.values())
    for content in embedded:
        pixels = imread(BytesIO(content))
        assert pixels.shape[1] > 1000 and pixels[..., :3].std() > 0.01


def test_scu_plots_come_with_scu_metrics(tmp_path: Path) -> None:
    make_run(tmp_path, scu=True)
    page = write_report(tmp_path).read_text()
    names = {path.stem for path in (tmp_path / "plots").iterdir() if path.stem.startswith("scu")}
    assert names == {"scu_s", "scu_lambda", "scu_data_bpt", "scu_param_bpt"}
    assert rows_of(page)["SCU share S"] == "first 2.987%, last 2.000%, target 2.000%"


def test_s_is_drawn_against_target_and_deadband(tmp_path: Path) -> None:
    make_run(tmp_path, scu=True)
    axes = Figure().add_subplot()
    _draw_s(axes, read_metrics(tmp_path), 0.003)
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in axes.get_lines()}
    np.testing.assert_allclose(lines["target"], 2.0)
    np.testing.assert_allclose(lines["S smoothed"], 3.0 - np.arange(1, STEPS + 1) / STEPS)
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(1.7) and heights.max() == pytest.approx(2.3)


def test_evaluations_are_marked_on_the_loss(tmp_path: Path) -> None:
    make_run(tmp_path)
    axes = Figure().add_subplot()
    _draw_loss(axes, read_metrics(tmp_path))
    (held_out,) = [line for line in axes.get_lines() if line.get_label() == "held out"]
    assert list(zip(held_out.get_xdata(), held_out.get_ydata(), strict=True)) == [(1, 4.0), (40, 1.5), (80, 2.0)]
    assert [text.get_text() for text in axes.texts] == ["4.000", "2.000"]


def test_metrics_alone_make_a_report(tmp_path: Path) -> None:
    make_run(tmp_path, evaluate=False)
    (tmp_path / "run.json").unlink()
    (tmp_path / "training_config.json").unlink()
    rows = rows_of(write_report(tmp_path).read_text())
    assert "model" not in rows and "held-out loss" not in rows
    assert rows["training loss"].startswith("first 3.9750")


def test_texts_are_escaped(tmp_path: Path) -> None:
    make_run(tmp_path, name="<script>alert(1)</script>")
    page = write_report(tmp_path).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"step": step, "time": float(step), "train/loss": None if step == 3 else 2.0} for step in range(1, 6)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = rows_of(write_report(tmp_path).read_text())
    assert rows["training loss"] == "first 2.0000, last 2.0000, lowest 2.0000"
    assert np.isnan(series(records, "train/loss").values).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), ("", "nothing was trained yet")])
def test_a_run_without_metrics_is_a_clear_error(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        write_report(tmp_path)
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and message in said.err and said.out == ""
    assert not (tmp_path / "report.html").exists()


def test_the_command_prints_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "report.html"


def test_pauses_between_interruption_and_resumption_are_no_training_time() -> None:
    def record(step: int, time: float) -> dict[str, float | None]:
        return {"step": step, "time": time, "perf/step_ms": 2000.0}

    trained = [record(1, 0.0), record(2, 2.0), record(3, 4.0)]
    slow_evaluation: dict[str, float | None] = {"step": 3, "time": 1804.0, "eval/loss": 1.0}
    resumed = [record(4, 90_000.0), record(5, 90_002.0)]
    assert training_seconds(trained) == 4.0
    assert training_seconds([*trained, slow_evaluation]) == 1804.0
    assert training_seconds([*trained, *resumed]) == 6.0


def test_the_running_mean_neither_lags_nor_spreads_nan() -> None:
    straight = np.arange(50.0)
    np.testing.assert_allclose(running_mean(straight, 5)[2:-2], straight[2:-2])
    flat = np.full(20, 3.0)
    flat[4] = np.nan
    np.testing.assert_allclose(running_mean(flat, 6), 3.0)
    np.testing.assert_allclose(running_mean(np.array([1.0, 3.0]), 50), 2.0)


def test_the_last_record_of_a_step_counts() -> None:
    records: list[dict[str, float | None]] = [{"step": 2, "x": 1.0}, {"step": 1, "x": 5.0}, {"step": 2, "x": 7.0}]
    line = series(records, "x")
    assert line.steps.tolist() == [1.0, 2.0] and line.values.tolist() == [5.0, 7.0]
