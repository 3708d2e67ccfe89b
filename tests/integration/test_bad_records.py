"""Data that turns out to be bad while a run trains: what was trained is saved, or the record is skipped and counted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.restarting import adapter, losses, records, train
from tests.runs_in_process import make_ground, train_alone
from tests.tiny import write_run
from trainer.config import UserError
from trainer.data.batches import StreamBatches

BAD = json.dumps({"messages": [{"role": "moderator", "content": "x"}]})
STREAM = {"streaming": True, "shuffle": False}


@pytest.mark.distributed
def test_two_ranks_save_before_a_bad_record_and_resume_as_if_it_had_never_been(tmp_path: Path) -> None:
    training = {"batch_size": 2, "max_steps": 20, "save_steps": 0}
    folder = write_run(tmp_path, chats=200, training=training, dataset=STREAM)
    data = folder / "train.jsonl"
    good = data.read_text().splitlines()
    code, seen = train(folder, "calm")
    assert code == 0, seen
    data.write_text("\n".join([*good[:70], BAD, *good[71:]]))
    code, seen = train(folder, "bad")
    assert code == 2, seen
    # Record 71 is in the block that the step with the 65th record needs.
    assert "record 71, turn 1: unknown role 'moderator'" in seen and "after step 16, which is saved" in seen, seen
    assert [path.name for path in (folder / "bad").glob("checkpoint-*")] == ["checkpoint-16"]
    data.write_text("\n".join(good))
    code, seen = train(folder, "bad", "", "training.resume_from_checkpoint=latest")
    assert code == 0 and "at step 16" in seen, seen
    assert losses(folder / "bad") == losses(folder / "calm") and adapter(folder / "bad") == adapter(folder / "calm")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ground(tmp_path_factory.mktemp("ground"))


@pytest.fixture
def data(ground: Path) -> Iterator[Path]:
    """A copy of the run's data to change."""
    file = ground / "changing.jsonl"
    file.write_text((ground / "train.jsonl").read_text())
    yield file
    file.unlink(missing_ok=True)


def run(ground: Path, data: Path, name: str, **settings: Any) -> str:
    streamed = {f"dataset__{key}": value for key, value in STREAM.items()}
    return train_alone(ground, output_dir=str(ground / name), dataset__path=str(data), **(streamed | settings))


def test_a_file_that_is_deleted_ends_the_run_after_a_checkpoint(
    ground: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is missing when its second pass begins, in step 11."""
    build_step_batches = StreamBatches.build_step_batches

    def step_and_delete(self: StreamBatches, epoch: int, offset: int) -> Any:
        found = build_step_batches(self, epoch, offset)
        data.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(StreamBatches, "build_step_batches", step_and_delete)
    with pytest.raises(UserError, match=r"changing.jsonl: no such file.*after step 10, which is saved"):
        run(ground, data, "deleted", training__max_steps=14, training__save_steps=0)
    assert (ground / "deleted" / "checkpoint-10" / "COMPLETE").is_file()


@pytest.mark.parametrize("streaming", [True, False])
def test_skipped_records_are_counted_in_metrics_report_and_log(ground: Path, data: Path, streaming: bool) -> None:
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:3], BAD, "{broken", *lines[3:]]))
    name = f"skipped-{streaming}"
    settings = {"dataset__on_bad_record": "skip", "dataset__streaming": streaming}
    seen = run(ground, data, name, training__max_steps=12, **settings)
    assert "dataset: 2 of 42 records are skipped; first: " in seen
    # A stream has begun its second pass by then.
    count = 4 if streaming else 2
    assert f"dataset: skipped {count} records" in seen
    last = records(ground / name)[-1]
    assert last["data/skipped/dataset"] == count and ("train/epoch" in last) != streaming
    assert "skipped records" in (ground / name / "report.html").read_text()


def test_a_mistake_before_the_first_step_leaves_nothing(ground: Path, data: Path) -> None:
    data.write_text(BAD)
    with pytest.raises(UserError, match="moderator") as caught:
        run(ground, data, "nothing")
    assert "saved" not in str(caught.value) and not (ground / "nothing").exists()
