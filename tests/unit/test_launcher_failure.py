"""What is shown of a failed run's logs."""

import json
import socket
from pathlib import Path

import pytest

from launcher.supervision.failure_report import (
    FailureEvidence,
    RankExit,
    decode_exit_code,
    describe_status,
    find_last_traceback,
    read_log_sizes,
)
from trainer.checkpoint.background import SaveError
from trainer.config import UserError
from trainer.contract.heartbeat import clear_rank_reports
from trainer.contract.rank_errors import OtherRankError, RankErrorRecord, read_errors

CHAINED = """\
some line
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
KeyError: 'x'

The above exception was the direct cause of the following exception:

[rank1]: Traceback (most recent call last):
[rank1]:   File "b.py", line 2, in h
[rank1]:     raise RuntimeError("first line\\nsecond line")
[rank1]: RuntimeError: first line
[rank1]: second line

a warning at exit
"""
OWN = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: own mistake\n'
PEER = 'Traceback (most recent call last):\n  File "c.py", line 9, in g\nRuntimeError: Connection closed by peer\n'


def test_the_last_traceback_is_taken_without_rank_marks() -> None:
    assert find_last_traceback(CHAINED) == [
        "Traceback (most recent call last):",
        '  File "b.py", line 2, in h',
        '    raise RuntimeError("first line\\nsecond line")',
        "RuntimeError: first line",
        "second line",
    ]


def test_a_deep_traceback_keeps_its_innermost_frames() -> None:
    frames = "".join(f'  File "deep.py", line {n}, in f\n    f({n})\n' for n in range(40))
    lines = find_last_traceback(f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n")
    assert len(lines) <= 14
    assert lines[1] == "  ..." and lines[-2:] == ["    f(39)", "RecursionError: too deep"]


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (1, 1, "exited with code 1"),
        (247, -9, "killed by signal 9 (SIGKILL)"),
        (137, -9, "killed by signal 9 (SIGKILL)"),
        (249, -7, "killed by signal 7 (SIGBUS)"),
        (245, -11, "killed by signal 11 (SIGSEGV); native code crashed"),
        (-9, -9, "killed by signal 9"),
        (0, 0, "without reporting that every rank succeeded"),
        (75, 75, "exited with code 75"),
        (255, 255, "exited with code 255"),
    ],
)
def test_exit_codes_are_described(code: int, status: int, words: str) -> None:
    assert decode_exit_code(code) == status
    assert words in describe_status(status)


def leave_beat(logs: Path, rank: int, **values: object) -> None:
    beat = {"rank": rank, "host": f"n{rank}", "pid": 1, "step": 7, "phase": "backward", "exit_code": None}
    beat |= {"collective": None, "place": None, "collectives_begun": None, "idle_s": 0.0, "stuck": False}
    beat |= {"free_memory_gib": 0.25, "free_shm_gib": 8.0, "time": 0.0}
    (logs / f"heartbeat-{rank}.json").write_text(json.dumps(beat | values))


def test_a_lost_host_is_blamed_not_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").write_text(PEER)
    leave_beat(tmp_path, 0)
    leave_beat(tmp_path, 1)
    exits = {0: RankExit(1.0, 1), 1: RankExit(1.2)}
    failure = FailureEvidence(tmp_path, {}, exits, 1, {"n1": "Connection to n1 closed"}).report()
    assert failure.rank == 1
    line = "the run failed: lost the connection to n1: Connection to n1 closed (rank 1 there: step 7, phase backward)"
    assert capsys.readouterr().err.splitlines()[0] == line
    (tmp_path / "rank-0.log").write_text(OWN)
    assert FailureEvidence(tmp_path, {}, exits, 1, {"n1": "Connection to n1 closed"}).report().rank == 0


def test_no_rank_is_blamed_for_a_launcher_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_beat(tmp_path, 0)
    assert FailureEvidence(tmp_path, {}, {0: RankExit(1.0)}, 247, launcher_failed=True).report().rank is None
    assert capsys.readouterr().err.startswith("the run failed: the launcher was killed by signal 9 (SIGKILL)\n")


def test_the_rank_with_its_own_error_is_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").write_text(PEER)
    (tmp_path / "rank-1.log").write_text(OWN)
    leave_beat(tmp_path, 1)
    assert FailureEvidence(tmp_path, {}, {0: RankExit(1.0, 1), 1: RankExit(1.2, 1)}, 1).report().status == 1
    shown = capsys.readouterr().err
    assert shown.startswith("the run failed: rank 1 on n1 exited with code 1 (step 7, phase backward)")
    assert "own mistake" in shown and "peer" not in shown and "rank 0" not in shown


