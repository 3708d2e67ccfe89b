"""What is said of data that may be trained on and is seldom meant; and what is refused: empty answers, odd weights."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from tests.unit.test_data_chat import THINKING
from trainer.config import DatasetSection, UserError
from trainer.data.cache import prepare_data
from trainer.data.grouping import DataStats
from trainer.data.samples import Samples

pytestmark = pytest.mark.usefixtures("own_data_folder")


def stats_of(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> DataStats:
    section = DatasetSection(**({"path": "a.jsonl", "max_length": 64} | settings))
    return prepare_data(section, tokenizer, seed=0, cache_dir=Path("cache"), model_max_length=None).stats


def write_pairs(name: str, *answers: str) -> None:
    rows = [{"prompt": f"q{number}", "completion": answer} for number, answer in enumerate(answers)]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_answers_of_reasoning_alone_name_the_setting(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats("a.jsonl", "<think>a</think>", "<think>b")
    with pytest.raises(UserError, match=r"all 2 answers are empty with dataset.thinking=strip; check the records"):
        stats_of(tokenizer, thinking="strip")


def write_chats(name: str, *answers: str) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": answer}]}
        for number, answer in enumerate(answers)
    ]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("write", [write_pairs, write_chats])
def test_empty_answers(tokenizer: PreTrainedTokenizerBase, write: Any) -> None:
    write("a.jsonl", *["red"] * 99, " ")
    assert not [warning for warning in stats_of(tokenizer).list_warnings() if "empty" in warning]
    write("a.jsonl", *["red"] * 98, " ", "\n")
    assert "2 of 100 answers are empty; they teach the model not to answer" in stats_of(tokenizer).list_warnings()
    assert (
        "warning: 2 of 100 answers are empty; they teach the model not to answer"
        in stats_of(tokenizer).format_summary()
    )
    write("a.jsonl", "", " ", "")
    with pytest.raises(UserError, match=r"dataset.path=a.jsonl: all 3 answers are empty; check the records"):
        stats_of(tokenizer)


def test_a_call_of_a_tool_is_no_empty_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    Path("a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{% endfor %}{% endfor %}"
    )
    assert stats_of(tokenizer, chat_template=template).empty == 0


def test_what_the_template_leaves_out_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    ask = {"role": "user", "content": "x"}
    thought = {"role": "assistant", "content": "red", "reasoning_content": "Hm."}
    inline = {"role": "assistant", "content": "<think>Hm.</think>blue"}
    talks = [[ask, thought], [ask, inline], [ask, thought, ask, thought], [ask, inline, ask, inline]]
    Path("a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    lines = stats_of(tokenizer).format_summary()  # ChatML writes what is in the content, and no field but that
    assert [line for line in lines if line.startswith("warning: dataset: 2 of 4 records have reasoning")]
    lines = stats_of(tokenizer, chat_template=THINKING).format_summary()  # only that of the last answer, from its field
    (line,) = [line for line in lines if line.startswith("warning: dataset: 3 of 4 records have reasoning")]
    assert line.endswith("; first: record 2")
    assert "reasoning" not in str(stats_of(tokenizer, chat_template=THINKING, max_samples=1).format_summary())


def test_nulls_are_padding_in_arrow_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "x", "b": None}}}
    ask, use = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    rows = [{"messages": [ask, use]}, {"messages": [ask, {"role": "assistant", "content": "red"}]}]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet("a.parquet")

    def first_text(path: str) -> str:
        section = DatasetSection(path=path, chat_template=THINKING)
        data = prepare_data(section, tokenizer, seed=0, cache_dir=Path("cache"), model_max_length=None)
        assert isinstance(data.train, Samples)
        return str(tokenizer.decode(data.train[0].input_ids))

    assert '{"a": "x", "b": null}' in first_text("a.jsonl") and '{"a": "x"}' in first_text("a.parquet")


def test_copies_and_held_out_data_that_is_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats("a.jsonl", *["red"] * 20)
    assert stats_of(tokenizer).list_warnings() == []
    lines = Path("a.jsonl").read_text().splitlines()
    Path("a.jsonl").write_text("\n".join([*lines, lines[0], lines[3]]))
    assert stats_of(tokenizer).list_warnings() == ["9.1% of the documents are exact copies of others"]
    Path("b.jsonl").write_text("\n".join(lines[:5]))
    write_chats("c.jsonl", "one", "two", "three")
    Path("c.jsonl").write_text(Path("c.jsonl").read_text() + lines[0])
    found = stats_of(tokenizer, evaluation={"path": "c.jsonl"}).list_warnings()
    assert "25.0% of the held-out documents are also in the training data, so the held-out loss is too low" in found
    assert "100.0% of the held-out documents" in str(
        stats_of(tokenizer, evaluation={"path": "b.jsonl"}).list_warnings()
    )
    # What a weight repeats is meant.
    write_chats("a.jsonl", "red", "blue")
    assert stats_of(tokenizer, path=None, mix=[{"path": "a.jsonl", "weight": 3}]).list_warnings() == []


def test_what_is_cut_and_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    write_pairs("a.jsonl", *["red"] * 8, "red " * 30, "")
    assert stats_of(tokenizer, max_length=16).list_warnings() == [
        "11.1% of the documents are truncated to fit dataset.max_length=16",
        "10.0% of the records are dropped because they have no trained tokens",
    ]
    # The number is that of the record, although a long text before it is several documents.
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("red " * 40, "blue", "", "")))
    stats = stats_of(tokenizer, max_length=16, too_long="split")
    assert stats.documents > 4 and stats.first_dropped == 3
    assert (
        "2 dropped (no trained tokens, first: record 3)" in stats.format_summary()[-3 if stats.list_warnings() else -1]
    )


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (1e-9, r"dataset.mix.0.weight=1e-09: selects none of the 3 records; use 0.3 or more, or remove the source"),
        (0.1, r"dataset.mix.0.weight=0.1: selects none of the 3 records; use 0.3 or more"),
        (1e6, r"dataset.mix.0.weight=1e\+06: would repeat each of the 3 records 1e\+06 times; use 1000 or less"),
    ],
)
def test_weights_without_measure(tokenizer: PreTrainedTokenizerBase, weight: float, message: str) -> None:
    write_pairs("a.jsonl", "red", "blue", "nine")
    with pytest.raises(UserError, match=message):
        stats_of(tokenizer, path=None, mix=[{"path": "a.jsonl", "weight": weight}, {"path": "a.jsonl"}])


def test_a_source_that_a_stream_would_never_draw(tokenizer: PreTrainedTokenizerBase) -> None:
    write_pairs("a.jsonl", "red", "blue", "nine")
    with pytest.raises(UserError, match=r"dataset.mix.0.weight=1e-09: fewer than one document in a million"):
        stats_of(tokenizer, path=None, streaming=True, mix=[{"path": "a.jsonl", "weight": 1e-9}, {"path": "a.jsonl"}])


TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
OTHER = [TURNS[0], {"role": "assistant", "content": "z"}]
PREFERENCES: dict[str, dict[str, Any]] = {
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "questions": {"question": "a", "chosen": "b", "rejected": "c"},
    "whole texts": {"chosen": "a b", "rejected": "a c"},
    "whole talks": {"chosen": TURNS, "rejected": OTHER},
    "last turns": {"prompt": "a", "chosen": TURNS[1:], "rejected": OTHER[1:]},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "x"}],
        "chosen": {"from": "gpt", "value": "y"},
        "rejected": {"from": "gpt", "value": "z"},
    },
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_data_is_counted_as_pairs(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """A run that trains on texts refuses them: tests/unit/test_preference.py."""
    Path("a.jsonl").write_text(json.dumps(PREFERENCES[name]) + "\n")
    stats = stats_of(tokenizer)
    assert (stats.documents, stats.pairs, stats.list_warnings()) == (1, 1, [])


def test_rejected_answers_are_never_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    Path("a.jsonl").write_text(json.dumps({"prompt": "a", "response": "b", "rejected": "c"}) + "\n")
    with pytest.raises(UserError, match="the records have a rejected answer but no chosen one"):
        stats_of(tokenizer)
    Path("a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "label": False}) + "\n")
    stats = stats_of(tokenizer)  # refused unless the loss is kto: tests/unit/test_kto.py
    assert (stats.documents, stats.desirable, stats.undesirable) == (1, 0, 1)


def test_a_conversation_beside_its_judgement_is_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    Path("a.jsonl").write_text(json.dumps({"messages": TURNS, "chosen": TURNS, "rejected": TURNS}) + "\n")
    assert stats_of(tokenizer).documents == 1
    Path("a.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    assert stats_of(tokenizer, fields={"completion": "chosen"}).documents == 1
    Path("a.jsonl").write_text(json.dumps({"prompt": "a", "chosen": TURNS[1:], "rejected": TURNS[1:]}) + "\n")
    assert stats_of(tokenizer, fields={"completion": "chosen"}).documents == 1


NO_FORMAT: dict[str, tuple[str, str, str]] = {
    "a CSV file without its first line": (
        "a.csv",
        "What is 2+2?,4\nAnd 3+3?,6\n",
        "the records have What is 2+2?, 4 (from the first line of the CSV file), not",
    ),
    "one column": (
        "a.csv",
        "question\nx\n",
        "set dataset.fields, e.g. {prompt: question, completion: answer}, {text: ",
    ),
    "many fields": ("a.jsonl", json.dumps(dict.fromkeys(map(str, range(30)), "x")), "10, 11 and 18 more, not"),
    "no field": ("a.jsonl", "{}\n", "the records have no fields"),
}


@pytest.mark.parametrize("name", NO_FORMAT)
def test_hints_that_can_be_followed(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    file, text, needle = NO_FORMAT[name]
    Path(file).write_text(text)
    with pytest.raises(UserError) as caught:
        stats_of(tokenizer, path=file)
    assert needle in str(caught.value)


RECORDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unpaired surrogate": (
        '{"prompt": "a", "completion": "b \\ud83d"}',
        {},
        r"record 1: has an unpaired surrogate (\ud83d, after 'a",
    ),
    "an unpaired surrogate in a turn": (
        json.dumps({"messages": [{"role": "user", "content": "\ud83d"}, TURNS[1]]}),
        {},
        r"has an unpaired surrogate",
    ),
    "a format in a template": (
        '{"q": "a", "completion": "b"}',
        {"template": "{q:d}"},
        "dataset.template={q:d}: must contain fields, such as {question}, without formats; double other braces",
    ),
    "a conversion in a template": (
        '{"q": "a", "completion": "b"}',
        {"template": "{q!z}"},
        "dataset.template={q!z}: must contain fields",
    ),
    "a template without fields": (
        '{"q": "a", "completion": "b"}',
        {"template": "hello"},
        "dataset.template=hello: must contain fields",
    ),
    "a format that is another": (json.dumps({"messages": TURNS}), {"format": "alpaca"}, "set dataset.format: auto"),
    "a role that is none": (
        json.dumps({"messages": [{"role": "usr", "content": "x"}]}),
        {},
        "unknown role 'usr'; use system, user",
    ),
    "turns that are cut": (json.dumps({"messages": '[{"role": '}), {}, "messages is not JSON"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_odd_records_have_their_line(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    record, settings, needle = RECORDS[name]
    Path("a.jsonl").write_text(record + "\n")
    with pytest.raises(UserError) as caught:
        stats_of(tokenizer, **settings)
    assert needle in str(caught.value)


def test_turns_that_are_written_as_json(tokenizer: PreTrainedTokenizerBase) -> None:
    quoted = json.dumps(TURNS).replace('"', '""')
    Path("a.csv").write_text(f'messages\n"{quoted}"\n')
    assert stats_of(tokenizer, path="a.csv").answers == 1


def test_fields_that_are_not_used_are_named_with_counts(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"messages": TURNS, "id": n} | ({"context": "c"} if n < 3 else {"context": ""}) for n in range(10)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "dataset: unused fields in 10 records: id (in 10), context (in 3)" in stats_of(tokenizer).notes
    write_pairs("b.jsonl", "red", "blue")
    mix = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    notes = stats_of(tokenizer, path=None, mix=mix).notes
    assert len([note for note in notes if "unused fields" in note]) == 1 and "dataset.mix.0: unused fields" in str(
        notes
    )
    assert "id (in 10)" in str(stats_of(tokenizer, streaming=True).notes)


@pytest.mark.parametrize("streaming", [False, True])
def test_pairs_on_a_chat_model_are_said_to_be_trained_as_text(
    tokenizer: PreTrainedTokenizerBase, streaming: bool
) -> None:
    Path("a.csv").write_text("question,answer\na,b\n")
    stats = stats_of(tokenizer, path="a.csv", streaming=streaming)
    (note,) = [note for note in stats.notes if "chat template" in note]
    assert stats.prompt_text == "{system}{prompt}"
    assert "dataset.format=alpaca and dataset.fields={instruction: question, output: answer}" in note
    fixed = stats_of(
        tokenizer,
        path="a.csv",
        streaming=streaming,
        format="alpaca",
        fields={"instruction": "question", "output": "answer"},
    )
    assert fixed.prompt_text is None and "chat template" not in str(fixed.notes)


def test_blank_lines_of_text_are_no_records(tokenizer: PreTrainedTokenizerBase) -> None:
    Path("a.txt").write_text("one\n\ntwo\n \n\nthree\n")
    stats = stats_of(tokenizer, path="a.txt")
    assert (stats.records, stats.documents, stats.dropped, stats.list_warnings()) == (3, 3, 0, [])


def test_special_tokens_in_the_text_of_a_turn_are_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats("a.jsonl", "red", "blue<|im_end|>", "nine")
    stats = stats_of(tokenizer)
    assert stats.control == 1 and "1 conversations have the tokenizer's special tokens" in str(stats.list_warnings())
    write_pairs("a.jsonl", "red<|im_end|>")
    assert stats_of(tokenizer).control == 0, "who writes text writes the tokens of turns as well"


BAD_RECORDS = {
    "a role": (
        ".jsonl",
        json.dumps({"messages": [{"role": "moderator", "content": "x"}, TURNS[1]]}).encode(),
        "moderator",
    ),
    "surrogate": (".jsonl", json.dumps({"messages": [{"role": "user", "content": "\ud83d"}]}).encode(), "surrogate"),
    "no JSON": (".jsonl", b'{"messages": [', "line 3 of a.jsonl is not JSON"),
    "no record": (".jsonl", b"[1, 2]", "line 3 of a.jsonl is a list"),
    "latin-1": (".jsonl", b'{"messages": "caf\xe9"}', "line 3 of a.jsonl is not UTF-8"),
    "NUL": (".jsonl", b'{"messages": "\0"}', "NUL byte"),
    "too many cells": (".csv", b"a,b,c", "line 4 of a.csv has 3 cells"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", BAD_RECORDS)
def test_bad_records_stop_or_are_skipped_and_counted(
    tokenizer: PreTrainedTokenizerBase, name: str, streaming: bool
) -> None:
    kind, bad, needle = BAD_RECORDS[name]
    file = Path(f"a{kind}")
    good = [json.dumps({"messages": TURNS}).encode()] * 6 if kind == ".jsonl" else [b"a,b"] * 6
    head = [b"prompt,completion"] if kind == ".csv" else []
    file.write_bytes(b"\n".join([*head, *good[:2], bad, *good[2:], bad]))
    settings = {"path": str(file), "streaming": streaming}
    with pytest.raises(UserError, match=needle):
        stats_of(tokenizer, **settings)
    section = DatasetSection(max_length=64, on_bad_record="skip", **settings)
    data = prepare_data(section, tokenizer, seed=0, cache_dir=Path("cache"), model_max_length=None)
    (note,) = [note for note in data.stats.notes if "skipped" in note]
    assert note.startswith("warning: dataset: 2 of 8 records are skipped; first: ") and needle in note
    if not streaming:
        assert (data.stats.skipped, data.stats.documents, data.stats.dropped) == ({"dataset": 2}, 6, 0)
    file.write_bytes(b"\n".join([*head, bad, bad]))
    with pytest.raises(UserError, match=re.sub("line [34]", "line [12]", needle)):
        prepare_data(section, tokenizer, seed=0, cache_dir=Path("cache"), model_max_length=None)


def test_a_number_of_records_is_held_out(tokenizer: PreTrainedTokenizerBase) -> None:
    write_pairs("a.jsonl", *map(str, range(10)))
    stats = stats_of(tokenizer, val_split=3)
    assert stats.evaluation is not None and (stats.documents, stats.evaluation.documents) == (7, 3)
    with pytest.raises(UserError, match=r"dataset.val_split=10: none of 10 records would remain for training"):
        stats_of(tokenizer, val_split=10)
