"""Any data file: a line that names it, or tokens that hold exactly the text that was given, and train the answers."""

import bz2
import csv
import gzip
import io
import json
import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.any_input import HARM, damage, or_refused, tries
from tests.tiny import make_tokenizer
from trainer.config import DatasetSection, SourceSection
from trainer.config.model_sections import ModelSection
from trainer.data.cache import PreparedData, prepare_data
from trainer.data.formats import detect_format
from trainer.data.records import Conversation, PlainText, read_record
from trainer.data.samples import Samples
from trainer.model.base import load_tokenizer

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "human": "user", "gpt": "assistant"}
PACK = {"": lambda data: data, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}

odd_words = [
    "red", "007", "NA", "None", "null", "true", "1e5", "2024-01-01", "", " ", "a b ", "\n", "\r\n", "\t", ",", ";",
    '"', "'", "#", "é", "日本", "🙂", "\u2028", "\x85", "\x0b", "\x1c", "\ufeff", "<|im_end|>", "<|im_start|>user\n",
    "{{ x }}", "{x}", "\\n", "\\u0041", "=1+1", "|", "-", "\x7f", "\u200d", "e\u0301",
]  # fmt: skip
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
text = st.lists(st.sampled_from(odd_words) | st.text(characters, max_size=6), max_size=5).map("".join)
said = text.filter(lambda value: bool(value.strip()))
odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(str(folder), ModelSection())


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where files lie; the library's own cache is in it too."""
    import datasets

    place = tmp_path_factory.mktemp("any")
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = place / "library"
    yield place
    datasets.config.HF_DATASETS_CACHE = before


def prepared(place: Path, name: str, content: bytes, tokenizer: Any, **settings: Any) -> PreparedData | None:
    file = place / "data" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    before = file.stat().st_mtime_ns
    section = DatasetSection(path=str(file), max_length=4096, **settings)
    try:
        return or_refused(
            lambda: prepare_data(section, tokenizer, seed=1, cache_dir=place / "cache", model_max_length=None)
        )
    finally:
        assert file.read_bytes() == content and file.stat().st_mtime_ns == before
        assert {path.name for path in place.iterdir()} <= {"cache", "data", "library"}
        shutil.rmtree(place / "data")
        shutil.rmtree(place / "cache", ignore_errors=True)


def learnt(data: PreparedData, tokenizer: Any) -> list[tuple[str, str]]:
    """Of each document the whole text and the trained part of it."""
    assert isinstance(data.train, Samples)

    def decoded(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return [
        (
            decoded(sample.input_ids),
            decoded([token for token, trained in zip(sample.input_ids, sample.loss_weights, strict=True) if trained]),
        )
        for sample in data.train
    ]


def chatml(messages: list[tuple[str, str]]) -> tuple[str, str]:
    """What the tiny tokenizer's template makes of a conversation, and what of it is learnt."""
    whole = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    trained = "".join(f"{content}<|im_end|>\n" for role, content in messages if role == "assistant")
    return whole, trained


def without_space(pair: tuple[str, str]) -> tuple[str, str]:
    return pair[0], "".join(pair[1].split())


chats = st.lists(st.tuples(st.sampled_from(sorted(ROLES)), said), min_size=1, max_size=4).map(
    lambda turns: [*turns, ("gpt", "end")]
)
pairs = st.tuples(text, said)


def as_jsonl(records: list[Any], ascii_only: bool) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=ascii_only) + "\n" for record in records).encode()


