"""Records of every format, as configured and as found; and one line for each that is not what it should be."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.config import SourceSection, UserError
from trainer.data.formats import detect_format
from trainer.data.pairs import read_pair, read_unpaired
from trainer.data.records import (
    MASK_FIELDS,
    PLAIN_TEXT,
    WEIGHT_FIELDS,
    Conversation,
    PlainText,
    find_prompt_format,
    read_record,
)

ASK = {"role": "user", "content": "Why?"}
SAY = {"role": "assistant", "content": "Because."}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm", "unit": None}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def read(record: dict[str, Any], *, has_chat_template: bool = True, **settings: Any) -> Conversation | PlainText:
    source = SourceSection(path="data.jsonl", **settings)
    fmt = detect_format(source, list(record), record, "dataset", has_chat_template=has_chat_template)
    return read_record(record, fmt, "dataset.path=data.jsonl, record 1")


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Conversation | PlainText]] = {
    "messages": ({"messages": [ASK, SAY]}, {}, Conversation([ASK, SAY])),
    "messages under another name": ({"talk": [ASK, SAY]}, {"fields": {"messages": "talk"}}, Conversation([ASK, SAY])),
    "messages with keys of their own": (
        {"messages": [{"who": "user", "says": "Why?"}, {"who": "assistant", "says": "Because."}]},
        {"fields": {"role": "who", "content": "says"}},
        Conversation([ASK, SAY]),
    ),
    "roles of their own": (
        {"messages": [{"role": "Caller", "content": "Why?"}, {"role": "agent", "content": "Because."}]},
        {"format": "messages", "roles": {"user": ("caller",), "assistant": ("agent", "bot")}},
        Conversation([ASK, SAY]),
    ),
    "roles of their own, found by auto": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "agent", "value": "Because."}]},
        {"roles": {"assistant": ("agent",)}},
        Conversation([ASK, SAY]),
    ),
    "a template for records with an input, which this one has": (
        {"q": "Add.", "input": "1 2", "completion": "3"},
        {"template": "{q} [{input}] = ", "template_without_input": "{q} = ", "fields": {"completion": "completion"}},
        PlainText("Add. [1 2] = ", "3"),
    ),
    "a template for records with an input, and it is empty": (
        {"q": "Add.", "input": " ", "completion": "3"},
        {"template": "{q} [{input}] = ", "template_without_input": "{q} = ", "fields": {"completion": "completion"}},
        PlainText("Add. = ", "3"),
    ),
    "a template for records with an input, and there is no such field": (
        {"q": "Add.", "completion": "3"},
        {"template": "{q} [{input}] = ", "template_without_input": "{q} = ", "fields": {"completion": "completion"}},
        PlainText("Add. = ", "3"),
    ),
    "OpenAI's role and content in conversations": ({"conversations": [ASK, SAY]}, {}, Conversation([ASK, SAY])),
    "messages, text in parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
                SAY,
            ]
        },
        {},
        Conversation([ASK, SAY]),
    ),
    "developer is system": (
        {"messages": [{"role": "developer", "content": "Be terse."}, ASK, SAY]},
        {},
        Conversation([{"role": "system", "content": "Be terse."}, ASK, SAY]),
    ),
    "a turn of weight 0": (
        {"messages": [ASK, {**SAY, "weight": 0}, ASK, {**SAY, "weight": 1}]},
        {},
        Conversation([ASK, SAY, ASK, SAY], weights={1: 0.0}),
    ),
    "reasoning is kept": (
        {"messages": [ASK, {**SAY, "reasoning_content": "Hm."}]},
        {},
        Conversation([ASK, {**SAY, "reasoning_content": "Hm."}]),
    ),
    "tool calls, with the nulls of their arguments": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "9"},
            ],
            "tools": [TOOL],
        },
        {},
        Conversation(
            [
                ASK,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "9"},
            ],
            tools=[TOOL],
        ),
    ),
    "tool calls as JSON text keep their nulls": (
        {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": null}'}}],
                },
            ],
            "tools": '[{"name": "weather"}]',
        },
        {},
        Conversation(
            [
                ASK,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "weather", "arguments": {"city": None}}, "id": "c1"}
                    ],
                },
            ],
            tools=[{"type": "function", "function": {"name": "weather"}}],
        ),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}], "system": "S"},
        {},
        Conversation([{"role": "system", "content": "S"}, ASK, SAY]),
    ),
    "sharegpt function call": (
        {
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Ulm"}}'},
                {"from": "observation", "value": "9"},
                {"from": "gpt", "value": "Because."},
            ]
        },
        {},
        Conversation(
            [
                ASK,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}],
                },
                {"role": "tool", "content": "9"},
                SAY,
            ]
        ),
    ),
    "a system prompt next to messages": (
        {"messages": [ASK, SAY], "system": "S"},
        {},
        Conversation([{"role": "system", "content": "S"}, ASK, SAY]),
    ),
    "a system prompt under LLaMA-Factory's and other names": (
        {"conversations": [ASK, {**SAY, "weight": 0}], "sys": "S"},
        {"format": "messages", "fields": {"messages": "conversations", "system": "sys"}},
        Conversation([{"role": "system", "content": "S"}, ASK, SAY], weights={2: 0.0}),
    ),
    "a system turn takes precedence over the field": (
        {"messages": [{"role": "system", "content": "T"}, ASK, SAY], "system": "S"},
        {},
        Conversation([{"role": "system", "content": "T"}, ASK, SAY]),
    ),
    "a system prompt of a pair": (
        {"system_prompt": "S", "question": "a", "answer": "b"},
        {},
        PlainText("S\n\na", "b"),
    ),
    "a system prompt of a pair of turns": (
        {"prompt": [ASK], "completion": [SAY], "system": "S"},
        {},
        Conversation([{"role": "system", "content": "S"}, ASK, SAY], weights={0: 0.0, 1: 0.0}),
    ),
    "a system prompt of a custom template": (
        {"a": "x", "system": "S", "c": "y"},
        {"template": "{a}:", "fields": {"completion": "c"}},
        PlainText("S\n\nx:", "y"),
    ),
    "a system prompt within a custom template": (
        {"a": "x", "system": "S", "c": "y"},
        {"template": "<{system}>{a}:", "fields": {"completion": "c"}},
        PlainText("<S>x:", "y"),
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {},
        Conversation([{"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}]),
    ),
    "alpaca with system and history": (
        {"instruction": "Add.", "input": "", "output": "3", "system": "S", "history": [["a", "b"]]},
        {},
        Conversation(
            [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "Add."},
                {"role": "assistant", "content": "3"},
            ]
        ),
    ),
    "prompt and completion": ({"prompt": "a", "completion": "b"}, {}, PlainText("a", "b")),
    "question and answer": ({"id": 1, "question": "a", "answer": "b"}, {}, PlainText("a", "b")),
    "prompt and completion under other names": (
        {"q": "a", "a": "b"},
        {"format": "prompt_completion", "fields": {"prompt": "q", "completion": "a"}},
        PlainText("a", "b"),
    ),
    "prompt and completion as turns": (
        {"prompt": [ASK, SAY, ASK], "completion": [SAY]},
        {},
        Conversation([ASK, SAY, ASK, SAY], weights={0: 0.0, 1: 0.0, 2: 0.0}),
    ),
    "text": ({"text": "abc"}, {}, PlainText("", "abc")),
    "text under another name": ({"body": "abc", "id": 3}, {"fields": {"text": "body"}}, PlainText("", "abc")),
    "custom": (
        {"a": 1, "b": "two", "c": "three"},
        {"template": "{a} {{and}} {word}:", "fields": {"completion": "c", "word": "b"}},
        PlainText("1 {and} two:", "three"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reads(name: str) -> None:
    record, settings, expected = CASES[name]
    assert read(record, **settings) == expected


def test_records_of_the_guide_are_read_whole_as_the_format_they_are_shown_for() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "data.md").read_text()
    records = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", guide, re.DOTALL)]
    formats = [
        detect_format(SourceSection(path="x"), [*record], record, "x", has_chat_template=True) for record in records
    ]
    paired = ["preference", "unpaired"]
    expected = ["messages", "messages", "sharegpt", "alpaca", *["prompt_completion"] * 2, "completion", *paired]
    assert [fmt.name for fmt in formats] == expected
    assert [read(record).unused_fields for record in records[:-2]] == [()] * (len(expected) - 2)
    pair = read_pair(records[-2], formats[-2], "x", None)
    assert (pair.margin, pair.unused_fields) == (0.5, ()) and read_unpaired(records[-1], formats[-1], "x", None)[
        0
    ].unused_fields == ()
    assert isinstance(read(records[4]), Conversation) and isinstance(read(records[5]), PlainText)
    with_tools = read(records[1])
    assert isinstance(with_tools, Conversation) and with_tools.tools
    assert with_tools.messages[1]["reasoning_content"] == "I have to look it up."


@pytest.mark.parametrize("has_input", [True, False])
def test_alpaca_without_a_chat_template_is_text(has_input: bool) -> None:
    record = {"instruction": "Add {x}.", "input": "1, 2" if has_input else "", "output": "3"}
    example = read(record, has_chat_template=False)
    assert isinstance(example, PlainText)
    assert example.completion == "3" and "Add {x}." in example.prompt and example.prompt.endswith("### Response:\n")
    assert ("1, 2" in example.prompt) == ("### Input:" in example.prompt) == has_input


UNREAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all is used": ({"messages": [ASK, SAY], "system": "S", "tools": []}, ()),
    "fields that are empty are not worth a word": ({"text": "a", "id": None, "meta": {}, "tags": [], "note": ""}, ()),
    "other fields": ({"text": "a", "id": 0, "system": "S"}, ("id", "system")),
    "the field of a system prompt that a turn overrules": (
        {"messages": [{"role": "system", "content": "T"}, ASK, SAY], "system": "S"},
        ("system",),
    ),
    "a system prompt given twice": ({"messages": [{"role": "system", "content": "S"}, ASK, SAY], "system": "S"}, ()),
    "fields of turns": ({"messages": [ASK, {**SAY, "score": 3, "weight": 1}], "id": 1}, ("id", "messages.score")),
    "tools of a pair of texts": ({"prompt": "a", "completion": "b", "tools": [TOOL]}, ("tools",)),
    "history without a chat template": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, ("history",)),
}


@pytest.mark.parametrize("name", UNREAD)
def test_knows_what_it_did_not_read(name: str) -> None:
    record, unread = UNREAD[name]
    assert read(record, has_chat_template="history" not in record).unused_fields == unread


@pytest.mark.parametrize(
    ("record", "settings", "form"),
    [
        ({"messages": [ASK, SAY]}, {}, None),
        ({"prompt": [ASK], "completion": [SAY]}, {}, None),
        ({"question": "a", "answer": "b"}, {}, "{system}{prompt}"),
        ({"text": "a"}, {}, PLAIN_TEXT),
        ({"instruction": "a", "output": "b"}, {}, "{system}### Instruction:\n{prompt}\n\n### Response:\n"),
        ({"q": "a", "c": "b"}, {"template": "Q: {q}\nA:", "fields": {"completion": "c"}}, "{system}Q: {prompt}\nA:"),
        ({"q": "a", "r": "x", "c": "b"}, {"template": "{q}{r}", "fields": {"completion": "c"}}, "{system}{prompt}"),
    ],
)
def test_the_form_of_prompts(record: dict[str, Any], settings: dict[str, Any], form: str | None) -> None:
    source = SourceSection(path="data.jsonl", **settings)
    fmt = detect_format(source, list(record), record, "dataset", has_chat_template=False)
    assert find_prompt_format(fmt, record) == form
    if form not in (None, PLAIN_TEXT) and "r" not in record:
        example = read_record(record, fmt, "", "S")
        assert isinstance(example, PlainText) and form is not None
        assert example.prompt == form.format(system="S\n\n", prompt="a")


@pytest.mark.parametrize(
    ("record", "note"),
    [
        ({"messages": [ASK]}, "dataset: format messages (detected from the field messages)"),
        ({"instruction": "a", "output": "b"}, "dataset: format alpaca (detected from the fields instruction + output)"),
        (
            {"question": "a", "answer": "b"},
            "dataset: format prompt_completion (detected from the fields question + answer)",
        ),
    ],
)
def test_says_what_it_found(record: dict[str, Any], note: str) -> None:
    source = SourceSection(path="data.jsonl")
    assert detect_format(source, list(record), record, "dataset", has_chat_template=True).note == note


OFF: list[tuple[str, Any]] = [
    *((name, value) for name in WEIGHT_FIELDS for value in (0, 0.0, False)),
    *((name, value) for name in MASK_FIELDS for value in (1, True)),
]


@pytest.mark.parametrize(("name", "value"), OFF)
def test_turns_are_switched_off_by_every_name(name: str, value: Any) -> None:
    off, on, unset = {**SAY, name: value}, {**SAY, name: not value}, {**SAY, name: None}
    for record, turns in (
        ({"messages": [ASK, off, ASK, on, ASK, unset]}, {1}),
        ({"prompt": [ASK], "completion": [off, ASK, on]}, {0, 1}),
        ({"prompt": "Why?", "completion": [off, ASK, SAY]}, {0, 1}),
    ):
        example = read(record)
        assert isinstance(example, Conversation) and (example.weights, example.unused_fields) == (
            dict.fromkeys(turns, 0.0),
            (),
        )


def test_reasoning_has_several_names() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        thought = {**SAY, name: "Hm."}
        for record in ({"messages": [ASK, thought]}, {"prompt": [ASK], "completion": [thought]}):
            example = read(record)
            assert isinstance(example, Conversation) and example.messages[1]["reasoning_content"] == "Hm."


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "no field known": (
        {"foo": "a", "bar": "b"},
        {},
        ("foo, bar", "instruction + output", "set dataset.fields, e.g. {prompt: "),
    ),
    "format without its field": (
        {"foo": "a", "bar": "b"},
        {"format": "prompt_completion"},
        ("dataset.format=prompt_completion", "prompt or completion", "foo, bar", "map the fields in dataset.fields"),
    ),
    "renamed to what is not there": ({"foo": "a"}, {"fields": {"text": "fo"}}, ("dataset.fields.text=fo", "foo")),
    "turns instead of conversations": (SAY, {}, ("dataset.format=auto", "a single turn (role", "messages")),
    "unknown name in fields": (
        {"foo": "a"},
        {"format": "completion", "fields": {"txt": "foo"}},
        ("dataset.fields.txt", "did you mean text?"),
    ),
    "mark without field": (
        {"a": "x", "c": "y"},
        {"template": "{b}", "fields": {"completion": "c"}},
        ("dataset.template", "{b}", "a, c"),
    ),
    "brace left open": ({"a": "x", "c": "y"}, {"template": "{a", "fields": {"completion": "c"}}, ("dataset.template",)),
    "unknown role": (
        {"messages": [ASK, {"role": "robot", "content": "x"}]},
        {},
        ("record 1, turn 2", "unknown role 'robot'", "assistant"),
    ),
    "no role": ({"messages": [ASK, {"content": "x"}]}, {}, ("record 1, turn 2", "no role", "content")),
    "no content": ({"messages": [ASK, {"role": "assistant", "content": None}]}, {}, ("turn 2", "has no content")),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, {}, ("turn 1", "content is a number")),
    "content is an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {},
        ("record 1, image 1", "no such file: x"),
    ),
    "content is a sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}]},
        {},
        ("turn 1", "neither text nor images (input_audio); remove them"),
    ),
    "turn is text": ({"messages": [ASK, "hello"]}, {}, ("turn 2", "is a string; write a record")),
    "messages are text": ({"messages": "hello"}, {}, ("record 1", "messages is a string")),
    "another format in between": (
        {"messages": None, "text": "x"},
        {"format": "messages"},
        ("messages is missing", "text"),
    ),
    "completion is a list of numbers": (
        {"prompt": "x", "completion": 3},
        {},
        ("completion is a number; use a string",),
    ),
    "columns, as pandas writes them": (
        {"prompt": {"0": "x", "1": "y"}, "completion": {"0": "a", "1": "b"}},
        {},
        ("prompt is a record", 'in pandas with orient="records"'),
    ),
    "tool call without name": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        {},
        ("turn 2", "function.name"),
    ),
    "arguments not JSON": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]},
        {},
        ("turn 2", "arguments of f are not JSON"),
    ),
    "tokens instead of text": (
        {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]},
        {},
        ("dataset.format=auto", "already tokenized (input_ids)"),
    ),
    "a system prompt that is no text": (
        {"messages": [ASK, SAY], "system": 5},
        {},
        ("system is a number; use a string",),
    ),
    "a weight above 1": ({"messages": [ASK, {**SAY, "weight": 1.5}]}, {}, ("turn 2", "weight=1.5", "from 0 to 1")),
    "a switch that is text": (
        {"prompt": "Why?", "completion": [{**SAY, "train": "yes"}]},
        {},
        ("completion turn 1", "train='yes'", "true, false"),
    ),
    "a call as text": ({"messages": [ASK, {**SAY, "function_call": "f"}]}, {}, ("turn 2", "no function.name")),
    "arguments that are a list": (
        {"messages": [ASK, {**SAY, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        {},
        ("turn 2", "arguments of f are a list; use a record of names and values"),
    ),
    "an empty tool": (
        {"messages": [ASK, SAY], "tools": [{"name": "f"}, {}]},
        {},
        ("record 1: tool 2 has no function.name; add it",),
    ),
    "a tool without a name": (
        {"messages": [ASK, SAY], "tools": [{"type": "function", "function": {"description": "x"}}]},
        {},
        ("record 1: tool 1 has no function.name",),
    ),
    "tools not JSON": ({"messages": [ASK, SAY], "tools": "[{"}, {}, ("record 1", "tools are not JSON")),
    "history of singles": (
        {"instruction": "a", "output": "b", "history": [["a"]]},
        {"fields": {}},
        ("record 1", "history"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_in_one_line(name: str) -> None:
    record, settings, needles = BAD[name]
    with pytest.raises(UserError) as caught:
        read(record, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert [needle for needle in needles if needle not in message] == []
