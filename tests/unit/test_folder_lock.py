"""The lock of an output folder: one run at a time, whoever dies, wherever it ran, and however many come at once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer.config import UserError
from trainer.config.files import UnreadableFileError
from trainer.contract import folder_lock as module
from trainer.contract.folder_lock import (
    JOB_VARIABLES,
    FolderLock,
    FolderLostError,
    Holder,
    check_not_locked,
    describe_live_holder,
    get_lock_path,
)

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from trainer.contract.folder_lock import FolderLock
lock = FolderLock.acquire(Path(sys.argv[1]), resumes=False, log=print)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
lock.release()
"""
OTHER = {"host": "n7", "process": {"kernel": "another-boot:1", "pid": 4711, "started": "99"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds for minutes; no scheduler of the machine that the tests run on."""
    for name, value in (("HEARTBEAT_INTERVAL_S", 0.1), ("POLL_S", 0.05), ("STALE_S", 1.0), ("MAX_DELAY_S", 0.5)):
        monkeypatch.setattr(module, name, value)
    for name in (*JOB_VARIABLES, "SLURM_RESTART_COUNT", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def take(folder: Path, *, resumes: bool = False, said: list[str] | None = None) -> FolderLock:
    return FolderLock.acquire(folder, resumes=resumes, log=(said if said is not None else []).append)


def file_of(folder: Path) -> Path:
    return folder / "logs" / "lock.json"


def leave(folder: Path, **changes: object) -> Path:
    """The lock of a run on another machine."""
    values = {"token": "t7", "since": "2026-01-01 00:00:00", "job": "", "restarts": 0, "holders": [OTHER]} | changes
    path = file_of(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path), "300"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_in_one_line_and_changes_nothing(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    before = file_of(tmp_path).read_bytes()
    for second in (lambda: take(tmp_path), lambda: check_not_locked(tmp_path, resumes=False)):
        with pytest.raises(UserError) as refused:
            second()
        assert refused.value.exit_code == 2
        assert f"output_dir={tmp_path}: in use by another run (process {other.pid} on " in str(refused.value)
    assert file_of(tmp_path).read_bytes() == before
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["lock.json"]
    assert f"process {other.pid}" in (describe_live_holder(tmp_path) or "")


@pytest.mark.parametrize("collected", [True, False])
def test_a_killed_run_gives_way_at_once(tmp_path: Path, other: subprocess.Popen[str], collected: bool) -> None:
    other.kill()
    if collected:
        other.wait()
    else:
        while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    assert describe_live_holder(tmp_path) is None
    check_not_locked(tmp_path, resumes=False)
    said: list[str] = []
    with take(tmp_path, said=said) as lock:
        assert json.loads(file_of(tmp_path).read_text())["token"] == lock.token
    assert len(said) == 1 and "was killed; taking over its lock" in said[0]
    assert list((tmp_path / "logs").iterdir()) == [], "given back, and nothing left of the takeover"


def test_a_halted_run_keeps_its_folder(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    time.sleep(2 * module.STALE_S)
    with pytest.raises(UserError, match="in use by another run"):
        take(tmp_path)


def test_a_number_that_was_given_to_another_process_counts_for_nothing(tmp_path: Path) -> None:
    own = Holder.for_current_process()
    leave(tmp_path, holders=[asdict(own) | {"process": asdict(own.process) | {"started": "1"}}])
    take(tmp_path).release()


@pytest.mark.parametrize("at", [0.0, 4e9], ids=["clock in 1970", "clock in 2096"])
def test_a_run_of_another_machine_is_dead_when_it_is_silent(tmp_path: Path, at: float) -> None:
    """Its clock does not matter: only whether the file changes while it is watched."""
    os.utime(leave(tmp_path), (at, at))
    check_not_locked(tmp_path, resumes=False)  # not known at once
    said: list[str] = []
    started = time.monotonic()
    take(tmp_path, said=said).release()
    assert time.monotonic() - started > module.STALE_S
    assert "locked by process 4711 on n7" in said[0] and "waiting for a heartbeat" in said[0] and len(said) == 2


def test_a_run_of_another_machine_that_gives_signs_of_life_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_S", 300.0)  # one sign is enough, whenever it comes
    path, ended = leave(tmp_path), threading.Event()

    def beat() -> None:
        while not ended.wait(0.3):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match="process 4711 on n7, since 2026-01-01"):
            take(tmp_path)
    finally:
        ended.set()
        thread.join()


def test_a_lock_that_was_never_written_to_the_end_is_watched_too(tmp_path: Path) -> None:
    leave(tmp_path).write_text('{"token": "t7", "hold')
    take(tmp_path).release()


def test_a_pipe_in_the_locks_place_is_one_message(tmp_path: Path) -> None:
    """Opening it would wait for a writer."""
    leave(tmp_path).unlink()
    os.mkfifo(get_lock_path(tmp_path))
    with pytest.raises(UnreadableFileError, match="is a pipe or device; move it away"):
        describe_live_holder(tmp_path)


def test_of_many_that_see_a_dead_lock_one_gets_it(tmp_path: Path) -> None:
    own = Holder.for_current_process()
    leave(tmp_path, holders=[asdict(own) | {"process": asdict(own.process) | {"started": "0"}}])
    command = [sys.executable, "-c", HOLD, str(tmp_path), "3"]
    many = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)
    ]
    ended = [process.communicate(timeout=300) for process in many]
    held = [out for out, _ in ended if "held" in out.splitlines()]  # not "held by an unknown process"
    refused = [error for _, error in ended if "in use by another run" in error]
    # On a busy machine one may come when the first has given the folder back.
    assert held and len(held) + len(refused) == 8, ended
    assert not file_of(tmp_path).exists()


def test_a_job_that_was_queued_again_waits_for_its_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    first = take(tmp_path)
    with pytest.raises(UserError, match="of job 812"):
        take(tmp_path)  # not a later start of it
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    check_not_locked(tmp_path, resumes=False)
    said: list[str] = []

    def log(line: str) -> None:
        said.append(line)
        first.release()

    FolderLock.acquire(tmp_path, resumes=False, log=log).release()
    assert len(said) == 1 and "of job 812" in said[0] and "waiting for it to exit, up to 15 minutes" in said[0]


def test_a_job_that_resumes_automatically_waits_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(UserError):
        take(tmp_path, resumes=True)  # by hand
    monkeypatch.setenv("PBS_JOBID", "13.head")
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.5)
    with pytest.raises(UserError, match="in use by another run"):
        take(tmp_path, resumes=True)
    monkeypatch.setattr(module, "MAX_WAIT_S", 900.0)
    said: list[str] = []

    def log(line: str) -> None:
        said.append(line)
        other.kill()

    FolderLock.acquire(tmp_path, resumes=True, log=log).release()
    assert "waiting for it to exit, up to 15 minutes" in said[0] and "was killed; taking over its lock" in said[1]
    assert len(said) == 2


def test_who_has_lost_the_folder_writes_nothing_more(tmp_path: Path) -> None:
    lock = take(tmp_path)
    lock.check()
    leave(tmp_path, token="t8")
    with pytest.raises(FolderLostError, match="taken over by another run by process 4711 on n7") as lost:
        lock.check()
    assert lost.value.exit_code == 1 and not lock.is_held
    beat = file_of(tmp_path).stat().st_mtime_ns
    time.sleep(3 * module.HEARTBEAT_INTERVAL_S)
    lock.release()
    assert json.loads(file_of(tmp_path).read_text())["token"] == "t8"
    assert file_of(tmp_path).stat().st_mtime_ns == beat, "another's lock is kept alive"


def test_a_live_run_gives_signs_of_life_and_outlives_a_cleaning(tmp_path: Path) -> None:
    with take(tmp_path) as lock:
        before = file_of(tmp_path).stat().st_mtime_ns
        while file_of(tmp_path).stat().st_mtime_ns <= before:
            time.sleep(module.HEARTBEAT_INTERVAL_S)
        file_of(tmp_path).unlink()
        lock.check()
        assert json.loads(file_of(tmp_path).read_text())["token"] == lock.token


@pytest.mark.parametrize("own", [True, False])
def test_a_lock_that_is_half_written_is_looked_at_until_it_says_whose_it_is(tmp_path: Path, own: bool) -> None:
    """Where somebody emptied the folder, launcher and rank 0, or two of their threads, make the file at one time."""
    with take(tmp_path) as lock:
        whole = file_of(tmp_path).read_text()
        file_of(tmp_path).write_text(whole[:20])
        threading.Timer(0.2, file_of(tmp_path).write_text, [whole if own else whole.replace(lock.token, "t9")]).start()
        if own:
            lock.check()
            assert lock.is_held
        else:
            with pytest.raises(FolderLostError):
                lock.check()


def test_rank_0_joins_a_lock_that_its_launcher_is_writing(tmp_path: Path) -> None:
    with take(tmp_path) as lock:
        whole = file_of(tmp_path).read_text()
        file_of(tmp_path).write_text(whole[:20])
        threading.Timer(0.2, file_of(tmp_path).write_text, [whole]).start()
        rank_0 = FolderLock.join(tmp_path, lock.token)
        assert rank_0 is not None and rank_0.is_held
        rank_0.release()


def test_rank_0_holds_it_on_when_its_launcher_is_killed(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    token = json.loads(file_of(tmp_path).read_text())["token"]
    rank_0 = FolderLock.join(tmp_path, token)
    assert rank_0 is not None
    other.kill()
    other.wait()
    rank_0.check()
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        take(tmp_path)
    rank_0.release()
    assert file_of(tmp_path).exists(), "the launcher's to give back"
    with pytest.raises(FolderLostError):
        FolderLock.join(tmp_path, "another")


def test_a_folder_that_the_launcher_does_not_share_is_no_error(tmp_path: Path) -> None:
    assert FolderLock.join(tmp_path, "t7") is None
