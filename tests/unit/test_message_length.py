"""Values of any length: what is said of them is a line that one can read, with the setting first and the fix last."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.commands import main as zerolora
from tests.tiny import make_model, write_chats
from trainer.config import UserError, load_config
from trainer.config.errors import LONGEST_LINE, MAX_LINES, UserErrors, format_one_line
from trainer.config.messages import list_setting_names
from trainer.setup.preflight import prepare

LONG = {
    # Half a millisecond a bracket, that is how long YAML takes.
    "brackets": "[" * 600 + "]" * 600,
    "open brackets": "[" * 1_200,
    "word": "x" * 10_000,
    "words": "never say no. " * 1_000,
    "list": f"[{', '.join(['q_project'] * 150)}]",
    "map": f"{{{', '.join(f'key{at}: value' for at in range(100))}}}",
    "path": "/folder" * 2_000,
    "digits": "9" * 4_000,
}
PREPARED = (
    *("base_model", "output_dir", "model.tokenizer", "model.revision", "model.pad_token", "model.added_tokens"),
    *("lora.target_modules", "lora.exclude_modules", "lora.modules_to_save", "lora.adapter_path", "dataset.path"),
    *("dataset.split", "dataset.fields.prompt", "dataset.template", "dataset.chat_template", "dataset.cache_dir"),
    *("dataset.evaluation.path", "training.resume_from_checkpoint", "logging.run_name", "zero.extra.scheduler"),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    make_model(folder / "model")
    data = f"dataset: {{path: {write_chats(folder / 'd.jsonl', 8)}, max_length: 64, cache_dir: {folder / 'cache'}}}\n"
    (folder / "c.yaml").write_text(f"base_model: {folder / 'model'}\noutput_dir: {folder / 'run'}\n{data}")
    return folder / "c.yaml"


def lines_of(run: Callable[[], Any]) -> list[str]:
    try:
        found = run()
    except UserErrors as error:
        return error.messages
    except UserError as error:
        return [str(error)]
    return [*getattr(found, "notes", ())]


def assert_bounded(lines: list[str], about: str) -> None:
    for line in lines:
        assert len(line) <= LONGEST_LINE and "\n" not in line, (about, len(line), line[:300])


@pytest.mark.parametrize("kind", LONG)
def test_a_long_value_of_any_setting(kind: str, config: Path) -> None:
    for name in list_setting_names()[:: 1 if kind in ("word", "words", "path", "digits") else 7]:
        lines = lines_of(lambda name=name: load_config(config, [f"{name}={LONG[kind]}"]))  # type: ignore[misc]
        assert_bounded(lines, name)
        named = [line for line in lines if "more mistakes; fix these first" not in line]
        assert all(line.startswith(name) for line in named if kind != "map"), (name, lines)


@pytest.mark.parametrize("kind", LONG)
def test_a_long_value_that_the_checks_look_at(kind: str, config: Path) -> None:
    """Only settings with a type that allows it: the model, the data and the folders."""
    for name in PREPARED:
        lines = lines_of(lambda name=name: prepare(load_config(config, [f"{name}={LONG[kind]}"]).config))  # type: ignore[misc]
        assert_bounded(lines, name)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "{long}"), ("train", "c.yaml", "{long}"), ("train", "c.yaml", "{long}=1"),
        ("train", "c.yaml", "--launcher", "{long}"), ("train", "c.yaml", "--include", "{long}"),
        ("train", "c.yaml", "--num-gpus", "{long}"), ("train", "c.yaml", "--hostfile", "{long}"),
        ("train", "c.yaml", "--{long}"), ("status", "{long}"), ("init", "--preset", "{long}"), ("{long}",),
        ("init", "--output", "{long}"), ("submit", "c.yaml", "--time", "{long}"), ("doctor", "{long}"),
        ("config", "{long}"),
    ],
    ids=lambda words: " ".join(words),
)  # fmt: skip
def test_long_words_on_the_command_line(
    words: tuple[str, ...], config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(config.parent)
    for long in ("x" * 10_000, "x/" * 5_000, "1" * 5_000, "a b " * 2_000):
        monkeypatch.setattr(sys, "argv", ["zerolora", *(word.replace("{long}", long) for word in words)])
        assert zerolora() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and len(line) <= LONGEST_LINE + 100, (len(line), line[:300])


def test_the_beginning_and_the_end_of_a_message_stay() -> None:
    line = format_one_line(f"lora.r={'9' * 2_000}: {'must be a whole number ' * 100}; use 16")
    assert line.startswith("lora.r=999") and line.endswith("; use 16") and len(line) == LONGEST_LINE
    assert format_one_line("as it\n  stands") == "as it stands"


def test_more_mistakes_than_anyone_reads_are_counted() -> None:
    reported = UserErrors([f"s{at}: unknown setting" for at in range(1_000)])
    assert len(reported.messages) == MAX_LINES + 1 and reported.messages[-1].startswith("and 900 more mistakes")
