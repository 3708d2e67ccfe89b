"""Prepared data: what is kept, held out, weighted and packed; the cache, with several processes at once; streams."""

import json
import multiprocessing
import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.tiny import write_chats
from trainer.config import DatasetSection, UserError
from trainer.data import cache as prepare_module
from trainer.data.cache import PreparedData, prepare_data
from trainer.data.samples import Sample, Samples, SampleStream

pytestmark = pytest.mark.usefixtures("own_data_folder")


def prepared(
    tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, limit: int | None = None, **settings: Any
) -> PreparedData:
    section = DatasetSection(**({"path": "chats.jsonl", "max_length": 64} | settings))
    return prepare_data(section, tokenizer, seed=seed, cache_dir=Path("cache"), model_max_length=limit)


def count_samples(data: PreparedData) -> list[Sample]:
    assert isinstance(data.train, Samples)
    return list(data.train)


def texts(tokenizer: PreTrainedTokenizerBase, samples: Samples | list[Sample] | None) -> list[str]:
    return [tokenizer.decode(sample.input_ids) for sample in samples or []]


def write_texts(name: str, *lines: str) -> None:
    Path(name).write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_that_are_too_long_can_be_left_out(tokenizer: PreTrainedTokenizerBase, streaming: bool) -> None:
    write_texts("texts.jsonl", *("one two three " * count for count in (1, 40, 2, 41)))
    whole = prepared(tokenizer, path="texts.jsonl", max_length=4096)
    lengths = [len(sample.input_ids) for sample in count_samples(whole)]
    limit = max(lengths[0], lengths[2])
    left = prepared(
        tokenizer, path="texts.jsonl", max_length=limit, too_long="drop", streaming=streaming, shuffle=False
    )
    kept = list(islice(left.train.read(0), 4)) if isinstance(left.train, SampleStream) else count_samples(left)
    assert [len(sample.input_ids) for sample in kept] == [lengths[0], lengths[2]]
    if not streaming:
        assert (left.stats.too_long, left.stats.truncated, left.stats.dropped) == (2, 0, 0)
        assert f"2 dropped (longer than {limit} tokens)" in " ".join(left.stats.format_summary())
        with pytest.raises(UserError, match=r"max_length=2: all 4 records of dataset.path=.*longer.*too_long: cut"):
            prepared(tokenizer, path="texts.jsonl", max_length=2, too_long="drop")


