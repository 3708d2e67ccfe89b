"""`zerolora validate --settings-only` and `--fix`: what is mended in a file without asking, and what is told."""

import stat
from pathlib import Path

import pytest

from trainer.commands.validate import main as validate
from trainer.config import load_config
from trainer.config.repair import repaired

WRONG = """\
# My run, with a comment above.
base_modle: m        # the model
output_dir: runs/x
micro_batch_size: 2  # small
datasets:
  - path: a.jsonl    # first
    type: alpaca
    wieght: 2
lora:
  rnak: 8
training:
  lr: 1e-4           # as ever
  optimizer: adamw_8bits
  torch_compile: "yes"
"""
RIGHT = """\
# My run, with a comment above.
base_model: m        # the model
output_dir: runs/x
training.batch_size: 2  # small
dataset.mix:
  - path: a.jsonl    # first
    format: alpaca
    weight: 2
lora:
  r: 8
training:
  learning_rate: 1e-4           # as ever
  optimizer: adamw_8bit
  torch_compile: true
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(WRONG)
    return Path("c.yaml")


def test_names_and_words_are_mended_and_comments_kept(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(["c.yaml", "--fix"]) == 0
    out = capsys.readouterr().out
    assert "-base_modle: m        # the model\n+base_model: m        # the model\n" in out and "OK: the settings" in out
    assert file.read_text() == RIGHT and Path("c.yaml.orig").read_text() == WRONG
    config = load_config(file).config
    assert (config.lora.r, config.training.batch_size, config.dataset.mix[0].weight) == (8, 2, 2.0)
    assert repaired(file) == (RIGHT, []), "what is mended stays as it is"


def test_a_link_stays_one_and_a_mode_too(file: Path) -> None:
    target = Path("shared.yaml")
    file.rename(target)
    target.chmod(0o640)
    file.symlink_to(target)
    assert validate(["c.yaml", "--fix"]) == 0
    assert file.is_symlink() and target.read_text() == RIGHT
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_what_is_left_is_told_and_nothing_is_overwritten(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(WRONG + "  epochs: -1\n  nothing_like_it: high\n")
    assert validate(["c.yaml", "--fix", "-o", "d.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: training.epochs=-1: must be above 0 (d.yaml:15)",
        "error: training.nothing_like_it: unknown setting; `zerolora config --schema` lists all of them (d.yaml:16)",
    ]
    assert file.read_text() == WRONG + "  epochs: -1\n  nothing_like_it: high\n"
    assert Path("d.yaml").read_text() == RIGHT + "  epochs: -1\n  nothing_like_it: high\n"
    assert validate(["c.yaml", "--fix", "-o", "d.yaml"]) == 2
    assert "d.yaml: is there already" in capsys.readouterr().err
    Path("c.yaml.orig").write_text("mine")
    assert validate(["c.yaml", "--fix"]) == 2
    assert "c.yaml.orig: is there already" in capsys.readouterr().err
    assert Path("c.yaml.orig").read_text() == "mine" and file.read_text().startswith(WRONG)


def test_a_name_of_which_both_are_there_is_not_mended(file: Path) -> None:
    text = "base_model: m\noutput_dir: x\ndataset: {path: d}\nlora:\n  r: 8\n  rnak: 9\n"
    file.write_text(text)
    new, left = repaired(file)
    assert new == text and left == ["lora.rnak: unknown setting; did you mean lora.r? (c.yaml:6)"]


def test_settings_are_checked_without_model_and_data(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("base_model: no/such-model\noutput_dir: x\ndataset: {path: nowhere.jsonl}\n")
    assert validate(["c.yaml", "lora.r=4", "--settings-only"]) == 0
    assert validate(["c.yaml", "lora.r=0", "--settings-only"]) == 2
    assert capsys.readouterr().err == "error: lora.r=0: must be 1 or more (command line)\n"