@given(
    st.lists(chats, min_size=1, max_size=3),
    st.sampled_from(["messages", "sharegpt"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(sorted(PACK)),
)
@tries(25)
def test_conversations(
    place: Path, tokenizer: Any, records: list[Any], kind: str, ascii_only: bool, as_list: bool, packed: str
) -> None:
    column, role, content = {
        "messages": ("messages", "role", "content"), "sharegpt": ("conversations", "from", "value")
    }[kind]  # fmt: skip
    written = [{column: [{role: who, content: what} for who, what in turns]} for turns in records]
    data = json.dumps(written, ensure_ascii=ascii_only).encode() if as_list else as_jsonl(written, ascii_only)
    made = prepared(place, f"d.json{'' if as_list else 'l'}{packed}", PACK[packed](data), tokenizer)
    if made is not None:
        wanted = [chatml([(ROLES[who], what) for who, what in turns]) for turns in records]
        got = learnt(made, tokenizer)
        assert list(map(without_space, got)) == list(map(without_space, wanted))


@example([("", "red"), ("", "<|im_end|>")], True, False)
@given(st.lists(pairs, min_size=1, max_size=4), st.booleans(), st.booleans())
@tries(25)
def test_prompts_and_completions(
    place: Path, tokenizer: Any, records: list[tuple[str, str]], ascii_only: bool, parquet: bool
) -> None:
    written = [{"prompt": prompt, "completion": completion} for prompt, completion in records]
    if parquet:
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), buffer)
        made = prepared(place, "d.parquet", buffer.getvalue(), tokenizer)
    else:
        made = prepared(place, "d.jsonl", as_jsonl(written, ascii_only), tokenizer)
    assert_pairs(made, records, tokenizer)


def assert_pairs(made: PreparedData | None, records: list[tuple[str, str]], tokenizer: Any) -> None:
    if made is None:
        return
    got = learnt(made, tokenizer)
    # A document of one token has nothing to predict: left out, and counted as dropped.
    alone = [pair for pair in records if "".join(pair) == "<|im_end|>"]
    records = [pair for pair in records if pair not in alone]
    assert made.stats.dropped == len(alone)
    assert len(got) == len(records)
    for (whole, trained), (prompt, completion) in zip(got, records, strict=True):
        end = "" if (prompt + completion).endswith("<|im_end|>") else "<|im_end|>"
        assert whole == prompt + completion + end
        assert trained.endswith((completion + end).lstrip()[-20:]) and completion.strip() in trained


@given(
    st.lists(pairs, min_size=1, max_size=4),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.booleans(),
)
@tries(40)
def test_csv_of_any_dialect(
    place: Path, tokenizer: Any, records: list[tuple[str, str]], separator: str, end: str, quoting: Any, marked: bool
) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=separator, lineterminator=end, quoting=quoting)
    writer.writerows([("prompt", "completion"), *records])
    content = buffer.getvalue().encode("utf-8-sig" if marked else "utf-8")
    assert_pairs(prepared(place, "d.csv", content, tokenizer), records, tokenizer)


@given(st.lists(text, min_size=1, max_size=4))
@tries(15)
def test_lines_of_text(place: Path, tokenizer: Any, lines: list[str]) -> None:
    content = "\n".join(lines).encode()
    made = prepared(place, "d.txt", content, tokenizer)
    if made is not None:
        got = "".join(whole for whole, _ in learnt(made, tokenizer)).replace("<|im_end|>", "")
        for line in content.decode().split("\n"):
            assert line.strip("\r\ufeff").replace("<|im_end|>", "") in got or not line.strip()


FIELDS = ["messages", "conversations", "role", "content", "from", "value", "prompt", "completion", "text",
          "instruction", "input", "output", "system", "history", "tools", "tool_calls", "label", "chosen",
          "rejected", "weight"]  # fmt: skip
