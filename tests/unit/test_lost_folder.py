"""A run's folder that cannot be read: how long it is waited for, and what the exit code is without it."""

import signal
import time
from pathlib import Path

import pytest

from launcher.supervision.observer import FOLDER_WAIT_AFTER_SIGNAL_S, FOLDER_WAIT_S, FolderWatch
from launcher.supervision.supervisor import choose_fallback_exit_code


@pytest.mark.parametrize(
    ("codes", "signals", "code"),
    [
        ([0, 0], [], 0),
        ([0, 0], [signal.SIGTERM], 0),
        ([1, -9], [], 1),
        ([2, 2], [], 2),
        ([1, 1], [signal.SIGTERM], 143),
        ([1, 1], [signal.SIGUSR1, signal.SIGTERM], 75),
    ],
)
def test_exit_codes(codes: list[int], signals: list[int], code: int) -> None:
    assert choose_fallback_exit_code(codes, signals) == code


def test_a_stopped_run_does_not_use_up_its_grace_period(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert not FolderWatch(tmp_path / "logs").wait_until_readable([signal.SIGTERM])
    assert FOLDER_WAIT_AFTER_SIGNAL_S <= time.monotonic() - begin < FOLDER_WAIT_S / 2
    reported = capsys.readouterr().err
    assert (
        "the run's folder cannot be read: " in reported
        and f"waiting up to {FOLDER_WAIT_AFTER_SIGNAL_S:.0f} s for its folder" in reported
    )
    assert "resume with training.resume_from_checkpoint=auto" in reported


def test_a_folder_with_only_a_lock_is_not_the_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = FolderWatch(tmp_path)
    (tmp_path / "lock.json").touch()
    assert not folder.is_readable() and not folder.is_readable()
    (tmp_path / "heartbeat-0.json").touch()
    assert folder.is_readable() and folder.is_readable()
    reported = capsys.readouterr().err.splitlines()
    assert reported == [
        f"the run's folder cannot be read: {tmp_path} has no files of this run",
        "the run's folder can be read again",
    ]
