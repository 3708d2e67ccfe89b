"""`dataset.thinking`, `train_on: last` and weights of turns: what is trained of conversations with reasoning."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.chat_templates import CALL, TOOL, make_tokenizer, turn
from tests.runs_in_process import make_ground, train
from tests.tiny import CHATML
from tests.unit.test_chat_templates import tokenizer_of
from tests.unit.test_data_chat import trained_texts
from trainer.config import DatasetSection, SourceSection, UserError
from trainer.data.conversations import DROPPED_REASONING, DROPPED_TEXT, render_prompt
from trainer.data.documents import DocumentEncoder
from trainer.data.formats import detect_format
from trainer.data.samples import Sample

END = "<|im_end|>"
TALK = [
    turn("user", "Red?"),
    turn("assistant", "Blue.", reasoning_content="Hm."),
    turn("user", "Nine?"),
    turn("assistant", "<think>\nSo.\n</think>\n\nTen."),
]
EMPTY = "<think>\n\n</think>\n\n"


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Any], more: Any = None, **settings: Any) -> Sample:
    """Return the document of a record, through the columns of the cache."""
    encoder, record = DocumentEncoder(tokenizer, DatasetSection(**settings)), {"messages": messages, **(more or {})}
    fmt = detect_format(SourceSection(), list(record), record, "dataset", has_chat_template=True)
    columns = encoder.encode_rows([record], 0, fmt, "dataset")
    return Sample(columns["input_ids"][0], columns["weights"][0] or columns["trained"][0], [columns["length"][0]])


# Qwen3 and GLM leave out the reasoning of earlier answers, and write an empty thought where there is none.
TRAINED: dict[tuple[str, str], list[str]] = {
    ("qwen3", "train"): [f"Blue.{END}", f"<think>\nSo.\n</think>\n\nTen.{END}"],
    ("qwen3", "mask"): [f"Blue.{END}", f"Ten.{END}"],
    ("qwen3", "strip"): [f"Blue.{END}", f"{EMPTY}Ten.{END}"],
    ("qwen3", "empty"): [f"Blue.{END}", f"Ten.{END}"],
    ("qwen3.5", "train"): [f"Blue.{END}", f"So.\n</think>\n\nTen.{END}"],
    ("qwen3.5", "mask"): [f"Blue.{END}", f"Ten.{END}"],
    ("qwen3.5", "empty"): [f"Blue.{END}", f"Ten.{END}"],
    ("glm-4.5", "train"): ["\n<think></think>\nBlue.<|user|>", "\n<think>So.</think>\nTen.<|user|>"],
    ("glm-4.5", "mask"): ["Blue.<|user|>", "Ten.<|user|>"],
    ("glm-4.5", "strip"): ["\n<think></think>\nBlue.<|user|>", "\n<think></think>\nTen.<|user|>"],
    ("glm-4.5", "empty"): ["\nBlue.<|user|>", "\nTen.<|user|>"],
    ("glm-4.7", "mask"): ["Blue.<|user|>", "Ten.<|user|>"],
    ("glm-4.7", "empty"): ["Blue.<|user|>", "Ten.<|user|>"],
    ("seed-oss", "train"): [
        "<seed:think>Hm.</seed:think>\nBlue.<seed:eos>",
        "<think>\nSo.\n</think>\n\nTen.<seed:eos>",
    ],
    ("seed-oss", "mask"): ["Blue.<seed:eos>", "Ten.<seed:eos>"],
    ("seed-oss", "strip"): ["Blue.<seed:eos>", "Ten.<seed:eos>"],
}


@pytest.mark.parametrize(("name", "thinking"), TRAINED)
def test_reasoning_is_trained_masked_or_removed(name: str, thinking: str) -> None:
    tokenizer = tokenizer_of(name)
    document: Any = encode(tokenizer, TALK, thinking=thinking)
    assert trained_texts(tokenizer, document) == TRAINED[name, thinking]
    text = tokenizer.decode(document.input_ids)
    assert ("So." in text) == (thinking in ("train", "mask"))


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5", "glm-4.7"])
def test_an_empty_thought_is_that_of_the_generation_prompt(name: str) -> None:
    tokenizer = tokenizer_of(name)
    document: Any = encode(tokenizer, TALK[2:], thinking="empty")
    prompt = render_prompt(tokenizer, DatasetSection(thinking="empty"), TALK[2:3])
    trained = trained_texts(tokenizer, document)[0]
    assert tokenizer.decode(document.input_ids).startswith(prompt + trained.removesuffix("<|user|>"))


@pytest.mark.parametrize("form", [dict, str])
def test_calls_after_reasoning(form: type) -> None:
    """With the arguments of the call as JSON or as a record."""
    function: Any = CALL["function"]
    arguments = function["arguments"] if form is dict else json.dumps(function["arguments"])
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    messages = [turn("user", "Rain?"), turn("assistant", "", reasoning_content="Hm.", tool_calls=[call])]
    tokenizer, written = (
        tokenizer_of("qwen3"),
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
    )
    for thinking, thought in {"train": "<think>\nHm.\n</think>\n\n", "mask": "", "strip": EMPTY, "empty": ""}.items():
        document: Any = encode(tokenizer, messages, {"tools": [TOOL]}, thinking=thinking)
        assert trained_texts(tokenizer, document) == [f"{thought}{written}{END}"]


ANSWERS = {
    "two blocks": ("<think>a b c</think>\n<think>dog cat</think>\nc", [f"c{END}"], "c"),
    "after text": ("ok <think>late</think> more", ["ok", f"more{END}"], "ok more"),
    "without a beginning": ("a b</think>c <think>d</think>", ["c", END], "c "),
    "without an end": ("ok <think>a b", ["ok", END], "ok "),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_block_of_reasoning_is_masked_or_removed(name: str) -> None:
    content, trained, stripped = ANSWERS[name]
    tokenizer, talk = make_tokenizer(CHATML, END), [TALK[0], turn("assistant", content)]
    assert trained_texts(tokenizer, encode(tokenizer, talk, thinking="mask")) == trained
    assert trained_texts(tokenizer, encode(tokenizer, talk, thinking="strip")) == [f"{stripped}{END}"]
    assert trained_texts(tokenizer, encode(tokenizer, talk)) == [f"{content}{END}"]


@pytest.mark.parametrize(
    ("content", "more", "warnings"),
    [
        ("<think>a</think>b", {"reasoning_content": "c"}, []),
        ("<think>a</think>b", {}, []),
        ("c <think>a</think>b", {}, [DROPPED_TEXT]),
        ("<think>a</think>b <think>d</think>c", {}, [DROPPED_REASONING, DROPPED_TEXT]),
    ],
)
def test_text_that_qwen3_drops_is_reported(content: str, more: dict[str, str], warnings: list[str]) -> None:
    """Its template renders the last block of an answer alone, and nothing before it."""
    tokenizer = tokenizer_of("qwen3")
    encoder, record = (
        DocumentEncoder(tokenizer, DatasetSection()),
        {"messages": [TALK[0], turn("assistant", content, **more)]},
    )
    fmt = detect_format(SourceSection(), list(record), record, "dataset", has_chat_template=True)
    assert encoder.encode_rows([record], 0, fmt, "dataset")["unread"] == [warnings]


@pytest.mark.parametrize("train_on", ["all", "user,assistant"])
def test_masked_reasoning_is_never_trained(train_on: str) -> None:
    tokenizer = tokenizer_of("seed-oss")
    document: Any = encode(tokenizer, TALK, thinking="mask", train_on=train_on)
    trained = "".join(trained_texts(tokenizer, document))
    assert "Red?" in trained and "Ten." in trained and "think" not in trained and "So." not in trained


def test_the_last_answer_alone() -> None:
    tokenizer = make_tokenizer(CHATML, END)
    for train_on, expected in {
        "last": [f"Ten.{END}"],
        "user,last": [f"Red?{END}", f"Nine?{END}", f"Ten.{END}"],
    }.items():
        document: Any = encode(tokenizer, TALK, train_on=train_on, thinking="strip")
        assert trained_texts(tokenizer, document) == expected
    document = encode(tokenizer, [*TALK[:3], TALK[3] | {"weight": 0.25}], train_on="last", thinking="strip")
    assert set(document.loss_weights) == {0.0, 0.25}


def test_turns_weigh_what_their_records_say() -> None:
    tokenizer = make_tokenizer(CHATML, END)
    messages = [TALK[0], turn("assistant", "Blue.", weight=0.5), TALK[2], turn("assistant", "Ten.", masked=0.9)]
    document = encode(tokenizer, messages)
    of_weights = {
        weight: tokenizer.decode(
            [t for t, w in zip(document.input_ids, document.loss_weights, strict=True) if w == weight]
        )
        for weight in sorted(set(document.loss_weights))
    }
    assert list(of_weights) == pytest.approx([0.0, 0.1, 0.5])
    assert list(of_weights.values())[1:] == [f"Ten.{END}", f"Blue.{END}"]
    whole = encode(tokenizer, [TALK[0], turn("assistant", "Blue.", weight=1.0)])
    assert set(whole.loss_weights) == {False, True}


# Writes how long a text is, which no marker around it may change.
COUNTED = CHATML.replace("{{ message['content'] }}", "{{ message['content'] }} ({{ message['content'] | length }})")
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no variable": (CHATML, {"thinking": "empty"}, "the chat template has no enable_thinking variable; use strip"),
    "not revealed": (
        COUNTED,
        {"thinking": "mask", "train_on": "all"},
        "record 1: dataset.thinking: mask cannot locate the reasoning",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_apart_is_refused(name: str) -> None:
    template, settings, problem = REFUSED[name]
    with pytest.raises(UserError, match=problem):
        encode(make_tokenizer(template, END), TALK, **settings)


WITHOUT_REASONING = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("joint", [False, True])
def test_training_warns_about_dropped_reasoning_at_its_start_and_end(joint: bool, tmp_path: Path) -> None:
    """Of several adapters that are trained together, each one with data of its own."""
    ground = make_ground(tmp_path)
    talk = [turn("user", "Red?"), turn("assistant", "<think>Hm.</think>Blue.")]
    (ground / "thoughts.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    path = str(ground / "thoughts.jsonl")
    other = {"adapters": [{"name": "a"}, {"name": "b", "dataset.path": path}]} if joint else {"dataset__path": path}
    lines = train(ground, dataset__chat_template=WITHOUT_REASONING, **other).splitlines()
    name = "b: " if joint else ""
    warning = f"{name}warning: dataset: 8 of 8 records have {DROPPED_REASONING}; first: record 1"
    assert [line for line in lines if "drops" in line] == [warning] * 2
    assert lines.index(warning) < next(at for at, line in enumerate(lines) if line.startswith("step 1/4"))
