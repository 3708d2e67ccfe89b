"""Where a start of a SLURM job resumes, and when another start is of no use: the folder, and SLURM's variables."""

import os
from pathlib import Path

import pytest

from launcher.job_attempts import build_resume_settings, record_attempt, record_attempt_end
from trainer.config import RunConfig, UserError

RESUME_AUTO = "training.resume_from_checkpoint=auto"
FIRST, SECOND = {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


def config(run: Path, *, resume: str | None = None, overwrite: bool | str = False) -> RunConfig:
    settings = {"base_model": "m", "output_dir": str(run), "dataset": {"path": "d"}, "output": {"overwrite": overwrite}}
    return RunConfig.model_validate(settings | {"training": {"resume_from_checkpoint": resume}})


def save(run: Path, step: int) -> None:
    (run / f"checkpoint-{step}").mkdir(parents=True)
    (run / f"checkpoint-{step}" / "COMPLETE").touch()


def write_record(run: Path, at: int) -> None:
    run.mkdir(exist_ok=True)
    (run / "run.json").touch()
    os.utime(run / "run.json", (at, at))


def test_every_start_resumes_by_default(tmp_path: Path) -> None:
    assert build_resume_settings(config(tmp_path), FIRST) == [RESUME_AUTO]
    record_attempt(tmp_path, FIRST)
    assert build_resume_settings(config(tmp_path), SECOND) == [RESUME_AUTO]


def test_a_restart_count_that_is_no_number_counts_as_a_restart(tmp_path: Path) -> None:
    assert build_resume_settings(config(tmp_path), FIRST | {"SLURM_RESTART_COUNT": "x"}) == [RESUME_AUTO]


def test_a_named_checkpoint_is_used_until_a_newer_one_exists(tmp_path: Path) -> None:
    save(tmp_path, 500)
    save(tmp_path, 1500)
    named = config(tmp_path, resume=str(tmp_path / "checkpoint-500"))
    assert build_resume_settings(named, FIRST) == []
    record_attempt(tmp_path, FIRST)
    assert build_resume_settings(named, SECOND) == []  # it ended before its first checkpoint, and 1500 is still there
    (tmp_path / "checkpoint-1500").rename(tmp_path / "abandoned-checkpoint-1500")
    save(tmp_path, 600)
    assert build_resume_settings(named, SECOND) == [RESUME_AUTO]
    assert build_resume_settings(named, {"SLURM_JOB_ID": "8"}) == []


def test_an_earlier_run_is_overwritten_once(tmp_path: Path) -> None:
    write_record(tmp_path, 1000)
    save(tmp_path, 160)
    over = config(tmp_path, overwrite=True)
    assert build_resume_settings(over, FIRST) == []
    record_attempt(tmp_path, FIRST)
    assert build_resume_settings(over, SECOND) == []  # it ended before it had moved the earlier run aside
    write_record(tmp_path, 2000)
    assert build_resume_settings(over, SECOND) == ["output.overwrite=false", RESUME_AUTO]
    # Another job has the same words, and means this run.
    assert build_resume_settings(over, {"SLURM_JOB_ID": "8"}) == []


def test_tasks_of_a_chain_are_starts_of_one_job(tmp_path: Path) -> None:
    tasks = [
        {"SLURM_JOB_ID": str(task + 8), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)} for task in (0, 1)
    ]
    tasks = [task | {"SLURM_ARRAY_TASK_MIN": "0"} for task in tasks]
    over = config(tmp_path, overwrite=True)
    assert build_resume_settings(over, tasks[0]) == []
    record_attempt(tmp_path, tasks[0])
    write_record(tmp_path, 2000)
    assert build_resume_settings(over, tasks[1]) == ["output.overwrite=false", RESUME_AUTO]


def test_three_starts_without_a_step_are_enough(tmp_path: Path) -> None:
    save(tmp_path, 40)
    record_attempt(tmp_path, FIRST)
    save(tmp_path, 80)
    record_attempt_end(tmp_path, FIRST, 75)
    for _ in range(2):
        record_attempt(tmp_path, SECOND)
        record_attempt_end(tmp_path, SECOND, 75)
    record_attempt(tmp_path, SECOND)
    with pytest.raises(UserError, match="3 attempts in a row ended without a new step since checkpoint-80,"):
        record_attempt_end(tmp_path, SECOND, 75)
    # SLURM may start it again by itself, and may have ended starts that could say nothing.
    with pytest.raises(UserError, match="without a new step since checkpoint-80"):
        record_attempt(tmp_path, SECOND)
    record_attempt(tmp_path, FIRST)  # a job of that number of another day


def test_a_run_that_is_done_may_be_started_as_often_as_one_likes(tmp_path: Path) -> None:
    save(tmp_path, 40)
    for _ in range(5):
        record_attempt(tmp_path, SECOND)
        record_attempt_end(tmp_path, SECOND, 0)
