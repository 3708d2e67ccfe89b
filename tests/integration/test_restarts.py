"""Runs with a rank that is killed, cannot restart, fails on its data, or is slow."""

import shutil
from pathlib import Path

import pytest

from tests.restarting import (
    STEPS,
    adapter,
    fail_twice_for_a_nan,
    lose_one_and_come_back,
    losses,
    records,
    train,
    write_short_run,
)
from tests.tiny import make_model
from trainer.contract.restart_record import read_restarts
from trainer.parallel.ranks.stragglers import MIN_SLOW_WINDOWS, WINDOW_STEPS

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_run(tmp_path_factory.mktemp("restarts"))


@pytest.fixture(scope="module")
def calm(workplace: Path) -> Path:
    """A run in which nothing happens."""
    assert train(workplace, "calm")[0] == 0
    return workplace / "calm"


def test_a_killed_rank_costs_steps_and_nothing_else(workplace: Path, calm: Path) -> None:
    """SIGKILL in steps 6 and 10, with a checkpoint every 4: to the bit the adapter and the records of a run without."""
    code, seen = train(workplace, "killed", "1:kill:11", once=False)
    assert code == 0, seen
    assert "was killed by signal 9 (SIGKILL) (step 6" in seen, seen
    assert "restart 2 of 3: resuming from checkpoint-8" in seen
    assert adapter(workplace / "killed") == adapter(calm)
    assert losses(workplace / "killed") == losses(calm)
    restarts = [(restart.step, restart.checkpoint, restart.ranks) for restart in read_restarts(workplace / "killed")]
    assert restarts == [(6, "checkpoint-4", 2), (10, "checkpoint-8", 2)]
    assert all(record["train/spikes"] == 0.0 for record in records(workplace / "killed"))
    assert "resumed from checkpoint-8" in (workplace / "killed" / "report.html").read_text()


def test_a_rank_killed_before_the_first_checkpoint_costs_nothing_of_an_earlier_run(workplace: Path, calm: Path) -> None:
    """It is moved aside, and not gone on from, by a run that is to start over."""
    shutil.copytree(calm, workplace / "over")
    code, seen = train(workplace, "over", "1:kill:5", "output.overwrite=true", "training.weight_decay=0.1")
    assert code == 0, seen
    assert "(step 3" in seen and "restart 1 of 3: resuming from the start" in seen, seen
    assert adapter(workplace / "over.1") == adapter(calm) != adapter(workplace / "over")
    assert (workplace / "over.1" / f"checkpoint-{STEPS}" / "COMPLETE").is_file()
    assert not (workplace / "over.2").exists()
    assert train(workplace, "decayed", "", "training.weight_decay=0.1")[0] == 0
    assert adapter(workplace / "over") == adapter(workplace / "decayed")
    assert losses(workplace / "over") == losses(workplace / "decayed")


@pytest.mark.slow
def test_a_later_checkpoint_of_the_earlier_run_is_not_resumed(workplace: Path, calm: Path) -> None:
    """`output.overwrite: delete` deletes every checkpoint in the folder."""
    shutil.copytree(calm, workplace / "put")
    shutil.copytree(calm / f"checkpoint-{STEPS}", workplace / "put" / "checkpoint-400")
    code, seen = train(workplace, "put", "1:kill:5", "output.overwrite=delete")
    assert code == 0, seen
    assert "(step 3" in seen and "restart 1 of 3: resuming from the start" in seen, seen
    assert adapter(workplace / "put") == adapter(calm) and losses(workplace / "put") == losses(calm)
    assert not (workplace / "put" / "checkpoint-400").exists() and not (workplace / "put.1").exists()


@pytest.mark.nightly
def test_a_rank_that_cannot_restart_is_excluded_until_requested(workplace: Path) -> None:
    lose_one_and_come_back(workplace, "the slot of rank 1")


@pytest.mark.nightly
def test_the_step_that_fails_twice_is_named(workplace: Path) -> None:
    """The same step fails again: the same call after the start, which is in the same step without a checkpoint."""
    code, seen = train(workplace, "same", "1:raise:9", "training.save_steps=0", once=False)
    assert code == 1, seen
    assert seen.count("ValueError: the middle of the model is missing") == 2
    assert "step 5 failed twice in the same way" in seen and "--step 5 --ranks 2` shows its samples" in seen


LATE = "0:late numbers:1;1:late numbers:1"
"""As on a GPU, where the numbers of a step are read in the step after it."""


@pytest.mark.nightly
def test_rank_and_step_of_a_non_finite_loss_are_named(workplace: Path) -> None:
    fail_twice_for_a_nan(workplace, LATE)


def test_a_non_finite_first_loss_is_not_counted_as_a_step(workplace: Path) -> None:
    code, seen = train(workplace, "nan-first", f"1:nan@loss:1;{LATE}", once=False)
    assert code == 1, seen
    assert "the run failed: rank 1 on " in seen and "not restarted: no step has completed" in seen, seen


@pytest.mark.nightly
@pytest.mark.parametrize("gather", ["layer", "module"])
def test_a_slow_rank_is_named_under_zero_3(workplace: Path, gather: str) -> None:
    """The others wait for it within their forward passes, which then last as long as its own."""
    if gather == "layer":  # a layer ahead, so that in a shallow model they would hardly wait
        zero = [f"base_model={make_model(workplace / 'deep', layers=12)}"]
    else:  # only the embedding and the head are gathered, and not ahead; by default all of a small model stays whole
        zero = ["zero.persistence_threshold=20000", "zero.prefetch_bucket_size=0"]
    settings = ["zero.stage=3", f"zero.gather={gather}", *zero, f"training.max_steps={WINDOW_STEPS * MIN_SLOW_WINDOWS}"]
    code, seen = train(workplace, f"slow-{gather}", "1:slow layer:1", *settings, "training.save_steps=0", once=False)
    assert code == 0, seen
    notes = [line for line in seen.splitlines() if " is slow: its own work" in line]
    assert len(notes) == 1 and f"step {WINDOW_STEPS * MIN_SLOW_WINDOWS}: rank 1 on " in notes[0], seen
