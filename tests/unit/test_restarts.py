"""When the launcher starts ranks again, and from where; the ranks here are endings in a list."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.supervision.failure_report import FailureSummary
from launcher.supervision.restarts import AttemptResult, RestartLoop
from trainer.contract.exit_codes import EXIT_RESTART
from trainer.contract.restart_record import RestartNote, read_restarts

KILLED = FailureSummary(-9, "rank 1 on a was killed by signal 9 (SIGKILL)", 1)
DONE = AttemptResult(0)


class Starts:
    """Endings one after the other; an ending that is a step writes a checkpoint of it first."""

    def __init__(self, folder: Path, *endings: AttemptResult, saves: Sequence[int] = ()) -> None:
        self.folder, self.endings, self.saves = folder, list(endings), list(saves)
        self.settings: list[list[str]] = []

    def __call__(self, settings: Sequence[str]) -> AttemptResult:
        self.settings.append(list(settings))
        if self.saves:
            save(self.folder, self.saves.pop(0))
        return self.endings.pop(0)

    def run(self, most: int = 3, *, resumes: bool = False) -> int:
        restarts = RestartLoop(self.folder, self, max_restarts=most, resumes=resumes)
        return restarts.run()


def save(folder: Path, step: int) -> None:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "COMPLETE").write_text("")


def killed(step: int, *, gained: bool = True) -> AttemptResult:
    return AttemptResult(137, KILLED, 2, step, gained)


def test_a_killed_rank_starts_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    starts = Starts(tmp_path, killed(7), killed(9), DONE, saves=[5, 8])
    assert starts.run() == 0
    assert starts.settings == [[], *[["output.overwrite=false", "training.resume_from_checkpoint=auto"]] * 2]
    assert [(entry.step, entry.checkpoint, entry.ranks) for entry in read_restarts(tmp_path)] == [
        (7, "checkpoint-5", 2),
        (9, "checkpoint-8", 2),
    ]


def test_nothing_is_deleted_where_no_checkpoint_is_seen(tmp_path: Path) -> None:
    """A rank on another host may know better."""
    starts = Starts(tmp_path, killed(7), DONE)
    assert starts.run() == 0
    assert starts.settings[1] == ["output.overwrite=false", "training.resume_from_checkpoint=auto"]
    save(tmp_path, 400)
    goes_on = Starts(tmp_path, killed(407), DONE)
    assert goes_on.run(resumes=True) == 0
    assert goes_on.settings[1] == ["output.overwrite=false"]


def test_a_step_must_be_made_between_two_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Starts(tmp_path, killed(7), killed(6, gained=False)).run() == 137
    assert "not restarted: no step has completed since the ranks were started" in capsys.readouterr().err


def test_a_slot_that_fails_again_is_excluded_from_a_run_that_has_trained(tmp_path: Path) -> None:
    starts = Starts(tmp_path, killed(7), killed(0, gained=False), DONE)
    left_out = RestartLoop(tmp_path, starts, max_restarts=3, resumes=False, exclude=lambda end: f"rank {end.failure}")
    assert left_out.run() == 0
    first = Starts(tmp_path, killed(0, gained=False))
    assert RestartLoop(tmp_path, first, max_restarts=3, resumes=False, exclude=lambda _: "rank 1").run() == 137


def test_a_failure_repeated_in_a_step_is_reported_with_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = Starts(tmp_path, killed(7), killed(7))
    assert starts.run() == 137
    inspect = f"`zerolora inspect {tmp_path}/training_config.json --step 7 --ranks 2` shows its samples"
    assert f"step 7 failed twice in the same way; {inspect}" in capsys.readouterr().err


def test_max_restarts_limits_the_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts(tmp_path, *(killed(step) for step in (3, 6, 9)))
    assert starts.run(2) == 137
    assert "training.max_restarts=2 has been reached" in capsys.readouterr().err
    assert len(starts.settings) == 3
    assert Starts(tmp_path, killed(3)).run(0) == 137
    assert "not restarted" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "ending",
    [
        AttemptResult(2, FailureSummary(2, "error: x", is_user_error=True), 2, 4, True),
        AttemptResult(1, FailureSummary(1, "rank 0", 0, is_user_error=True), 2, 4, True),
        AttemptResult(143, None, 2, 4, True),
        AttemptResult(75, None, 2, 4, True),
        DONE,
    ],
    ids=["usage", "answer", "stopped", "preempted", "done"],
)
def test_failures_that_a_restart_cannot_fix_end_the_run(tmp_path: Path, ending: AttemptResult) -> None:
    assert Starts(tmp_path, ending).run() == ending.code


def test_a_smaller_micro_batch_stays_small_in_later_starts(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    starts = Starts(tmp_path, AttemptResult(EXIT_RESTART, None, 2, 4, True), killed(9), DONE, saves=[2])

    def start(settings: Sequence[str]) -> AttemptResult:
        if not starts.settings:
            RestartNote(4, 2, 4, 3).write(tmp_path / "logs")
        return starts(settings)

    assert RestartLoop(tmp_path, start, max_restarts=3, resumes=False).run() == 0
    assert starts.settings[1] == starts.settings[2]
    assert starts.settings[1][0] == "training.batch_size=2" and "output.overwrite=false" in starts.settings[1]
    assert [entry.reason.split(";")[0] for entry in read_restarts(tmp_path)] == [
        "out of memory in step 4",
        KILLED.reason,
    ]


def test_a_start_that_wrote_nothing_is_repeated_as_it_was(tmp_path: Path) -> None:
    """Out of memory while it loads: what the folder held before is still there, and the user's wish for it as well."""
    save(tmp_path, 400)
    (tmp_path / "logs").mkdir()
    settings: list[list[str]] = []

    def start(given: Sequence[str]) -> AttemptResult:
        settings.append(list(given))
        if len(settings) > 1:
            return DONE
        RestartNote(0, 4, 2, 2).write(tmp_path / "logs")
        return AttemptResult(EXIT_RESTART, None, 2)

    assert RestartLoop(tmp_path, start, max_restarts=3, resumes=False).run() == 0
    assert settings[1][:2] == ["training.batch_size=4", "training.gradient_accumulation_steps=2"]
    assert not [word for word in settings[1] if word.startswith(("output.overwrite", "training.resume"))]


@pytest.mark.parametrize(
    "ending", [DONE, AttemptResult(143, None, 2, 4, True), AttemptResult(75, None, 2, 4, True), AttemptResult(1)]
)
def test_a_missing_folder_does_not_change_the_exit_code(tmp_path: Path, ending: AttemptResult) -> None:
    (tmp_path / "logs").mkdir()

    def start(settings: Sequence[str]) -> AttemptResult:
        (tmp_path / "logs").rmdir()
        (tmp_path / "logs").touch()  # what is below it is an error as with a lost server, and not a missing file
        return ending

    assert RestartLoop(tmp_path, start, max_restarts=3, resumes=False).run() == ending.code
