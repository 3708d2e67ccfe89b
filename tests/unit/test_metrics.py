"""The measurements: what is written, what a resume cuts back, what is shown."""

import json
import math
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.config import LoggingSection, RunConfig, UserError
from trainer.contract.rank_arguments import build_resume_command, encode_command, get_typed_command
from trainer.monitor.metrics import Metrics, check_reporters, read_metrics
from trainer.monitor.report.write import format_end_summary

STEP = {
    "train/loss": 2.3456,
    "train/learning_rate": 2e-4,
    "train/grad_norm": 0.5,
    "perf/tokens_per_second": 12345.6,
    "memory/peak_gib": 3.21,
}
SCU = {"scu/s_ratio": 0.0201, "scu/target": 0.02, "scu/lambda": 0.1234}


def metrics(
    run_dir: Path, *, first: int = 0, total: int = 10, width: int | None = None, **logging: Any
) -> tuple[Metrics, StringIO]:
    """Metrics that show on a terminal of `width` columns, or elsewhere than on a terminal."""
    shown = StringIO()
    console = Console(file=shown, width=width or 200, force_terminal=width is not None, color_system=None)
    section = LoggingSection(**({"report_to": ()} | logging))
    return Metrics(run_dir, section, console, first_step=first, total_steps=total), shown


def log_steps(run_dir: Path, first: int, last: int, offset: float = 0.0, **options: Any) -> None:
    writer, _ = metrics(run_dir, first=first, **options)
    for step in range(first + 1, last + 1):
        writer.log(step, {"train/loss": step + offset})
    writer.close()


def test_jsonl_keeps_every_bit_and_is_strict_json(tmp_path: Path) -> None:
    writer, _ = metrics(tmp_path)
    writer.log(1, {"train/loss": 0.1 + 0.2, "train/grad_norm": math.nan, "eval/perplexity": math.inf})
    # Readable during the run, not only after `close`.
    line = (tmp_path / "metrics.jsonl").read_text()
    writer.close()
    record = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert record.pop("time") > 1e9
    assert record == {"step": 1, "train/loss": 0.1 + 0.2, "train/grad_norm": None, "eval/perplexity": None}


def test_resume_cuts_the_records_back(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 5)
    log_steps(tmp_path, 3, 6, offset=0.5)
    records = [(record["step"], record["train/loss"]) for record in read_metrics(tmp_path)]
    assert records == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5), (6, 6.5)]


def test_resume_survives_a_line_cut_short_by_a_kill(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/l')
    log_steps(tmp_path, 3, 4)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 5)
    log_steps(tmp_path, 0, 1)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl; use the output folder of a run"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"line 2 .*is not JSON"):
        read_metrics(tmp_path)


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 5, report_to=("tensorboard",), run_name="../my run")
    log_steps(tmp_path, 3, 6, offset=0.5, report_to=("tensorboard",), run_name="../my run")
    (folder,) = (tmp_path / "tensorboard").iterdir()  # whatever its name, a run stays inside its own folder
    events = EventAccumulator(str(folder))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5), (6, 6.5)]


def test_no_tensorboard_unless_asked_for(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_missing_reporter_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # how Python itself marks a module that cannot be imported
    with pytest.raises(UserError, match=r"logging\.report_to=wandb: .*not installed; run `pip install wandb`"):
        check_reporters(LoggingSection(report_to=("tensorboard", "wandb")))
    check_reporters(LoggingSection(report_to=("tensorboard",)))


def last_frame(shown: StringIO) -> str:
    """What the bar's line says in the end, without the control sequences."""
    lines = [line for line in re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "\n", shown.getvalue()).split("\n") if "left" in line]
    return lines[-1].strip("\r")


@pytest.mark.parametrize(
    ("width", "values", "expected"),
    [
        (60, STEP, ["1000/5000", "loss 2.346", "12,346 tok/s", " left"]),
        (60, STEP | SCU, ["1000/5000", "loss 2.346", "12,346 tok/s", " left"]),
        (80, STEP | SCU, ["1000/5000", "loss 2.346", "12,346 tok/s", "S 2.01/2.00%", "λ 0.123", " left"]),
        (200, STEP | SCU, ["1000/5000", "loss 2.346", "12,346 tok/s", "S 2.01/2.00%", "λ 0.123", " left"]),
        (80, {"train/loss": 1.0, "perf/tokens_per_second_per_gpu": 99.0}, ["loss 1.000", "99 tok/s/GPU", " left"]),
    ],
)
def test_the_bar_fits_the_terminal(tmp_path: Path, width: int, values: dict[str, float], expected: list[str]) -> None:
    writer, shown = metrics(tmp_path, total=5000, width=width)
    writer.display.update(1000, values)
    writer.close()
    line = last_frame(shown)
    assert len(line.rstrip()) <= width
    assert "━" in line and "…" not in line
    for word in expected:
        assert word in line