records_of_any_kind = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)
turn_lists = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "robot"]) | odd},
        optional={"content": odd, "tool_calls": odd, "function_call": odd, "weight": odd, "train": odd, "name": odd},
    ),
    max_size=3,
)
likely = st.one_of(
    st.fixed_dictionaries({"messages": turn_lists | odd}, optional={"tools": odd}),
    st.fixed_dictionaries({"prompt": turn_lists | odd, "completion": turn_lists | odd}, optional={"tools": odd}),
    st.fixed_dictionaries(
        {"instruction": text | odd, "output": text | odd}, optional={"input": odd, "system": odd, "history": odd}
    ),
    st.fixed_dictionaries({"text": text | odd}),
    st.dictionaries(st.sampled_from(FIELDS), records_of_any_kind, max_size=4),
    records_of_any_kind,
)
settings_of_data = st.fixed_dictionaries(
    {},
    optional={
        "format": st.sampled_from(["messages", "sharegpt", "alpaca", "prompt_completion", "completion"]),
        "fields": st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(FIELDS), max_size=2),
        "template": st.sampled_from(["{prompt}", "{text}", "{", "{}", "{0}", "{prompt.x}", "{prompt!r:>9}", "a {{b}}"]),
        "train_on": st.sampled_from(["all", "user", "assistant", "system,tool"]),
        "packing": st.booleans(),
        "val_split": st.sampled_from([0.1, 0.5]),
        "max_samples": st.integers(1, 3),
        "on_bad_record": st.sampled_from(["stop", "skip"]),
        "streaming": st.just(True),
        "system_prompt": text,
        "split": st.sampled_from("train test train[:1] train[50%:] train+test [ train[::] train[5:]".split()),
    },
)


@given(st.lists(likely, max_size=4), settings_of_data, st.booleans())
@tries(60)
def test_records_of_any_kind(
    place: Path, tokenizer: Any, records: list[Any], settings: dict[str, Any], as_list: bool
) -> None:
    data = json.dumps(records).encode() if as_list else as_jsonl(records, True)
    if settings.get("streaming"):
        settings = settings | {"val_split": 0.0}
    made = prepared(place, "d.json" if as_list else "d.jsonl", data, tokenizer, **settings)
    if made is not None and not settings.get("streaming"):
        assert all(trained for _, trained in learnt(made, tokenizer))


LISTS = ("messages", "conversations", "prompt", "completion", "content", "tool_calls")
TEXT_FIELDS = ("content", "value", "prompt", "completion", "text", "instruction", "input", "output", "system", "label")