@pytest.mark.parametrize("streaming", [False, True])
def test_long_texts_become_several_documents_that_learn_every_token_once(
    tokenizer: PreTrainedTokenizerBase, streaming: bool
) -> None:
    write_texts("texts.jsonl", *("one two three " * count for count in (1, 40, 41)))
    whole = count_samples(prepared(tokenizer, path="texts.jsonl", max_length=4096))
    split = prepared(tokenizer, path="texts.jsonl", max_length=16, too_long="split", streaming=streaming, shuffle=False)
    count = sum(-(-(len(sample.input_ids) - 1) // 15) for sample in whole)
    parts = list(islice(split.train.read(0), count)) if isinstance(split.train, SampleStream) else count_samples(split)
    assert max(len(part.input_ids) for part in parts) == 16 and len(parts) == count
    learnt = [token for part in parts for token in part.input_ids[1:]]
    assert learnt == [token for sample in whole for token in sample.input_ids[1:]]
    if not streaming:
        assert (split.stats.records, split.stats.truncated, split.stats.dropped) == (3, 0, 0)


def test_the_parts_of_a_text_are_held_out_together_and_conversations_are_cut(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    write_texts("texts.jsonl", *(f"number {index} " * 40 for index in range(10)))
    data = prepared(tokenizer, path="texts.jsonl", max_length=16, too_long="split", val_split=0.2)
    held_out = list(data.evaluation or [])
    assert data.evaluation is not None and data.stats.evaluation is not None
    assert data.stats.evaluation.records == 2 and len(held_out) > 2
    numbers = [
        {c for text in texts(tokenizer, part) for c in text if c.isdigit()} for part in (count_samples(data), held_out)
    ]
    assert [len(part) for part in numbers] == [8, 2] and not numbers[0] & numbers[1]
    write_chats(Path("chats.jsonl"), 10)
    cut = prepared(tokenizer, max_length=24, too_long="split").stats
    assert cut.truncated and cut.documents <= 10


def test_documents_keep_the_order_of_the_file(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 30)
    data = prepared(tokenizer)
    rows = [json.loads(line)["messages"] for line in Path("chats.jsonl").read_text().splitlines()]
    expected = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    assert texts(tokenizer, count_samples(data)) == expected
    assert data.evaluation is None
    stats = data.stats
    assert (stats.records, stats.documents, stats.samples, stats.dropped, stats.truncated) == (30, 30, 30, 0, 0)
    assert stats.tokens == sum(len(sample.input_ids) for sample in count_samples(data))
    assert stats.target_tokens == sum(sum(sample.loss_weights) for sample in count_samples(data)) > 0
    assert stats.trained_fraction == stats.target_tokens / stats.tokens
    assert stats.format_summary()[0] == "dataset: format messages (detected from the field messages)"


def test_long_documents_are_cut_and_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 30)
    whole, cut = prepared(tokenizer), prepared(tokenizer, max_length=30)
    longer = [sample for sample in count_samples(whole) if len(sample.input_ids) > 30]
    left = [sample for sample in longer if any(sample.loss_weights[1:30])]
    assert 0 < len(left) < len(longer) < 30
    assert cut.stats.truncated == len(left) and cut.stats.dropped == len(longer) - len(left)
    assert f"{len(left)} cut to 30 tokens; {len(longer) - len(left)} dropped" in cut.stats.format_summary()[1]
    kept = [sample for sample in count_samples(whole) if any(sample.loss_weights[1:30])]
    assert [sample.input_ids for sample in count_samples(cut)] == [sample.input_ids[:30] for sample in kept]


def test_packs_hold_every_document_once(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 60)
    alone, packed = prepared(tokenizer), prepared(tokenizer, packing=True, max_length=100)
    documents = []
    for sample in count_samples(packed):
        assert len(sample.input_ids) == sum(sample.document_lengths) == len(sample.loss_weights) <= 100
        start = 0
        for length in sample.document_lengths:
            documents.append((sample.input_ids[start : start + length], sample.loss_weights[start : start + length]))
            start += length
    assert sorted(documents) == sorted((sample.input_ids, sample.loss_weights) for sample in count_samples(alone))
    assert packed.stats.samples == len(count_samples(packed)) < 40 and packed.stats.documents == 60
    assert packed.stats.packing_efficiency == packed.stats.tokens / (100 * packed.stats.samples) > 0.85
    assert packed.stats.target_tokens == alone.stats.target_tokens


def test_held_out_records_are_no_others(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = [f"line number {index}" for index in range(50)]
    write_texts("a.jsonl", *lines)
    data = prepared(tokenizer, path="a.jsonl", val_split=0.2)
    train, held_out = texts(tokenizer, count_samples(data)), texts(tokenizer, data.evaluation)
    assert len(train) == 40 and len(held_out) == 10
    assert sorted(train + held_out) == sorted(f"{line}<|im_end|>" for line in lines)
    assert data.stats.evaluation is not None and data.stats.evaluation.records == 10
    assert data.stats.format_summary()[-1].startswith("held out: 10 documents")
    assert texts(tokenizer, prepared(tokenizer, path="a.jsonl", val_split=0.2, seed=1).evaluation) != held_out
    # The same records, whatever is then made of them.
    shorter = prepared(tokenizer, path="a.jsonl", val_split=0.2, max_length=5)
    assert [text[:4] for text in texts(tokenizer, shorter.evaluation)] == [text[:4] for text in held_out]


def test_an_evaluation_source_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    write_texts("a.jsonl", "one", "two")
    Path("b.jsonl").write_text('{"prompt": "three", "completion": " four"}\n')
    data = prepared(tokenizer, path="a.jsonl", evaluation={"path": "b.jsonl"})
    assert texts(tokenizer, count_samples(data)) == ["one<|im_end|>", "two<|im_end|>"]
    assert texts(tokenizer, data.evaluation) == ["three four<|im_end|>"]
    assert (
        data.stats.notes[1]
        == "dataset.evaluation: format prompt_completion (detected from the fields prompt + completion)"
    )


def test_weights_of_a_mix(tokenizer: PreTrainedTokenizerBase) -> None:
    write_texts("a.jsonl", *(f"a{index}" for index in range(10)))
    write_texts("b.jsonl", *(f"b{index}" for index in range(10)))
    Path("c.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]}\n'
    )
    mix = [{"path": "a.jsonl", "weight": 2.5}, {"path": "b.jsonl", "weight": 0.3}, {"path": "c.jsonl"}]
    data = prepared(tokenizer, path=None, mix=mix)
    found = [text.removesuffix("<|im_end|>") for text in texts(tokenizer, count_samples(data))]
    counts = {text: found.count(text) for text in set(found)}
    assert sorted(count for text, count in counts.items() if text.startswith("a")) == [2] * 5 + [3] * 5
    assert (
        sum(count for text, count in counts.items() if text.startswith("b"))
        == 3
        == len([t for t in counts if "b" in t])
    )
    assert data.stats.documents == 29 and data.stats.records == 21
    assert texts(tokenizer, count_samples(prepared(tokenizer, path=None, mix=mix, workers=2))) == texts(
        tokenizer, count_samples(data)
    )


def test_repeated_records_are_not_held_out_and_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    write_texts("a.jsonl", *(f"a{index}" for index in range(10)))
    data = prepared(tokenizer, path=None, mix=[{"path": "a.jsonl", "weight": 3.0}], val_split=0.3)
    train, held_out = texts(tokenizer, count_samples(data)), texts(tokenizer, data.evaluation)
    assert len(train) == 21 and len(held_out) == 3 and not set(train) & set(held_out)


def test_workers_change_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 40)
    environment = os.environ
    one, two = prepared(tokenizer, workers=1), prepared(tokenizer, workers=2)
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != prepared(tokenizer, max_length=63).fingerprint
    (Path("cache") / one.fingerprint).rename("elsewhere")
    assert os.environ is environment  # datasets replaces it
    again = prepared(tokenizer, workers=2)
    assert list(Path("cache", again.fingerprint).glob("source-000_*.arrow"))  # two processes wrote a file each
    assert count_samples(again) == count_samples(one) and again.stats == one.stats


def test_second_call_reads_the_cache(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chats(Path("chats.jsonl"), 10)
    first = prepared(tokenizer, val_split=0.2)
    monkeypatch.setattr(prepare_module, "_build_cache", lambda *_: pytest.fail("built twice"))
    second = prepared(tokenizer, val_split=0.2)
    assert count_samples(second) == count_samples(first) and second.stats == first.stats
    assert texts(tokenizer, second.evaluation) == texts(tokenizer, first.evaluation)


def test_changed_content_template_or_tokenizer_is_another_cache(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write_chats(Path("chats.jsonl"), 10)
    keys = [prepared(tokenizer).fingerprint, prepared(tokenizer, system_prompt="S").fingerprint]
    write_chats(Path("chats.jsonl"), 10, seed=1)
    keys.append(prepared(tokenizer).fingerprint)
    changed = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    changed.chat_template = tokenizer.chat_template.replace("\n", " ")
    keys.append(prepared(changed).fingerprint)
    changed = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    changed.add_tokens(["<think>"])
    keys.append(prepared(changed).fingerprint)
    assert len(set(keys)) == 5


def test_what_an_interrupted_build_left_is_not_used(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 10)
    first = prepared(tokenizer)
    finished = Path("cache") / first.fingerprint
    finished.rename(finished.with_suffix(".building"))
    (finished.with_suffix(".building") / "index.npz").write_bytes(b"half")
    assert count_samples(prepared(tokenizer)) == count_samples(first)
    assert not finished.with_suffix(".building").exists()


def _count_builds(folder: str, tokenizer_folder: str, start: Any, results: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    build = prepare_module._build_cache
    built: list[int] = []

    def slow_build(*arguments: Any) -> None:
        built.append(1)
        time.sleep(0.5)  # the others are at the lock by now
        build(*arguments)

    prepare_module._build_cache = slow_build  # type: ignore[assignment]
    section = DatasetSection(path=f"{folder}/chats.jsonl", max_length=64)
    start.wait()
    data = prepare_data(section, tokenizer, seed=0, cache_dir=Path(folder, "cache"), model_max_length=None)
    assert isinstance(data.train, Samples)
    results.put((len(built), [sample.input_ids for sample in data.train]))


def test_of_several_processes_one_builds(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 10)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    start = context.Barrier(3)
    arguments = (str(tmp_path), tokenizer.name_or_path, start, results)
    processes = [context.Process(target=_count_builds, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(built for built, _ in found) == [0, 0, 1]
    assert found[0][1] == found[1][1] == found[2][1]


@pytest.mark.parametrize("settings", [{}, {"max_length": 30}, {"path": None, "mix": [{"path": "chats.jsonl"}]}])
def test_a_stream_gives_what_memory_gives(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> None:
    write_chats(Path("chats.jsonl"), 150)
    stored = prepared(tokenizer, **settings)
    streamed = prepared(tokenizer, streaming=True, shuffle=False, **settings)
    assert isinstance(streamed.train, SampleStream)
    assert list(streamed.train.read(0)) == count_samples(stored)
    assert list(islice(streamed.train.read(1), 5)) == count_samples(stored)[:5]
    assert not Path("cache", streamed.fingerprint).exists()


def test_a_shuffled_stream_has_an_order_of_its_own_each_epoch(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 100)
    stream = prepared(tokenizer, streaming=True).train
    assert isinstance(stream, SampleStream)
    first, again, second = ([sample.input_ids for sample in stream.read(epoch)] for epoch in (0, 0, 1))
    assert first == again != second and sorted(first) == sorted(second)


def test_a_packed_stream_has_every_document_once(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 100)
    stream = prepared(tokenizer, streaming=True, packing=True, max_length=128).train
    assert isinstance(stream, SampleStream)
    packs = list(stream.read(0))
    stored = prepared(tokenizer, packing=True, max_length=128)
    assert len(packs) == stored.stats.samples
    assert sum(len(pack.document_lengths) for pack in packs) == 100
    assert sum(len(pack.input_ids) for pack in packs) == stored.stats.tokens


def test_a_mixed_stream_draws_by_weight(tokenizer: PreTrainedTokenizerBase) -> None:
    write_texts("a.jsonl", *(f"a{index}" for index in range(300)))
    write_texts("b.jsonl", *(f"b{index}" for index in range(300)))
    mix = [{"path": "a.jsonl", "weight": 3.0}, {"path": "b.jsonl", "weight": 1.0}]
    stream = prepared(tokenizer, path=None, mix=mix, streaming=True, shuffle=False).train
    assert isinstance(stream, SampleStream)
    found = texts(tokenizer, list(stream.read(0)))
    first = found[:200]
    assert 130 <= sum(text.startswith("a") for text in first) <= 170  # 150, standard deviation 6
    assert {text for text in found if text.startswith("b")} == {f"b{index}<|im_end|>" for index in range(300)}


def test_a_stream_with_an_evaluation_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    write_texts("a.jsonl", "one", "two")
    write_texts("b.jsonl", "three")
    data = prepared(tokenizer, path="a.jsonl", streaming=True, shuffle=False, evaluation={"path": "b.jsonl"})
    assert texts(tokenizer, data.evaluation) == ["three<|im_end|>"]
    assert data.stats.format_summary()[0] == "dataset: streamed from a.jsonl"


def chats(*pairs: tuple[str, str]) -> str:
    """One conversation a line, of one turn each: (role, content)."""
    return "".join(json.dumps({"messages": [{"role": role, "content": text}]}) + "\n" for role, text in pairs)


BAD: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "nothing trained": (
        {"a.jsonl": chats(("user", "x"), ("user", "y"))},
        {"path": "a.jsonl"},
        ("dataset.train_on=assistant: none of the 2 records", "`zerolora inspect`"),
    ),
    "roles that leave no answer": (
        {"a.jsonl": chats(("human", "x"), ("gpt", "y"))},
        {"path": "a.jsonl", "roles": {"user": ["gpt"], "system": ["human"]}},
        ("none of the 2 records", "correct dataset.roles"),
    ),
    "all cut to nothing": (
        {"a.jsonl": chats(("assistant", "red blue"))},
        {"path": "a.jsonl", "max_length": 3},
        ("dataset.max_length=3: cuts all trained tokens", "raise max_length"),
    ),
    "held out alone": (
        {"a.jsonl": chats(("assistant", "red"))},
        {"path": "a.jsonl", "val_split": 0.1},
        ("dataset.val_split=0.1: none of 1 record would remain for training;", "dataset.evaluation"),
    ),
    "evaluation without a trained token": (
        {"a.jsonl": chats(("assistant", "red")), "b.jsonl": chats(("user", "red"))},
        {"path": "a.jsonl", "evaluation": {"path": "b.jsonl"}},
        ("none of the 1 records of dataset.evaluation.path=b.jsonl",),
    ),
    "a bad record among good ones": (
        {"a.jsonl": chats(*[("assistant", "red")] * 700, ("robot", "x"))},
        {"path": "a.jsonl"},
        ("dataset.path=a.jsonl, record 701, turn 1", "robot"),
    ),
    "two formats in one file": (
        {"a.jsonl": chats(("assistant", "red")) + '{"prompt": "x", "completion": "y"}\n'},
        {"path": "a.jsonl"},
        ("record 2: messages is missing (the record has prompt, completion)", "dataset.mix"),
    ),
    "a bad source of a mix": (
        {"a.jsonl": chats(("assistant", "red")), "b.jsonl": '{"foo": 1}\n'},
        {"path": None, "mix": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]},
        ("dataset.mix.1.format=auto", "foo"),
    ),
    "longer than the model": (
        {"a.jsonl": chats(("assistant", "red"))},
        {"path": "a.jsonl", "limit": 32},
        ("dataset.max_length=64", "only has positions for 32 tokens"),
    ),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", BAD)
def test_refuses_in_one_line_and_leaves_nothing(tokenizer: PreTrainedTokenizerBase, name: str, workers: int) -> None:
    files, settings, needles = BAD[name]
    for file, text in files.items():
        Path(file).write_text(text)
    with pytest.raises(UserError) as caught:
        prepared(tokenizer, workers=workers, **settings)
    assert "\n" not in str(caught.value)
    assert [needle for needle in needles if needle not in str(caught.value)] == []
    assert [path.name for path in Path("cache").glob("*") if path.suffix != ".lock"] == []


def test_a_tokenizer_without_a_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 3)
    plain = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    plain.chat_template = None
    with pytest.raises(UserError, match=r"record 1: is a conversation, but the tokenizer has no chat template; set "):
        prepared(plain)
    data = prepared(plain, chat_template=tokenizer.chat_template)
    assert count_samples(data) == count_samples(prepared(tokenizer))
    write_texts("a.jsonl", "red")
    assert texts(plain, count_samples(prepared(plain, path="a.jsonl"))) == ["red<|im_end|>"]


def test_a_cache_that_cannot_be_written(tokenizer: PreTrainedTokenizerBase) -> None:
    write_chats(Path("chats.jsonl"), 3)
    Path("cache").write_text("a file")
    with pytest.raises(UserError, match=r"dataset.cache_dir=cache: cannot be written"):
        prepared(tokenizer)