def test_some_lines_of_steps_stay_above_the_bar(tmp_path: Path) -> None:
    writer, shown = metrics(tmp_path, total=100, width=120)
    for step in range(1, 101):
        writer.log(step, STEP)
    writer.close()
    text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", shown.getvalue())
    assert [int(step) for step in re.findall(r"step +(\d+)/100", text)] == [1, *range(5, 101, 5)]


def test_lines_are_aligned_where_there_is_no_terminal(tmp_path: Path) -> None:
    writer, shown = metrics(tmp_path, total=1000)
    for step, scale in ((5, 1.0), (50, 4.0), (1000, 0.25)):
        values = {name: value * scale for name, value in STEP.items()} | {"train/epoch": step / 500}
        writer.display.update(step, values)
        writer.log(step, values)
    writer.log(1000, {"eval/loss": 2.0, "eval/bpt": 2.8854, "eval/perplexity": 7.389})
    writer.close()
    *lines, evaluation = shown.getvalue().splitlines()
    assert len(lines) == 3
    assert [line.split("epoch")[1].split()[0] for line in lines] == ["0.01", "0.10", "2.00"]
    for word in (" left", "epoch", "loss", "lr", "grad", "tok/s", "GiB"):
        assert len({line.index(word) for line in lines}) == 1, word
    assert evaluation == "step 1000/1000  held-out loss  2.0000  2.8854 bits/token  perplexity 7.39"


def test_off_shows_nothing(tmp_path: Path) -> None:
    writer, shown = metrics(tmp_path, width=80, progress="off")
    writer.display.update(1, STEP)
    writer.log(1, STEP | {"eval/loss": 2.0})
    writer.close()
    assert shown.getvalue() == ""


def test_time_left_follows_the_speed_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("trainer.monitor.display.time.monotonic", lambda: clock[0])
    writer, shown = metrics(tmp_path, first=100, total=2000)
    for step in range(101, 201):
        clock[0] += 2.0
        writer.display.update(step, STEP)
    writer.log(200, STEP)
    writer.close()
    # 1800 steps of 2 s: the 100 steps before the resume took no time here and must not count.
    assert "1:00:00 left" in shown.getvalue()


def test_close_may_be_called_twice(tmp_path: Path) -> None:
    writer, shown = metrics(tmp_path, width=80, report_to=("tensorboard",))
    writer.display.update(1, STEP)
    writer.close()
    before = shown.getvalue()
    writer.close()
    assert shown.getvalue() == before


