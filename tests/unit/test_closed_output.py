"""Standard output or error that is closed, full, or unread: no traceback, and training continues without it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny import make_model, write_chats

ZEROLORA = Path(sys.executable).parent / "zerolora"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text("base_model: some/model\noutput_dir: run\ndataset: {path: data.jsonl}\n")
    return tmp_path


def run(words: str, how: str, folder: Path) -> tuple[int, str]:
    """The exit code, and what could be printed."""
    line = f"{ZEROLORA} {words} {how}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=500)
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed and "Exception ignored" not in printed, printed
    return done.returncode, printed


PRINTING = (
    "--version", "--help", "train --help", "config --schema", "config c.yaml", "validate c.yaml --settings-only",
    "sweep c.yaml seed=1,2 --dry-run", "submit c.yaml --dry-run", "train c.yaml --dry-run", "init --output new.yaml",
    "import --help", "scu-train --help", "estimate --help", "ops --help",
)  # fmt: skip
IMPORTING = ("estimate --help", "ops --help")
"""They import torch first, which takes seconds."""


@pytest.mark.parametrize(
    ("words", "how"),
    [(words, how) for words in PRINTING for how in (">&-", "> /dev/full") if how == ">&-" or words not in IMPORTING],
)
def test_commands_that_only_print_fail_in_one_line(folder: Path, words: str, how: str) -> None:
    code, printed = run(words, how, folder)
    assert code == 1 and "error: standard output: " in printed and "the output is incomplete" in printed


@pytest.mark.parametrize("how", ["2>&-", "2> /dev/full", "<&-", "2>&- <&-"])
@pytest.mark.parametrize("words", ["config c.yaml", "train c.yaml --dry-run", "validate c.yaml --settings-only"])
def test_standard_error_and_input_are_not_needed(folder: Path, words: str, how: str) -> None:
    code, printed = run(words, how, folder)
    assert code == 0 and printed


@pytest.mark.parametrize("how", [">&-", "2>&-", "> /dev/full", "2> /dev/full", ">&- 2>&- <&-", "2>&1 | head -0"])
@pytest.mark.parametrize("words", ["config none.yaml", "status nowhere", "estimate none.yaml", "train none.yaml"])
def test_a_mistake_is_2_whatever_can_be_printed(folder: Path, words: str, how: str) -> None:
    code, _ = run(words, how, folder)
    assert code == 2


WAYS = ["| head -1", ">&-", "> /dev/full", "2>&-", ">&- 2>&- <&-"]


@pytest.mark.parametrize("how", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_training_continues_without_its_console(folder: Path, how: str) -> None:
    """Also while the first rank checks, which prints by itself; the log says that the console was lost."""
    settings = {
        "base_model": str(make_model(folder / "model")),
        "output_dir": "run",
        "dataset": {"path": str(write_chats(folder / "d.jsonl", 8)), "max_length": 64, "cache_dir": "cache"},
        "training": {"max_steps": 1, "precision": "fp32", "max_restarts": 0},
        "logging": {"report_to": "none"},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(settings))
    code, printed = run("train c.yaml", how, folder)
    assert code == 0, printed
    assert (folder / "run" / "adapter_model.safetensors").is_file()
    log = (folder / "run" / "logs" / "rank-0.log").read_text()
    assert ("training continues without it" in log) == (how != "2>&-"), log
