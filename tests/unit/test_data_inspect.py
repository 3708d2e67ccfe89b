"""`zerolora inspect`: trained tokens marked, the figures, the list_mask_warnings, and exit code 2 after one line."""

import io
import json
import re
import sys
from pathlib import Path

import datasets
import pytest

from tests.tiny import make_tokenizer, write_chats
from trainer.commands import inspect
from trainer.data.grouping import DataStats
from trainer.setup.shown_data import list_mask_warnings

CONFIG = """
base_model: model
output_dir: run
dataset: {path: chats.jsonl, max_length: 64, cache_dir: cache}
"""


@pytest.fixture(autouse=True)
def _run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    make_tokenizer(Path("model"))
    Path("model/config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 256}))
    Path("config.yaml").write_text(CONFIG)
    write_chats(Path("chats.jsonl"), 20)


def shown(capsys: pytest.CaptureFixture[str], *overrides: str, examples: int = 1) -> str:
    shown = [] if "--step" in overrides else ["--examples", str(examples)]
    assert inspect.main(["config.yaml", *overrides, *shown]) == 0
    return capsys.readouterr().out


def test_shows_trained_tokens_in_brackets_where_there_are_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, examples=2)
    question, answer = (
        turn["content"] for turn in json.loads(Path("chats.jsonl").read_text().split("\n")[0])["messages"]
    )
    assert out.count("⟦") == 4 and "example 2:" in out  # the titles have two of them
    assert "example 3:" not in out
    assert f"⟦{answer}<|im_end|>⟧" in out and f"⟦{question}" not in out
    assert "train: 20 documents" in out and "warning" not in out
    assert not Path("run").exists()


def test_shows_weights_below_1_and_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue", "weight": 0.25}]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    out = shown(capsys, "training.loss=dft", "training.neftune_noise_alpha=5")
    assert "⟦0.25: blue<|im_end|>⟧" in out and ", 4 trained (" in out and "%, in ⟦⟧)" in out
    assert "loss: dft; noise on embeddings: 5" in out


def test_counts_the_trained_tokens_of_an_example_as_the_totals_do(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts.jsonl").write_text('{"text": "a"}\n{"text": "b c"}\n')
    out = shown(capsys, "dataset.path=texts.jsonl", examples=2)
    examples = re.findall(r"example \d: (\d+) tokens, (\d+) trained", out)
    total = re.search(r"2 documents, (\d+) tokens, (\d+) of them trained", out)
    assert total and examples == [(tokens, str(int(tokens) - 1)) for tokens, _ in examples]
    assert [sum(map(int, column)) for column in zip(*examples, strict=True)] == [int(count) for count in total.groups()]


def test_shows_no_escape_sequences_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [("user", "red \x1b]0;title\x07cat"), ("assistant", "blue \x1b[2Jdog\x9d0;x\x07")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    Path("chats.jsonl").write_text((json.dumps(record) + "\n") * 8)
    for out in (shown(capsys), shown(capsys, "--step", "1", "--ranks", "1")):
        assert "red cat" in out and "blue dog" in out and not set(out) & {"\x1b", "\x07", "\x9d"}


def test_a_step_beyond_the_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["config.yaml", "--step", "5", "--ranks", "1", "training.max_steps=4"]) == 2
    assert capsys.readouterr().err.startswith("error: --step 5: the run has only 4 steps; use 1 to 4")


def test_shows_them_in_colour_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = shown(capsys)
    answer = json.loads(Path("chats.jsonl").read_text().split("\n")[0])["messages"][1]["content"]
    assert f"\x1b[1;32m{answer}<|im_end|>" in out and "⟦" not in out


def test_packs_show_their_documents_and_how_full_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "dataset.packing=true", "dataset.max_length=150")
    assert "next document" in out and "documents" in out.split("\n")[0]
    assert "packs" in out and "% full" in out
    assert out.count("next document") == 1  # of the pack's documents the first two
    assert re.search(r"and \d+ more documents? in this pack", out)


def test_a_stream_is_shown_by_its_first_samples(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "dataset.streaming=true", "dataset.shuffle=false", "training.max_steps=1")
    assert "dataset: streamed from chats.jsonl" in out and "first 20 samples" in out and "⟦" in out


@pytest.mark.parametrize(
    ("override", "warning"),
    [
        ("dataset.train_on=all", "100 % of the tokens are trained"),
        ("dataset.max_length=40", "are truncated to fit dataset.max_length=40"),
        (
            'dataset.chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"',
            "20 of 20 records have no end token after the last answer",
        ),
    ],
)
def test_warns(capsys: pytest.CaptureFixture[str], override: str, warning: str) -> None:
    out = shown(capsys, override, examples=20)
    assert any(line.startswith("warning: ") and warning in line for line in out.splitlines())
    assert out.count("warning: ") == 1


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_plain_text_has_no_questions_to_warn_of(capsys: pytest.CaptureFixture[str], streaming: str) -> None:
    Path("a.txt").write_text("red green\nblue\n")
    settings = ["dataset.path=a.txt", f"dataset.streaming={streaming}", "training.max_steps=2"]
    assert "warning" not in shown(capsys, *settings)
    assert "prompts as well as answers" in shown(capsys, *settings[1:], "dataset.train_on=all")


def test_dropped_answers_and_prompts_of_one_token_give_no_false_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.csv").write_text("prompt,completion\na,x\n,b\nc,\n")
    out = shown(capsys, "dataset.path=a.csv")
    assert "3 of them trained (60.0%); 1 dropped" in out and "records are dropped" in out
    assert out.count("warning: ") == 1


def test_warns_of_nothing_trained() -> None:
    nothing = DataStats(records=1, documents=1, samples=1, tokens=3, max_length=8)
    found = list_mask_warnings(nothing, ["all"])
    assert len(found) == 1 and found[0].startswith("0 % of the tokens are trained")


def test_a_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["config.yaml", "dataset.path=chat.jsonl"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: dataset.path=chat.jsonl: no such file or folder")
    assert "did you mean chats.jsonl?" in captured.err


def test_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"messages": [{"role": "user", "content": "caf\u00e9"}, {"role": "assistant", "content": "\u2603 snow"}]}
    Path("chats.jsonl").write_text(json.dumps(row) + "\n")
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert inspect.main(["config.yaml"]) == 0
    sys.stdout.flush()
    assert b"caf?" in shown.getvalue() and b"snow<|im_end|>" in shown.getvalue()


def test_data_of_another_task_is_shown_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert "warning: task=preference: dataset has records that are not pairs of a chosen" in shown(
        capsys, "task=preference"
    )
    Path("chats.jsonl").write_text('{"prompt": "a", "chosen": " b", "rejected": " c"}\n')
    assert "warning: task=auto: dataset has pairs of a chosen and a rejected answer" in shown(capsys)