def test_the_rank_that_could_not_write_is_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks agree on how a checkpoint was written, and all of them raise."""
    heard = "OtherRankError: rank 1 could not write .writing-checkpoint-8: ValueError: own mistake"
    RankErrorRecord.from_exception(0, OtherRankError(heard)).write(tmp_path)
    (tmp_path / "rank-0.log").write_text(OWN.replace("ValueError: own mistake", heard))
    (tmp_path / "rank-1.log").write_text(OWN)
    leave_beat(tmp_path, 1)
    FailureEvidence(tmp_path, {}, {0: RankExit(1.0, 1), 1: RankExit(1.2, 1)}, 1).report()
    shown = capsys.readouterr().err
    assert shown.startswith("the run failed: rank 1 on n1 exited with code 1") and "rank 0" not in shown


def test_the_killed_rank_is_blamed_though_the_launcher_saw_another_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0.log").write_text(PEER)
    (tmp_path / "rank-1.log").write_text("working\n")
    leave_beat(tmp_path, 1)
    assert FailureEvidence(tmp_path, {}, {0: RankExit(1.1, 1), 1: RankExit(1.0, -9)}, 1).report().status == -9
    shown = capsys.readouterr().err
    assert shown.startswith("the run failed: rank 1 on n1 was killed by signal 9 (SIGKILL) (step 7")
    assert "the host probably ran out of memory (at its last heartbeat 0.2 GiB were free)" in shown


def test_a_rank_killed_by_the_launcher_is_not_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was about to end because of the other one, and so did not handle the signal any more."""
    (tmp_path / "rank-0.log").write_text(PEER)
    (tmp_path / "rank-1.log").write_text(OWN)
    leave_beat(tmp_path, 1)
    assert FailureEvidence(tmp_path, {}, {0: RankExit(1.2, -15), 1: RankExit(1.0)}, 1).report().status == 1
    assert capsys.readouterr().err.startswith("the run failed: rank 1 on n1 exited with code 1")


def test_the_last_heartbeat_shows_how_much_memory_was_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_beat(tmp_path, 0, host=socket.gethostname(), free_shm_gib=0.01)
    FailureEvidence(tmp_path, {}, {0: RankExit(1.0, -9)}, 247).report()
    shown = capsys.readouterr().err
    assert "the host probably ran out of memory" in shown
    assert "/dev/shm was nearly full (at its last heartbeat 0.01 GiB were free" in shown


def test_a_full_shared_memory_is_the_cause_of_a_bus_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_beat(tmp_path, 0, free_shm_gib=0.0)
    FailureEvidence(tmp_path, {}, {0: RankExit(1.0, -7)}, 249).report()
    assert "/dev/shm is probably full (at its last heartbeat 0.00 GiB were free)" in capsys.readouterr().err


def test_a_mistake_that_ranks_found_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        RankErrorRecord.from_exception(rank, UserError("lora.r=-1: too small")).write(tmp_path)
        (tmp_path / f"rank-{rank}.log").write_text("error: lora.r=0: of an earlier run\n")
    failure = FailureEvidence(tmp_path, {}, {1: RankExit(1.0, 2), 0: RankExit(1.1, 2)}, 2).report()
    assert failure.status == 2 and failure.is_user_error
    assert capsys.readouterr().err == "error: lora.r=-1: too small\n"
    clear_rank_reports(tmp_path)
    assert not read_errors(tmp_path)


def test_a_mistake_of_one_host_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before a rank has a log of its own."""
    RankErrorRecord(1, "n2: base_model=/local/model: no such folder", is_user_error=True).write(tmp_path)
    (tmp_path / "launcher.log").write_text("srun: error: n2: task 1: Exited with exit code 2\n")
    (tmp_path / "rank-0.log").write_text("working\n")
    assert FailureEvidence(tmp_path, {}, {0: RankExit(1.0, -15), 1: RankExit(1.1, 2)}, 2).report().status == 2
    assert capsys.readouterr().err == "error: n2: base_model=/local/model: no such folder\n"


def test_a_user_error_is_not_retried(tmp_path: Path) -> None:
    """Exit code 1, as after a full disk; a text in the log that only looks like one is not enough."""
    leave_beat(tmp_path, 0)
    (tmp_path / "rank-0.log").write_text("error: printed by a library\n")
    assert not FailureEvidence(tmp_path, {}, {0: RankExit(1.0, 1)}, 1).report().is_user_error
    RankErrorRecord.from_exception(0, SaveError("no room")).write(tmp_path)
    assert FailureEvidence(tmp_path, {}, {0: RankExit(1.0, 1)}, 1).report().is_user_error


def test_a_program_without_user_errors_is_reported_as_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python ends with 2 as well where it finds no file to run."""
    (tmp_path / "rank-0.log").write_text("python: can't open file 'x'\n")
    (tmp_path / "launcher.log").write_text("srun: error: n1: task 0: Exited with exit code 2\n")
    assert FailureEvidence(tmp_path, {}, {0: RankExit(1.0, 2)}, 2).report().status == 2
    shown = capsys.readouterr().err
    assert shown.startswith("the run failed: rank 0 on ") and "can't open file" in shown


def test_output_of_an_earlier_run_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").write_text(OWN)
    sizes = read_log_sizes(tmp_path)
    with (tmp_path / "rank-0.log").open("a") as log:
        log.write(PEER)
    FailureEvidence(tmp_path, sizes, {0: RankExit(1.0)}, 1).report()
    shown = capsys.readouterr().err
    assert "Connection closed by peer" in shown and "own mistake" not in shown
