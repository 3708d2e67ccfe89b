"""Streams: the same batches on any number of ranks and from any checkpoint, and no record tokenised for nothing."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.tiny import write_chats
from trainer.config import DatasetSection, UserError
from trainer.data.batches import MicroBatch, StreamBatches
from trainer.data.cache import prepare_data
from trainer.data.documents import DocumentEncoder
from trainer.data.samples import SampleStream

RECORDS = 1300


@pytest.fixture(autouse=True)
def _files(own_data_folder: Path) -> None:
    write_chats(Path("a.jsonl"), RECORDS)
    write_chats(Path("b.jsonl"), 200, seed=1)
    # Records without a trained token, which the ranks cannot know of before they tokenise.
    lines = Path("a.jsonl").read_text().splitlines()
    asked = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    Path("a.jsonl").write_text("\n".join(asked if number % 7 == 3 else line for number, line in enumerate(lines)))


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of records of each call that tokenises."""
    found: list[int] = []
    rows = DocumentEncoder.encode_rows

    def counted(self: DocumentEncoder, records: Any, *arguments: Any) -> Any:
        found.append(len(records))
        return rows(self, records, *arguments)

    monkeypatch.setattr(DocumentEncoder, "encode_rows", counted)
    return found


def stream_of(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> SampleStream:
    section = DatasetSection(**({"path": "a.jsonl", "max_length": 64, "streaming": True} | settings))
    data = prepare_data(section, tokenizer, seed=3, cache_dir=Path("cache"), model_max_length=None)
    assert isinstance(data.train, SampleStream)
    return data.train


def batches_of(
    stream: SampleStream, *, rank: int = 0, world_size: int = 1, accumulation: int = 4, gather: Any = None
) -> StreamBatches:
    sizes = {"batch_size": 4, "accumulation": accumulation, "rank": rank, "world_size": world_size}
    return StreamBatches(stream, pad_token_id=0, flat=False, pairs=False, gather=gather, **sizes)


def rows_in(batches: list[MicroBatch]) -> list[list[int]]:
    """Token ids row by row, without padding."""
    return [[token for token in row if token] for batch in batches for row in batch.input_ids.tolist()]


def test_a_stream_without_an_answer_to_train_on_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    asked, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": ""}
    Path("asked.jsonl").write_text((json.dumps({"messages": [asked]}) + "\n") * 70)
    with pytest.raises(UserError, match=r"^dataset.train_on=assistant: none of the first 70 records of .*asked"):
        stream_of(tokenizer, path="asked.jsonl")
    Path("empty.jsonl").write_text((json.dumps({"messages": [asked, answer]}) + "\n") * 3)
    with pytest.raises(UserError, match=r"^dataset.path=empty.jsonl: all 3 answers are empty"):
        stream_of(tokenizer, path="empty.jsonl")
    with Path("asked.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [asked, answer | {"content": "y"}]}))
    assert len(rows_in(batches_of(stream_of(tokenizer, path="asked.jsonl")).build_step_batches(0, 0)[0])) == 16


SETTINGS: dict[str, dict[str, Any]] = {
    "in order": {"shuffle": False},
    "shuffled": {},
    "packed": {"packing": True, "max_length": 128},
    "mixed": {"path": None, "mix": [{"path": "a.jsonl"}, {"path": "b.jsonl", "weight": 2.0}]},
    "mixed and packed": {
        "path": None,
        "mix": [{"path": "a.jsonl"}, {"path": "b.jsonl"}],
        "packing": True,
        "max_length": 128,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_stream_goes_on_without_tokenising_what_was_before(
    tokenizer: PreTrainedTokenizerBase, tokenised: list[int], name: str
) -> None:
    stream = stream_of(tokenizer, **SETTINGS[name])
    whole = batches_of(stream)
    steps = 80 if name in ("in order", "shuffled") else 40  # past the end of the first epoch
    expected, states = [], []
    for step in range(steps):
        states.append(json.loads(json.dumps(whole.state_dict())))
        expected.append(rows_in(whole.build_step_batches(0, 16 * step)[0]))
    for at in (1, steps - 2):
        resumed = batches_of(stream)
        resumed.load_state_dict(states[at])
        tokenised.clear()
        assert [rows_in(resumed.build_step_batches(0, 16 * step)[0]) for step in (at, at + 1)] == expected[at : at + 2]
        # Two steps of 16, or the window of 1,000 documents that is being packed, in blocks of 64 records.
        assert sum(tokenised) <= (64 * 5 if "packed" not in name else 2600)
    resumed = batches_of(stream)  # a checkpoint of an earlier version says nothing of the stream
    assert rows_in(resumed.build_step_batches(0, 16 * 20)[0]) == expected[20]


class Exchange:
    """Collects the objects of two ranks, which are threads here."""

    def __init__(self) -> None:
        self._barrier, self._found = threading.Barrier(2), dict[int, Any]()

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._found[rank] = value
        self._barrier.wait(60)
        found = [self._found[0], self._found[1]]
        self._barrier.wait(60)
        return found


def ranks_of(stream: SampleStream) -> list[StreamBatches]:
    """Two ranks that tokenise for each other."""
    exchange = Exchange()
    return [
        batches_of(stream, rank=rank, world_size=2, accumulation=2, gather=partial(exchange.gather, rank))
        for rank in range(2)
    ]


@pytest.mark.parametrize("name", ["shuffled", "packed"])
def test_two_ranks_share_the_work_and_one_goes_on_with_the_same_batches(
    tokenizer: PreTrainedTokenizerBase, tokenised: list[int], name: str
) -> None:
    steps = 30
    alone = batches_of(stream_of(tokenizer, **SETTINGS[name]))
    expected = [[rows_in([batch]) for batch in alone.build_step_batches(0, 16 * step)[0]] for step in range(steps + 2)]
    needed = sum(tokenised)
    tokenised.clear()
    both = ranks_of(stream_of(tokenizer, **SETTINGS[name]))

    def run(rank: StreamBatches) -> list[Any]:
        return [[rows_in([batch]) for batch in rank.build_step_batches(0, 16 * step)[0]] for step in range(steps)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, both))
    for step in range(steps):  # micro-step by micro-step, rank by rank
        assert [rows[step][at] for at in range(2) for rows in found] == expected[step]
    assert needed - 128 <= sum(tokenised) <= needed + 128  # each block once, and what was made ahead
    assert both[0].state_dict() == both[1].state_dict()
    one = batches_of(stream_of(tokenizer, **SETTINGS[name]))
    one.load_state_dict(json.loads(json.dumps(both[0].state_dict())))
    for step in (steps, steps + 1):
        assert [rows_in([batch]) for batch in one.build_step_batches(0, 16 * step)[0]] == expected[step]


@pytest.mark.parametrize("difference", [{"shuffle": False}, {"max_length": 32}])
def test_two_runs_of_one_parent_that_differ_in_a_single_setting_read_their_own_blocks(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, difference: dict[str, Any]
) -> None:
    """Ranks exchange blocks with each other only: no file or name that a run next to them could share."""
    steps, settings = 6, [{}, difference]

    def rows_of(rank: StreamBatches) -> list[Any]:
        return [[rows_in([batch]) for batch in rank.build_step_batches(0, 16 * step)[0]] for step in range(steps)]

    alone = [rows_of(batches_of(stream_of(tokenizer, **each))) for each in settings]
    assert alone[0] != alone[1]
    before = sorted(tmp_path.rglob("*"))
    with ThreadPoolExecutor(4) as pool:  # two runs of two ranks at the same time
        found = list(pool.map(rows_of, [rank for each in settings for rank in ranks_of(stream_of(tokenizer, **each))]))
    for run, expected in enumerate(alone):
        pair = found[2 * run : 2 * run + 2]
        assert [[rank[step][at] for at in range(2) for rank in pair] for step in range(steps)] == expected
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bad_record_is_told_by_every_rank_when_it_is_needed(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = Path("b.jsonl").read_text().splitlines()
    lines[150] = json.dumps({"messages": [{"role": "robot", "content": "x"}]})
    Path("b.jsonl").write_text("\n".join([*lines, "{broken"]))
    _check_errors(stream_of(tokenizer, path="b.jsonl", shuffle=False), "record 151, turn 1: unknown role 'robot'")
    Path("b.jsonl").write_text("\n".join([*lines[:150], "{broken"]))
    _check_errors(stream_of(tokenizer, path="b.jsonl", shuffle=False), "line 151 of b.jsonl is not JSON")


def _check_errors(stream: SampleStream, message: str) -> None:
    """Both ranks raise an error with the message in the ninth step, after 128 records."""
    found = _steps_until_error(ranks_of(stream))
    assert [step for step, _ in found] == [8, 8] and all(message in error for _, error in found)


def _steps_until_error(ranks: list[StreamBatches]) -> list[tuple[int, str]]:
    def run(rank: StreamBatches) -> tuple[int, str]:
        for step in range(20):
            try:
                rank.build_step_batches(0, 16 * step)
            except UserError as error:
                return step, str(error)
        return 20, ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, ranks))


def write_bad(*numbers: int) -> None:
    lines = Path("a.jsonl").read_text().splitlines()
    bad = json.dumps({"messages": [{"role": "moderator", "content": "x"}]})
    Path("a.jsonl").write_text("\n".join(bad if number in numbers else line for number, line in enumerate(lines)))


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_that_fails_leaves_the_state_before_it(tokenizer: PreTrainedTokenizerBase, packing: bool) -> None:
    settings: dict[str, Any] = {"shuffle": False, "packing": packing, "max_length": 128}
    whole, good = batches_of(stream_of(tokenizer, **settings)), Path("a.jsonl").read_text()
    expected = [rows_in(whole.build_step_batches(0, 16 * step)[0]) for step in range(70)]
    write_bad(1240)
    batches, step = batches_of(stream_of(tokenizer, **settings)), 0
    with pytest.raises(UserError, match=r"record 1241, turn 1: unknown role 'moderator'"):
        while True:
            assert rows_in(batches.build_step_batches(0, 16 * step)[0]) == expected[step]
            step += 1
    state = json.loads(json.dumps(batches.state_dict()))
    assert state["offset"] == 16 * step > 0
    Path("a.jsonl").write_text(good)
    resumed = batches_of(stream_of(tokenizer, **settings))
    resumed.load_state_dict(state)
    assert rows_in(resumed.build_step_batches(0, 16 * step)[0]) == expected[step]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_skipped_records_are_counted_from_any_state(
    tokenizer: PreTrainedTokenizerBase, name: str, world_size: int
) -> None:
    write_bad(70, 71, 500)
    stream = stream_of(tokenizer, on_bad_record="skip", **SETTINGS[name])
    batches, states, counts = batches_of(stream, world_size=world_size, accumulation=4 // world_size), [], []
    for step in range(60):
        batches.build_step_batches(0, 16 * step)
        states.append(json.loads(json.dumps(batches.state_dict())))
        counts.append(dict(batches.skipped))
    source = next(iter(counts[0]))
    assert counts[-1][source] >= 1 and all(before[source] <= after[source] for before, after in pairwise(counts))
    resumed = batches_of(stream)
    resumed.load_state_dict(states[29])
    for step in range(30, 60):
        resumed.build_step_batches(0, 16 * step)
    assert resumed.skipped == counts[-1]
