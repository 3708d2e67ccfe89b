"""The report: numbers against a hand count, charts that show what they say, a page that needs no other file."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from trainer.checkpoint.run_record import write_run_record
from trainer.config import LoggingSection, RunConfig, UserError
from trainer.contract.rank_arguments import encode_command
from trainer.monitor.metrics import Metrics, Record, read_metrics
from trainer.monitor.report.__main__ import main
from trainer.monitor.report.charts import build_charts, render_chart
from trainer.monitor.report.comparison import write_comparison_page
from trainer.monitor.report.curves import compute_running_mean, extract_series
from trainer.monitor.report.model_card import build_model_card
from trainer.monitor.report.recorded import read_times, record_examples, record_times
from trainer.monitor.report.write import record_answer, sum_training_seconds, write_report

STEPS = 80


def make_run(run_dir: Path, *, scu: bool = False, name: str = "a run", evaluate: bool = True) -> None:
    """A run with a loss falling from 4 to 2, written by the real writers."""
    config = RunConfig.model_validate(
        {
            "base_model": "models/tiny",
            "output_dir": str(run_dir),
            "dataset": {"path": "data/train.jsonl", "val_split": 0.1, "max_length": 512},
            "training": {"batch_size": 2, "gradient_accumulation_steps": 3},
            "logging": {"run_name": name},
        }
    )
    write_run_record(run_dir, config.model_dump_json(), world_size=2, device="cpu", precision="fp32")
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
            values |= {"scu/data_bpt": loss / np.log(2), "scu/param_bpt": 0.05, "scu/s_smoothed": share}
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
    assert rows["tokens"] == "80,000, 32,000 of them trained on"
    assert rows["optimizer"] == "adamw, precision fp32, ZeRO stage 2", "what `auto` came to"
    assert rows["batch"] == "12 sequences = 2 x 3 micro-steps x 2 ranks"
    assert rows["training loss"] == "first 3.9750, last 2.0000, lowest 2.0000"
    assert rows["held-out loss"] == "before 4.0000, after 2.0000 (step 80), lowest 1.5000 at step 40"
    assert rows["tokens/s per rank"] == "101 (median)"
    assert "<b>1.25 GiB</b><span>on rank 0</span>" in page
    assert "torch 2" in rows["versions"]
    assert "<b>4.000 → 2.000</b><span>−50.0%</span>" in page  # noqa: RUF001
    assert "<b>202</b><span>101 per rank, 2 ranks</span>" in page


def test_ranks_that_share_sequences_count_as_one(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = tmp_path / "training_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parallel": {"sequence": 2}}))
    rows = rows_of(write_report(tmp_path).read_text())
    assert rows["batch"] == "6 sequences = 2 x 3 micro-steps x 2 ranks / 2 per sequence"


def test_the_page_stands_alone(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "http" not in page and "src=" not in page and "url(" not in page and "<script" not in page
    assert all(not link.startswith("/") for link in re.findall(r'href="(.*?)"', page))
    drawn = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Peak memory"]
    assert re.findall('role="img" aria-label="(.*?)"', page) == drawn


def test_the_loss_chart_marks_the_kept_step() -> None:
    records: list[Record] = [{"step": step, "train/loss": 2.0, "eval/loss": 3.0 - step / 10} for step in (1.0, 2.0)]
    records[-1] |= {"eval/kept_step": 1.0, "eval/kept_loss": 2.9}
    (loss,) = [chart for chart in build_charts(records) if chart.title == "Loss"]
    [kept] = [curve for curve in loss.curves if curve.label.startswith("kept")]
    assert (kept.label, kept.kind, kept.color) == ("kept: step 1", "dots", "green")
    assert (kept.line.steps.tolist(), kept.line.values.tolist()) == ([1.0], [2.9])


def test_the_charts_of_the_page_are_at_the_places_of_their_values(tmp_path: Path) -> None:
    """Held-out losses are points at their steps; training losses are there raw and as a mean; a gap stays one."""
    make_run(tmp_path)
    records = read_metrics(tmp_path)
    (loss,) = [chart for chart in build_charts(records) if chart.title == "Loss"]
    assert [(curve.kind, curve.label) for curve in loss.curves] == [
        ("pale", "training, each record"),
        ("line", "mean of 5"),
        ("dashed", ""),
        ("dots", "held out, 4.000 → 2.000"),
    ]
    drawn = render_chart(loss)
    dots = re.findall(r'class="orange dots" d="M([\d.]+) ([\d.]+)h0"><title>step ([\d,]+): ([\d.]+)', drawn)
    marks = [float(mark) for mark in re.findall(r'class="y" style="top:[\d.]+%">([\d.]+)<', drawn)]
    low, high = marks[0], marks[-1]
    for (x, y, step, value), (true_step, true_value) in zip(dots, [(1, 4.0), (40, 1.5), (80, 2.0)], strict=True):
        assert (int(step), float(value)) == (true_step, true_value)
        assert float(x) == pytest.approx(1000 * (true_step - 1) / 79, abs=0.1)
        assert float(y) == pytest.approx(1000 * (high - true_value) / (high - low), abs=0.1)
    records[10]["train/grad_norm"] = None
    (norm,) = [chart for chart in build_charts(records) if chart.title == "Gradient norm"]
    raw = re.search(r'class="blue pale" d="(.*?)"', render_chart(norm))
    assert raw is not None and raw[1].count("M") == 2


def test_the_page_of_a_long_run_stays_small_and_keeps_its_peaks(tmp_path: Path) -> None:
    records = [{"step": step, "time": float(step), "train/loss": 2.0 + step % 7, "perf/tokens_per_second_per_gpu": 9.0,
                "train/grad_norm": 100.0 if step == 33_333 else 1.0} for step in range(1, 60_001)]  # fmt: skip
    page = "".join(map(render_chart, build_charts(list(map(dict, records)))))
    assert len(page) < 300_000
    (norm,) = [chart for chart in build_charts(list(map(dict, records))) if chart.title == "Gradient norm"]
    assert re.search(r'pale" d="[^"]*L555\.\d 0\.0', render_chart(norm))


def test_model_data_command_answers_and_next_steps_are_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["/usr/bin/zerolora", "train", "c.yaml", "logging.run_name=a run"]
    monkeypatch.setattr(
        "sys.argv", ["train.py", "c.yaml", "--lock", "01", encode_command(typed), "--console", "/tmp/x"]
    )
    make_run(tmp_path)
    record_answer(tmp_path, "Who <are> you?", "before", "I am lost")
    record_answer(tmp_path, "Who <are> you?", "after", "A <b>tiny</b> model")
    record_answer(tmp_path, "never answered again", "before", "x")
    page = write_report(tmp_path).read_text()
    assert rows_of(page)["command"] == "zerolora train c.yaml &#39;logging.run_name=a run&#39;"
    assert "<title>a run: models/tiny on data/train.jsonl" in page
    assert "<h3>Who &lt;are&gt; you?</h3>" in page
    assert "<td>I am lost</td><td>A &lt;b&gt;tiny&lt;/b&gt; model</td>" in page
    assert "never answered" not in page
    assert f"zerolora eval {tmp_path}" in page and '<a href="metrics.jsonl">' in page
    assert "prefers-color-scheme: dark" in page


def test_settings_that_are_not_at_their_defaults_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = write_report(tmp_path).read_text()
    found = re.findall(r"<tr><th>([\w.]+)</th><td><code>(.*?)</code></td><td><code>(.*?)</code></td></tr>", page)
    changed = {name: (here, default) for name, here, default in found}
    assert changed["training.batch_size"] == ("2", "1") and changed["dataset.val_split"] == ("0.1", "0.0")
    assert changed["base_model"] == ("models/tiny", "required") and "lora.r" not in changed
    assert "<summary>All settings</summary>" in page and "max_live_parameters: 1000000000" in page


def test_time_by_phase_is_shown_longest_first(tmp_path: Path) -> None:
    make_run(tmp_path)
    record_times(tmp_path, {"start": 5.0, "steps": 60.0, "save": 0.1}, resumes=False)
    record_times(tmp_path, {"start": 5.0, "evaluate": 30.0}, resumes=True)
    page = write_report(tmp_path).read_text()
    rows = re.findall(r'swatch run\d"></span>(\w+)</th><td>([\d.]+) s</td><td>(\d+)%</td>', page)
    assert rows == [
        ("steps", "60.0", "60"),
        ("evaluate", "30.0", "30"),
        ("start", "10.0", "10"),
        ("others", "0.1", "0"),
    ]
    assert re.findall(r'<i class="run\d" style="width:([\d.]+)%">', page) == ["59.94", "29.97", "9.99", "0.10"]
    record_times(tmp_path, {"start": 1.0}, resumes=False)
    assert read_times(tmp_path) == {"start": 1.0}, "a run that starts over counts again"


def make_two(folder: Path) -> list[Path]:
    for name, scu in (("one", False), ("two", True)):
        make_run(folder / name, scu=scu, name=name)
        record_answer(folder / name, "Who?", "before", "I am lost")
        record_answer(folder / name, "Who?", "after", f"I am {name}")
    config = json.loads((folder / "two" / "training_config.json").read_text())
    config["training"]["learning_rate"] = 0.003
    (folder / "two" / "training_config.json").write_text(json.dumps(config))
    return [folder / "one", folder / "two"]


def test_several_runs_lie_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = make_two(tmp_path)
    output = tmp_path / "both.html"
    assert main([*map(str, runs), "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    page = output.read_text()
    assert "<title>2 runs: one · two</title>" in page
    assert re.findall(r"<figcaption><h2>([\w :]+)", page) == [
        *("Loss ", "Learning rate", "Gradient norm ", "Throughput ", "Peak memory "),
        *("SCU: S ", "SCU: λ", "SCU: DataBPT", "SCU: ParamBPT"),
    ]
    loss = page.split("</figure>")[0]
    for at, name in enumerate(("one", "two")):
        kinds = re.findall(rf'<path class="run{at} (\w+)"', loss)
        assert kinds == ["line", "dashed", "dots", "dots", "dots"]
        assert f'<span class="run{at} line">{name}</span>' in loss
    differ = re.findall(r"<tr><th>([\w.]+)</th><td><code>(.*?)</code></td><td><code>(.*?)</code></td></tr>", page)
    assert differ == [("training.learning_rate", "0.0002", "0.003")]
    assert (
        "<tr><th>before</th><th>one</th><th>two</th></tr><tr><td>I am lost</td><td>I am one</td><td>I am two</td>"
        in page
    )
    assert "<td>4.0000 → 2.0000</td><td>1.5000</td><td>2.0875</td><td>101 tokens/s</td><td>1.25 GiB</td>" in page
    assert "http" not in page and "src=" not in page and "<script" not in page and len(page) < 200_000


def test_runs_on_pictures_have_their_own_words(tmp_path: Path) -> None:
    runs = make_two(tmp_path)
    for run in runs:
        lines = (run / "metrics.jsonl").read_text().replace("tokens_per_second", "images_per_second")
        (run / "metrics.jsonl").write_text(lines.replace("train/tokens", "train/images"))
    both = write_comparison_page(runs, tmp_path / "both.html").read_text()
    assert "<td>101.00 images/s</td>" in both and "mean squared error" in both and "nats" not in both
    words = write_report(runs[0]).read_text()
    assert "images/s per rank" in words and "<th>images</th>" in words and "nats" not in words


def test_several_runs_that_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(folder) for folder in make_two(tmp_path)]
    output = tmp_path / "page.html"

    def line(*words: str) -> str:
        assert main([*words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and not output.exists()
        return said

    assert "is listed twice" in line(runs[0], runs[0], "--output", str(output))
    assert "9 runs, but at most 8 fit on a page" in line(*[runs[0]] * 9, "--output", str(output))
    assert "has no metrics.jsonl; use the output folder" in line(runs[0], str(tmp_path), "--output", str(output))
    assert "--output" in line(runs[0], "--output", str(output))
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "a"}')
    assert "train.jsonl: already exists with other content; use another file" in line(*runs, "--output", str(data))
    assert data.read_text() == '{"text": "a"}'
    (tmp_path / "deep" / "one").mkdir(parents=True)
    (tmp_path / "deep" / "one" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 2.0}\n')
    assert main([runs[0], str(tmp_path / "deep" / "one"), "--output", str(output)]) == 0
    assert "one · deep/one" in output.read_text()


def test_scu_charts_come_with_scu_metrics(tmp_path: Path) -> None:
    make_run(tmp_path, scu=True)
    page = write_report(tmp_path).read_text()
    assert re.findall(r'aria-label="SCU: (\w+)', page) == ["S", "λ", "DataBPT", "ParamBPT"]
    assert rows_of(page)["SCU S"] == "first 2.987%, last 2.000%, target 2.000%"


def test_s_is_drawn_against_target_and_deadband(tmp_path: Path) -> None:
    make_run(tmp_path, scu=True)
    (s,) = [chart for chart in build_charts(read_metrics(tmp_path), deadband=0.003) if chart.title == "SCU: S"]
    lines = {curve.label: curve.line.values for curve in s.curves}
    np.testing.assert_allclose(lines["target"], 2.0)
    np.testing.assert_allclose(lines["smoothed S"], 3.0 - np.arange(1, STEPS + 1) / STEPS)
    assert s.band == pytest.approx((1.7, 2.3))
    drawn = render_chart(s)
    marks = [float(mark) for mark in re.findall(r'class="y" style="top:[\d.]+%">([\d.]+)<', drawn)]
    [(y, height)] = re.findall(r'class="band"[^>]* y="([\d.-]+)" height="([\d.-]+)"', drawn)
    scale = (marks[-1] - marks[0]) / 1000
    assert [float(y) * scale, float(height) * scale] == pytest.approx([marks[-1] - 2.3, 0.6], abs=1e-3)


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
    assert np.isnan(extract_series(records, "train/loss").values).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("content", "message"), [(None, "has no metrics.jsonl"), ("", "no step has finished yet")])
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
    assert sum_training_seconds(trained) == 4.0
    assert sum_training_seconds([*trained, slow_evaluation]) == 1804.0
    assert sum_training_seconds([*trained, *resumed]) == 6.0


def test_the_running_mean_neither_lags_nor_spreads_nan() -> None:
    straight = np.arange(50.0)
    np.testing.assert_allclose(compute_running_mean(straight, 5)[2:-2], straight[2:-2])
    flat = np.full(20, 3.0)
    flat[4] = np.nan
    np.testing.assert_allclose(compute_running_mean(flat, 6), 3.0)
    np.testing.assert_allclose(compute_running_mean(np.array([1.0, 3.0]), 50), 2.0)


def test_the_last_record_of_a_step_counts() -> None:
    records: list[dict[str, float | None]] = [{"step": 2, "x": 1.0}, {"step": 1, "x": 5.0}, {"step": 2, "x": 7.0}]
    line = extract_series(records, "x")
    assert line.steps.tolist() == [1.0, 2.0] and line.values.tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("training_config.json", '"base_model"', '"base_model_"', "base_model: is missing"),
        ("training_config.json", '"val_split":0.1', '"val_split":{}', "dataset.val_split"),
        ("run.json", '"command"', '"comand"', "command: is missing"),
        ("run.json", '"world_size": 2', '"world_size": null', "world_size"),
        ("answers.json", '"I am lost"', "7", "who.before"),
        ("time_by_phase.json", "5.0", '"long"', "start"),
    ],
)
def test_a_record_of_another_shape_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, words: str
) -> None:
    make_run(tmp_path)
    record_answer(tmp_path, "who", "before", "I am lost")
    record_times(tmp_path, {"start": 5.0}, resumes=False)
    content = (tmp_path / name).read_text().replace('"val_split": ', '"val_split":')
    assert old in content
    (tmp_path / name).write_text(content.replace(old, new))
    before = sorted(tmp_path.rglob("*"))
    assert main([str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {tmp_path / name}: ") and words in line and line.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_the_page_leads_with_the_result_and_shows_warnings_and_examples(tmp_path: Path) -> None:
    make_run(tmp_path)
    for when, answer in (("before", "lost"), ("after", "found")):
        record_answer(tmp_path, "Who?", when, answer)
    record_examples(tmp_path, [("<1>", [(0.0, "a <b> question"), (1.0, "an <i>answer</i>"), (0.5, "x" * 5000)])])
    (tmp_path / "logs").mkdir()
    times = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (0.0, time.time() - 60, time.time() + 60)]
    texts = ("of an earlier run", "slow <rank>", "slow <rank>")
    lines = [f"== {at}  rank 0  process 1 ==\nwarning: {text}\n" for at, text in zip(times, texts, strict=True)]
    (tmp_path / "logs" / "rank-0.log").write_text("".join(lines) + "UserWarning: of a library\n")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 80, "time": {time.time()}, "eval/kept_step": 40.0, "eval/kept_loss": 1.5}}\n')
    page = write_report(tmp_path).read_text()
    order = [
        "held-out loss",
        "<h2>Loss",
        "<h2>Answers",
        "<h2>Settings",
        "<h2>Warnings",
        "<h2>Training ex",
        "Throughput",
    ]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)
    assert "kept: step 40" in page.partition("</div>")[0], "the tile of the held-out loss"
    assert page.count("<li>") == 1 and "<li>slow &lt;rank&gt;</li>" in page
    assert "<h3>&lt;1&gt;</h3>" in page
    assert "a &lt;b&gt; question<mark>an &lt;i&gt;answer&lt;/i&gt;</mark><mark>0.5: xxx" in page
    assert "x" * 1000 not in page
    others = [
        path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("examples.json", "report.html")
    ]
    assert not any(b"question" in path.read_bytes() for path in others)


def test_settings_have_no_rows_of_nulls_and_names_instead_of_cache_paths(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = tmp_path / "training_config.json"
    config = json.loads(path.read_text())
    hub = "/home/x/.cache/huggingface/hub"
    config["base_model"] = f"{hub}/models--owner--tiny/snapshots/0123"
    config["dataset"] |= {"path": f"{hub}/datasets--owner--chats/snapshots/4567", "val_split": 0.0}
    config["dataset"] |= {"evaluation": {"path": "/x/.cache/zerolora/made/held.jsonl"}, "cache_dir": "/scratch/cache"}
    path.write_text(json.dumps(config))
    page = write_report(tmp_path).read_text()
    found = re.findall(r"<tr><th>([\w.]+)</th><td><code>(.*?)</code></td><td><code>(.*?)</code></td></tr>", page)
    changed = {name: here for name, here, _ in found}
    assert changed["dataset.evaluation.path"] == "made/held.jsonl" and changed["base_model"] == "owner/tiny"
    assert "null" not in changed.values() and "dataset.cache_dir" not in changed
    assert len([name for name in changed if name.startswith("dataset.evaluation")]) == 1
    assert "<title>a run: owner/tiny on owner/chats" in page
    assert hub not in page and ": null" not in page


def test_preference_runs_have_charts_of_margins_and_accuracies(tmp_path: Path) -> None:
    make_run(tmp_path)
    records = read_metrics(tmp_path)
    for record in records:
        kind = "eval" if "eval/loss" in record else "train"
        values = {"margins": 0.1 * (record["step"] or 0), "accuracies": 0.75, "chosen": 0.1}
        record |= {f"{kind}/rewards/{name}": value for name, value in values.items()}
    found = {chart.title: chart for chart in build_charts(records)}
    for name in ("Reward margin", "Reward accuracy"):
        assert [curve.label for curve in found[name].curves] == ["training, each record", "mean of 5", "", "held out"]
    held_out = found["Reward margin"].curves[-1].line
    assert held_out.steps.tolist() == [1, 40, 80] and held_out.values == pytest.approx([0.1, 4.0, 8.0])
    assert found["Loss"].unit == "nats per pair"
    records[0]["train/kl"] = 0.1
    assert build_charts(records)[0].unit == "per answer", "of labeled answers"


def test_scores_are_drawn_on_the_page_and_in_the_card(tmp_path: Path) -> None:
    make_run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/loss" in line]
    for line, score in zip(evaluations, (0.25, 0.5, 0.75), strict=True):
        line |= {"eval/quiz/acc": score, "eval/roll/perplexity": 100 * score}
    evaluations[0] |= {"base/quiz/acc": 0.25, "base/roll/perplexity": 30.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = read_metrics(tmp_path)
    found = {chart.title: chart for chart in build_charts(records)}
    base, adapter, dots = found["quiz/acc"].curves
    assert (base.label, adapter.label) == ("base, 0.25", "adapter, 0.75")
    assert base.line.values.tolist() == [0.25] * 3 and adapter.line.steps.tolist() == [1, 40, 80]
    assert dots.line.values.tolist() == [0.25, 0.5, 0.75] and found["roll/perplexity"].is_leading

    page = write_report(tmp_path).read_text()
    assert page.index("quiz/acc") < page.index("Learning rate"), "before the charts of details"
    assert rows_of(page)["quiz/acc"] == "before 0.2500, after 0.7500"
    settings = json.loads((tmp_path / "training_config.json").read_text())
    card = build_model_card(
        settings, tmp_path, records, name="me/mine", auto_class="AutoModelForCausalLM", pipeline_tag="text-generation"
    )
    bars = card[card.index("```text") :].splitlines()
    assert [line.count("█") for line in bars[2:4]] == [10, 30] and bars[1] == "quiz/acc"
    assert bars[4] == "```", "a perplexity has no bar"


def test_runs_are_sorted_by_their_held_out_loss(tmp_path: Path) -> None:
    runs = make_two(tmp_path)
    better = (runs[1] / "metrics.jsonl").read_text().replace('"eval/loss": 2.0', '"eval/loss": 1.8')
    (runs[1] / "metrics.jsonl").write_text(better)
    page = write_comparison_page(runs, tmp_path / "both.html").read_text()
    assert "<title>2 runs: two · one</title>" in page
    assert page.index("<h2>Results") < page.index("<h2>Loss")
    assert re.findall(r"<th><i class=run\d></i>(\w+)</th>", page) == ["two", "one"]