def texts_in(record: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The texts of a record and of its turns, with the names under which they would be reported."""
    for name, value in record.items():
        if isinstance(value, str) and name in TEXT_FIELDS and value:
            yield above + name, value
        elif isinstance(value, list) and name in LISTS:
            for turn in value:
                yield from texts_in(turn, f"{above}{name}.") if isinstance(turn, dict) else ()


said_parts = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": text}, optional={"label": text}), max_size=2
)
said_calls = st.lists(
    st.fixed_dictionaries({"name": st.just("f")}, optional={"arguments": st.just("{}"), "input": text, "output": text}),
    min_size=1,
    max_size=2,
)
said_turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": text | said_parts},
        optional={"label": text, "value": text, "weight": st.sampled_from([0, 1]), "tool_calls": said_calls},
    ),
    max_size=3,
)
said_pairs = st.lists(
    st.fixed_dictionaries(
        {"from": st.sampled_from(["human", "gpt", "system"]), "value": text}, optional={"text": text, "content": text}
    ),
    max_size=3,
)
complete = st.one_of(
    st.fixed_dictionaries({"messages": said_turns}),
    st.fixed_dictionaries({"conversations": said_pairs}),
    st.fixed_dictionaries({"prompt": text | said_turns, "completion": text | said_turns}),
    st.fixed_dictionaries({"instruction": text, "output": text}, optional={"input": text}),
    st.fixed_dictionaries({"text": text}),
)
others = st.dictionaries(st.sampled_from(TEXT_FIELDS), text | odd, max_size=3)


@given(st.tuples(others, complete).map(lambda both: both[0] | both[1]), st.booleans())
@tries(300)
def test_every_text_of_a_record_is_used_or_reported(record: dict[str, Any], has_chat_template: bool) -> None:
    def read() -> Conversation | PlainText:
        fmt = detect_format(SourceSection(), list(record), record, "dataset", has_chat_template=has_chat_template)
        return read_record(record, fmt, "record 1")

    example = or_refused(read)
    if example is not None:
        if isinstance(example, PlainText):
            used = [example.prompt + example.completion]
        else:
            used = [str(value) for message in example.messages for value in message.values()]
        lost = [
            name
            for name, value in texts_in(record)
            if name not in example.unused_fields and not any(value in whole for whole in used)
        ]
        assert lost == []


learnable = st.one_of(
    st.fixed_dictionaries(
        {"messages": said_turns.map(lambda turns: [*turns, {"role": "assistant", "content": "end"}])}
    ),
    st.fixed_dictionaries({"conversations": said_pairs.map(lambda turns: [*turns, {"from": "gpt", "value": "end"}])}),
    st.fixed_dictionaries({"prompt": text, "completion": said}),
    st.fixed_dictionaries({"instruction": said, "output": said}, optional={"input": text}),
    st.fixed_dictionaries({"text": said}),
)
more_texts = st.dictionaries(st.sampled_from(TEXT_FIELDS), text, max_size=3)


@given(st.tuples(more_texts, learnable).map(lambda both: both[0] | both[1]))
@tries(60)
def test_every_text_of_a_file_is_in_the_tokens_or_reported(place: Path, tokenizer: Any, record: dict[str, Any]) -> None:
    """Trained or masked, each text is in the documents; else the notes of the run name its field."""
    made = prepared(place, "d.jsonl", as_jsonl([record], False), tokenizer)
    if made is None:
        return
    whole, notes = "".join(text for text, _ in learnt(made, tokenizer)), "\n".join(made.stats.notes)
    lost = [name for name, value in texts_in(record) if value.strip() not in whole and f"{name} (in 1)" not in notes]
    assert lost == [], notes


GOOD = as_jsonl([{"prompt": f"question {n}", "completion": f"answer {n} é"} for n in range(6)], False)


@given(
    st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".md"]),
    st.sampled_from(sorted(PACK)),
    st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 5), st.binary(max_size=4)), max_size=3),
    st.integers(0, 400),
    st.booleans(),
)
@tries(60)
def test_damaged_files(
    place: Path, tokenizer: Any, kind: str, packed: str, changes: list[tuple[int, int, bytes]], cut: int, after: bool
) -> None:
    """Bytes put in, taken out and cut off, before or after the file is compressed."""

    def damaged(content: bytes) -> bytes:
        for at, away, more in changes:
            content = content[:at] + more + content[at + away :]
        return content[:-cut] if cut < len(content) and cut else content

    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in GOOD.splitlines()]), buffer)
        prepared(place, "d.parquet", damaged(buffer.getvalue()), tokenizer)
        return
    content = damaged(PACK[packed](GOOD)) if after else PACK[packed](damaged(GOOD))
    prepared(place, f"d{kind}{packed}", content, tokenizer)


cache_files = st.sampled_from(["index.npz", "stats.json", "files.json", "source-000.arrow"])


@given(st.lists(st.tuples(cache_files, st.integers(0, 3000), HARM), min_size=1, max_size=2))
@tries(25)
def test_a_damaged_cache_is_made_again(place: Path, tokenizer: Any, damages: list[tuple[str, int, str]]) -> None:
    data, cache = place / "data" / "d.jsonl", place / "cache"
    data.parent.mkdir(exist_ok=True)
    data.write_bytes(GOOD)
    section = DatasetSection(path=str(data), max_length=64)
    try:
        wanted = learnt(prepare_data(section, tokenizer, seed=1, cache_dir=cache, model_max_length=None), tokenizer)
        (folder,) = (path for path in cache.iterdir() if path.is_dir())
        for name, at, what in damages:
            damage(folder / name, at, what)
        again = or_refused(lambda: prepare_data(section, tokenizer, seed=1, cache_dir=cache, model_max_length=None))
        assert again is not None and learnt(again, tokenizer) == wanted
    finally:
        shutil.rmtree(cache)
        shutil.rmtree(data.parent)
