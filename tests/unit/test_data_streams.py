"""Streams: the same batches on any number of ranks and from any checkpoint, and no record tokenised for nothing."""

import json
import multiprocessing
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.tiny import write_chats
from trainer.config import DatasetSection, UserError
from trainer.data import MicroBatch, SampleStream, StreamBatches, prepare_data
from trainer.data.documents import DocumentEncoder
from trainer.data.shared_blocks import SharedBlocks, run_blocks_folder

RECORDS = 1300


@pytest.fixture(autouse=True)
def _files(own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(own_data_folder / "tmp"))
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
    rows = DocumentEncoder.rows

    def counted(self: DocumentEncoder, records: Any, *arguments: Any) -> Any:
        found.append(len(records))
        return rows(self, records, *arguments)

    monkeypatch.setattr(DocumentEncoder, "rows", counted)
    return found


def stream_of(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> SampleStream:
    section = DatasetSection(**({"path": "a.jsonl", "max_length": 64, "streaming": True} | settings))
    data = prepare_data(section, tokenizer, seed=3, cache_dir=Path("cache"), max_length_of_model=None)
    assert isinstance(data.train, SampleStream)
    return data.train


def batches_of(stream: SampleStream, *, rank: int = 0, world_size: int = 1, accumulation: int = 4) -> StreamBatches:
    sizes = {"batch_size": 4, "accumulation": accumulation, "rank": rank, "world_size": world_size}
    return StreamBatches(stream, pad_token_id=0, flat=False, pairs=False, **sizes)


def rows_in(batches: list[MicroBatch]) -> list[list[int]]:
    """Token ids row by row, without padding."""
    return [[token for token in row if token] for batch in batches for row in batch.input_ids.tolist()]


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
        expected.append(rows_in(whole.step_batches(0, 16 * step)[0]))
    for at in (1, steps - 2):
        resumed = batches_of(stream)
        resumed.load_state_dict(states[at])
        tokenised.clear()
        assert [rows_in(resumed.step_batches(0, 16 * step)[0]) for step in (at, at + 1)] == expected[at : at + 2]
        # Two steps of 16, or the window of 1,000 documents that is being packed, in blocks of 64 records.
        assert sum(tokenised) <= (64 * 5 if "packed" not in name else 2600)
    resumed = batches_of(stream)  # a checkpoint of an earlier version says nothing of the stream
    assert rows_in(resumed.step_batches(0, 16 * 20)[0]) == expected[20]


def _rank(
    rank: int, tokenizer_folder: str, settings: dict[str, Any], hosts: int, steps: int, start: Any, results: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    made: list[int] = []
    rows = DocumentEncoder.rows

    def counted(self: DocumentEncoder, records: Any, *arguments: Any) -> Any:
        made.append(len(records))
        time.sleep(0.02)  # as long as real records take
        return rows(self, records, *arguments)

    DocumentEncoder.rows = counted  # type: ignore[method-assign, assignment]
    stream = stream_of(tokenizer, **settings)
    if hosts > 1:
        os.environ["SLURMD_NODENAME"] = f"n{rank}"
        folder = run_blocks_folder(Path("logs"), "token", is_main=rank == 0)
        stream = SampleStream(stream.read, stream.packed, folder / stream.name, stream.name)
    batches = batches_of(stream, rank=rank, world_size=2, accumulation=2)
    found = []
    for step in range(steps):
        start.wait()  # training keeps ranks in step
        found.append([rows_in([batch]) for batch in batches.step_batches(0, 16 * step)[0]])
    assert stream.shared is not None
    makers = {file.read_text().split()[0] for file in stream.shared.rglob("*.claim")}
    results.put((rank, sum(made), found, json.dumps(batches.state_dict()), makers))
    start.wait()


@pytest.mark.parametrize(("name", "hosts"), [("shuffled", 1), ("packed", 1), ("shuffled", 2), ("packed", 2)])
def test_two_ranks_share_the_work_and_one_goes_on_with_the_same_batches(
    tokenizer: PreTrainedTokenizerBase, tokenised: list[int], name: str, hosts: int
) -> None:
    """On one host, and on two that share the run's folder."""
    steps = 30
    alone = batches_of(stream_of(tokenizer, **SETTINGS[name]))
    expected = [[rows_in([batch]) for batch in alone.step_batches(0, 16 * step)[0]] for step in range(steps + 2)]
    needed = sum(tokenised)
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(2), context.Queue()
    arguments = (tokenizer.name_or_path, SETTINGS[name], hosts, steps, start, results)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    ranks = sorted((results.get(timeout=300) for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
    for step in range(steps):  # micro-step by micro-step, rank by rank
        assert [rank[2][step][at] for at in range(2) for rank in ranks] == expected[step]
    made = [rank[1] for rank in ranks]
    assert needed - 128 <= sum(made) <= needed + 32 * 64  # each block once, and what was made ahead
    assert max(made) < 0.75 * sum(made)
    assert ranks[0][3] == ranks[1][3]
    assert len(ranks[0][4]) == hosts
    one = batches_of(stream_of(tokenizer, **SETTINGS[name]))
    one.load_state_dict(json.loads(ranks[0][3]))
    for step in (steps, steps + 1):
        assert [rows_in([batch]) for batch in one.step_batches(0, 16 * step)[0]] == expected[step]


def test_a_bad_record_is_told_by_every_rank_when_it_is_needed(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = Path("b.jsonl").read_text().splitlines()
    lines[150] = json.dumps({"messages": [{"role": "robot", "content": "x"}]})
    Path("b.jsonl").write_text("\n".join([*lines, "{broken"]))
    stream = stream_of(tokenizer, path="b.jsonl", shuffle=False)
    ranks = [batches_of(stream, rank=rank, world_size=2, accumulation=2) for rank in range(2)]
    for step in range(8):  # 128 records
        for rank in ranks:
            rank.step_batches(0, 16 * step)
    for rank in ranks:
        with pytest.raises(UserError, match=r"record 151, turn 1: role 'robot' is not known"):
            rank.step_batches(0, 128)
    Path("b.jsonl").write_text("\n".join([*lines[:150], "{broken"]))
    stream = stream_of(tokenizer, path="b.jsonl", shuffle=False)
    ranks = [batches_of(stream, rank=rank, world_size=2, accumulation=2) for rank in range(2)]
    for rank in ranks:
        for step in range(8):
            rank.step_batches(0, 16 * step)
        with pytest.raises(UserError, match=r"line 151 of b.jsonl is not JSON"):
            rank.step_batches(0, 128)


def test_a_file_that_is_edited_is_another_stream(tokenizer: PreTrainedTokenizerBase) -> None:
    before = stream_of(tokenizer, path="b.jsonl").shared
    assert before == stream_of(tokenizer, path="b.jsonl").shared
    Path("b.jsonl").write_text(Path("a.jsonl").read_text())
    assert before != stream_of(tokenizer, path="b.jsonl").shared
    with pytest.raises(UserError, match=r"dataset.path=gone.jsonl: no such file"):
        stream_of(tokenizer, path="gone.jsonl")


def test_a_block_that_a_dead_rank_has_claimed_is_made_by_who_needs_it(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.shared_blocks.PATIENCE_S", 0.2)
    stream = stream_of(tokenizer, shuffle=False)
    expected = [rows_in(batches_of(stream, accumulation=2).step_batches(0, 0)[0])]
    assert stream.shared is not None
    claim = stream.shared / "0-0" / "block-000000000.claim"
    claim.parent.mkdir(parents=True)
    claim.write_text("n9 1\n")
    found = batches_of(stream, world_size=2, accumulation=1).step_batches(0, 0)[0]
    assert rows_in(found) == expected[0][:4]
    assert claim.read_text() == "n9 1\n"


def test_a_damaged_block_is_made_again(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = stream_of(tokenizer, shuffle=False)
    expected = rows_in(batches_of(stream, world_size=2).step_batches(0, 0)[0])
    assert stream.shared is not None
    block = stream.shared / "0-0" / "block-000000000.npz"
    block.write_bytes(block.read_bytes()[:100])
    assert rows_in(batches_of(stream, world_size=2).step_batches(0, 0)[0]) == expected


def test_streams_in_another_order_share_no_blocks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Two runs of one launcher would otherwise read each other's documents."""
    in_order, again, shuffled = (stream_of(tokenizer, shuffle=shuffle) for shuffle in (False, False, True))
    assert in_order.shared == again.shared and in_order.name == again.name
    assert in_order.shared != shuffled.shared and in_order.name != shuffled.name


def test_the_blocks_of_earlier_runs_are_removed(tmp_path: Path) -> None:
    for token in ("old", "own"):
        (tmp_path / f"stream-{token}").mkdir()
    assert run_blocks_folder(tmp_path, "own", is_main=False) == tmp_path / "stream-own"
    assert (tmp_path / "stream-old").exists(), "that is for rank 0 to do"
    run_blocks_folder(tmp_path, "own", is_main=True)
    assert [path.name for path in tmp_path.glob("stream-*")] == ["stream-own"]


def test_blocks_that_are_passed_are_removed(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.shared_blocks.KEPT", 2)
    stream = stream_of(tokenizer, shuffle=False)
    batches = batches_of(stream, world_size=2, accumulation=2)
    for step in range(40):  # 640 documents are 747 records are 12 blocks
        batches.step_batches(0, 16 * step)
    assert stream.shared is not None
    left = sorted(int(path.stem.split("-")[1]) for path in stream.shared.rglob("block-*.npz"))
    assert left[0] >= 9 and not list(stream.shared.rglob("*.npz.*"))


def write_bad(*numbers: int) -> None:
    lines = Path("a.jsonl").read_text().splitlines()
    bad = json.dumps({"messages": [{"role": "moderator", "content": "x"}]})
    Path("a.jsonl").write_text("\n".join(bad if number in numbers else line for number, line in enumerate(lines)))


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_that_fails_leaves_the_state_before_it(tokenizer: PreTrainedTokenizerBase, packing: bool) -> None:
    settings: dict[str, Any] = {"shuffle": False, "packing": packing, "max_length": 128}
    whole, good = batches_of(stream_of(tokenizer, **settings)), Path("a.jsonl").read_text()
    expected = [rows_in(whole.step_batches(0, 16 * step)[0]) for step in range(70)]
    write_bad(1240)
    batches, step = batches_of(stream_of(tokenizer, **settings)), 0
    with pytest.raises(UserError, match=r"record 1241, turn 1: role 'moderator'"):
        while True:
            assert rows_in(batches.step_batches(0, 16 * step)[0]) == expected[step]
            step += 1
    state = json.loads(json.dumps(batches.state_dict()))
    assert state["offset"] == 16 * step > 0
    Path("a.jsonl").write_text(good)
    resumed = batches_of(stream_of(tokenizer, **settings))
    resumed.load_state_dict(state)
    assert rows_in(resumed.step_batches(0, 16 * step)[0]) == expected[step]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_skipped_records_are_counted_from_any_state(
    tokenizer: PreTrainedTokenizerBase, name: str, world_size: int
) -> None:
    write_bad(70, 71, 500)
    stream = stream_of(tokenizer, on_bad_record="skip", **SETTINGS[name])
    batches, states, counts = batches_of(stream, world_size=world_size, accumulation=4 // world_size), [], []
    for step in range(60):
        batches.step_batches(0, 16 * step)
        states.append(json.loads(json.dumps(batches.state_dict())))
        counts.append(dict(batches.skipped))
    source = next(iter(counts[0]))
    assert counts[-1][source] >= 1 and all(before[source] <= after[source] for before, after in pairwise(counts))
    resumed = batches_of(stream)
    resumed.load_state_dict(states[29])
    for step in range(30, 60):
        resumed.step_batches(0, 16 * step)
    assert resumed.skipped == counts[-1]


def test_a_rank_that_can_read_no_more_takes_the_blocks_of_others(
    own_data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has read three blocks when the file is deleted, the other one: both fail at the fourth."""
    monkeypatch.setattr("trainer.data.shared_blocks.PATIENCE_S", 0.3)

    def blocks(readable: int) -> SharedBlocks:
        def read() -> Any:
            yield from ([{}] for _ in range(readable))
            raise UserError("dataset.path=a.jsonl: no such file")

        return SharedBlocks(read(), lambda number, rows: ([], number), own_data_folder / "shared")

    ahead, behind = blocks(3), blocks(1)
    for number in range(3):
        assert ahead.block(number) == behind.block(number) == ([], number)
    for rank in (ahead, behind):
        with pytest.raises(UserError, match="no such file"):
            rank.block(3)


def test_two_orders_do_not_share_blocks(tokenizer: PreTrainedTokenizerBase) -> None:
    assert stream_of(tokenizer).name == stream_of(tokenizer).name
    names = [stream_of(tokenizer, **settings).name for settings in ({}, {"shuffle": False}, {"on_bad_record": "skip"})]
    assert len(set(names)) == 3