@contextmanager
def full_disk(bytes_more: int, *files: Path) -> Iterator[None]:
    """No file may grow to more than `bytes_more` above the smallest of `files`: the kernel's own refusal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = min(file.stat().st_size for file in files) + bytes_more
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_pauses_the_metrics_and_loses_none(tmp_path: Path) -> None:
    writer, shown = metrics(tmp_path, total=6, progress="off")
    writer.log(1, {"train/loss": 1.0})
    with full_disk(30, tmp_path / "metrics.jsonl"):
        for step in (2, 3, 4):
            writer.log(step, {"train/loss": float(step)})
        assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    writer.log(5, {"train/loss": 5.0})
    with full_disk(0, tmp_path / "metrics.jsonl"):
        writer.log(6, {"train/loss": 6.0})
        writer.close()
    said = shown.getvalue().splitlines()
    again = "metrics are being written again; metrics.jsonl is complete"
    assert [line.partition(":")[0] for line in said] == ["warning", again, "warning", "warning"]
    assert "warning: File too large (the disk at /" in said[0] and "GiB free" in said[0]
    assert "the last metrics of this run were not written" in said[3]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_full_disk_ends_tensorboard_and_no_training(tmp_path: Path) -> None:
    shown = StringIO()
    section, settings = LoggingSection(report_to=("tensorboard",), progress="off"), {"base_model": "m" * 9999}
    writer = Metrics(tmp_path, section, Console(file=shown), first_step=0, total_steps=4, settings=settings)
    writer.log(1, {"train/loss": 1.0})
    with full_disk(9999, tmp_path / "metrics.jsonl"):  # room for the records, but not for the larger event file
        writer.log(2, {"train/loss": 2.0})
    # The writer's thread may fail after `flush` has returned; the next record then reports it.
    writer.log(3, {"train/loss": 3.0})
    writer.log(4, {"train/loss": 4.0})
    writer.close()
    assert "tensorboard: logging stopped: OSError" in shown.getvalue()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_tensorboard_opens_on_the_loss_and_has_the_configuration(tmp_path: Path) -> None:
    section = LoggingSection(report_to=("tensorboard",), progress="off")
    settings = {"base_model": "org/model", "training": {"learning_rate": 2e-4}, "dataset": {"path": "a.jsonl"}}
    writer = Metrics(tmp_path, section, Console(quiet=True), first_step=0, total_steps=2, settings=settings)
    writer.log(1, {"train/loss": 2.0, "perf/step_ms": 1.0, "eval/loss": 1.5, "eval/bpt": 2.0})
    writer.close()
    reader = EventAccumulator(str(next((tmp_path / "tensorboard").iterdir())))
    reader.Reload()
    tags = reader.Tags()
    assert sorted(tags["scalars"])[:2] == ["Loss/held out", "Loss/training"]
    assert "configuration/text_summary" in tags["tensors"]
    (text,) = reader.Tensors("configuration/text_summary")
    assert b"learning_rate: 0.0002" in text.tensor_proto.string_val[0]
    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"training.learning_rate" in content and b"org/model" in content
    assert b"eval/loss" in reader.SummaryMetadata("_hparams_/experiment").plugin_data.content


def test_the_first_step_is_left_out_of_the_time_remaining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("trainer.monitor.display.time.monotonic", lambda: clock[0])
    writer, shown = metrics(tmp_path, total=11)
    for step, seconds in ((1, 600.0), (2, 2.0), (3, 2.0)):
        clock[0] += seconds
        writer.log(step, STEP)
    writer.close()
    lines = shown.getvalue().splitlines()
    assert "-:--:-- left" in lines[0] and "0:00:16 left" in lines[2]


def test_the_command_typed_survives_the_way_to_the_ranks() -> None:
    typed = ["/usr/bin/zerolora", "train", "it's.yaml", "dataset.system_prompt=You; `are` $1 \u00e9", "--num-gpus", "2"]
    argument = encode_command(typed)
    assert re.fullmatch(r"--typed=[\w-]+", argument)
    inner = ["/x/trainer/train.py", "it's.yaml", "--lock", "0123", argument, "--console", "/tmp/x"]
    assert get_typed_command(inner) == ["zerolora", *typed[1:]]
    assert get_typed_command(["/x/train.py", "c.yaml"]) == ["train.py", "c.yaml"]


def test_the_command_that_resumes_a_run_can_be_pasted() -> None:
    typed = ["/x/bin/zerolora", "train", "my run.yaml", "resume_from_checkpoint=auto", "--num-gpus", "2"]
    inner = ["/x/trainer/train.py", "my run.yaml", encode_command(typed)]
    expected = "zerolora train 'my run.yaml' --num-gpus 2 training.resume_from_checkpoint=latest"
    assert build_resume_command(inner, overwrites=False) == expected
    assert build_resume_command(inner, overwrites=True) == f"{expected} output.overwrite=false"
    by_torchrun = build_resume_command(["/x/trainer/train.py", "c.yaml"], overwrites=False)
    assert by_torchrun == "the same command plus training.resume_from_checkpoint=latest"


def test_the_end_names_the_next_commands(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    dataset = {"path": "a.jsonl", "val_split": 0.1}
    config = RunConfig.model_validate({"base_model": "m", "output_dir": str(folder), "dataset": dataset})
    lines = format_end_summary(folder, config.model_dump(mode="json"), folder / "report.html", 2.0, 1.0)
    for command in ("eval", "generate", "merge"):
        assert sum(f"zerolora {command} '{folder}'" in line for line in lines) == 1
    assert lines[0].startswith("held-out loss") and f"tensorboard --logdir '{folder}/tensorboard'" in lines[-1]
    lines = format_end_summary(folder, config.model_dump(mode="json"), None, None, None)
    assert not any("report.html" in line for line in lines)
