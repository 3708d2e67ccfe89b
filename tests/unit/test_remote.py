"""How ranks ended that nobody on this host has seen end, from what their launcher wrote."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launcher.supervision import observer, remote, supervisor
from launcher.supervision.remote import LauncherLog, RemoteRanks, SrunRanks, SshRanks
from launcher.targets.local import Command
from launcher.targets.slurm import Allocation
from trainer.contract.heartbeat import Heartbeat

SSH = SshRanks({"n1": [0, 1], "user@n2.example.org": [0, 1]})
SRUN = SrunRanks(Allocation(7, ("n1", "n2"), 2))
PDSH = "pdsh@login: {}: ssh exited with exit code {}\n"


def beats(**changes: object) -> dict[int, Heartbeat]:
    """Four ranks, of which the third fell silent first; `r1=1` gives rank 1 that exit code."""
    codes = {int(name[1:]): code for name, code in changes.items()}
    times = (20.0, 20.0, 11.0, 19.0)
    return {
        rank: Heartbeat(
            rank,
            f"n{rank // 2 + 1}",
            1,
            5,
            "",
            None,
            None,
            None,
            0.0,
            False,
            1.0,
            1.0,
            time,
            codes.get(rank),  # type: ignore[arg-type]
        )
        for rank, time in enumerate(times)
    }


@pytest.mark.parametrize(
    ("remote", "log", "statuses"),
    [
        (SSH, PDSH.format("n2", 247), {2: -9}),
        (SSH, PDSH.format("n1", 1) + PDSH.format("n2", 245), {2: -11}),
        # The launcher on n1 was itself killed: ssh says 255, and pdsh ends with that, the largest.
        (SSH, PDSH.format("n2.example.org", 247) + PDSH.format("n1", 255), {2: -9}),
        (SSH, PDSH.format("n3", 247), {}),
        (SRUN, "srun: error: n2: task 2: Killed\n", {2: -9}),
        (
            SRUN,
            "srun: error: n2: task 3: Killed\nsrun: forcing job termination\nsrun: error: n1: task 0: Killed\n",
            {3: -9},
        ),
        (SRUN, "srun: error: n1: tasks 0-1: Exited with exit code 1\n", {0: 1, 1: 1}),
        (SRUN, "srun: error: n2: tasks 0,2-3: Segmentation fault (core dumped)\n", {0: -11, 2: -11, 3: -11}),
        (SRUN, "srun: error: Node failure on n2\nsrun: error: n2: task 2: Something new\n", {}),
        (
            RemoteRanks(),
            "mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 9 (Killed).\n",
            {3: -9},
        ),
    ],
)  # fmt: skip
def test_exit_statuses_are_parsed_from_a_launchers_log(remote: RemoteRanks, log: str, statuses: dict[int, int]) -> None:
    assert remote.parse_statuses(f"before\n{log}after\n", beats()) == statuses


ENDED = "srun: forcing job termination\n"
FELL = "srun: error: n1: tasks 0-1: Exited with exit code 1\n"
REFUSED = "ssh: connect to host n1 port 22: Connection refused"


@pytest.mark.parametrize(
    ("remote", "before", "after", "hosts"),
    [
        (SSH, PDSH.format("n1", 1), PDSH.format("n2", 255), {}),  # killed here
        (SSH, PDSH.format("n2", 247), "", {}),
        (SSH, PDSH.format("n2.example.org", 255), "", {"user@n2.example.org": "ssh exited with code 255"}),
        (
            SSH,
            f"n1: n2: a rank's words\nn1: {REFUSED}\n" + PDSH.format("n1", 255),
            PDSH.format("n2", 255),
            {"n1": REFUSED},
        ),
        (SSH, "n1: Connection to n1 closed by remote host.\n" + PDSH.format("n1", 255), "", {
            "n1": "Connection to n1 closed by remote host"}),
        (SRUN, FELL, ENDED + "srun: error: n2: tasks 2-3: Killed\n", {}),
        (SRUN, FELL, ENDED, {
            "n2": "srun does not know how its ranks exited, because their slurmstepd has died"}),
        (SRUN, FELL, ENDED + "srun: error: n2: tasks 2-3: New\n", {}),
        (
            SRUN,
            "srun: error: Task launch for StepId=44.0 failed on node n2: Communication connection failure\n",
            "srun: Job step aborted: Waiting up to 17 seconds\nsrun: error: n1: task 0: Killed\n",
            {"n2": "srun could not start its ranks: Communication connection failure"},
        ),
        (SRUN, "srun: error: Unable to create step for job 1\n", ENDED, {}),
        (RemoteRanks(), "mpirun: a word\n", "", {}),
    ],
)  # fmt: skip
def test_lost_hosts_are_found_in_a_launchers_log(remote: RemoteRanks, before: str, after: str, hosts: object) -> None:
    assert remote.find_lost_hosts(before, before + after, beats()) == hosts


@pytest.mark.parametrize(
    ("remote", "status", "log", "own"),
    [(SRUN, -9, "", True), (SRUN, 137, "", True), (SRUN, 1, "", False),
     (SRUN, 137, "srun: error: n2: task 2: Killed\n", False), (SSH, -9, "", True), (SSH, 247, "", True),
     (SSH, 0, "", True),
     (SSH, 247, PDSH.format("n1", 247), False)],
)  # fmt: skip
def test_a_launcher_that_fell_itself(remote: RemoteRanks, status: int, log: str, own: bool) -> None:
    assert remote.is_launcher_failure(status, log) is own


def test_a_host_that_ssh_does_not_reach_is_a_failure(tmp_path: Path) -> None:
    """The ranks on the others would wait for it for as long as `timeout_minutes` lets them."""
    file = tmp_path / "launcher.log"
    file.touch()
    log = LauncherLog(file)
    with file.open("a") as writing:
        for code, fails in ((143, False), (255, True), (127, True)):
            writing.write(PDSH.format("n2", code))
            writing.flush()
            assert log.has_failure() is fails


def test_a_host_that_is_cut_off_does_not_keep_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh to it waits for as long as TCP does, whatever is done on the hosts that are left."""
    monkeypatch.setattr(supervisor, "FAILURE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervisor, "END_TIMEOUT_S", 0.4)
    script = f"echo '{PDSH.format('n1', 1).strip()}'; exec sleep 600"
    run = supervisor.Supervisor(Command(("sh", "-c", script), 2, {}, ()), tmp_path, remote=SshRanks({}))
    assert run.run() == 1
    assert run.processes[0].poll() == -9
    assert (run.state, run.abort) == (supervisor.RunState.FAILING, supervisor.AbortReason.UNREACHABLE)


def test_a_signal_at_the_end_of_a_failed_run_does_not_hide_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """SLURM ends srun for a lost node and signals the launcher in the same moment."""
    monkeypatch.setattr(SshRanks, "kill", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    script = f"echo '{PDSH.format('n1', 1).strip()}'; sleep 1; exit 1"
    run = supervisor.Supervisor(Command(("sh", "-c", script), 2, {}, ()), tmp_path, remote=SshRanks({}))
    assert run.run() == 1
    assert run.signals == [signal.SIGTERM]
    assert "the run failed: " in capfd.readouterr().err


def test_a_signal_to_a_run_that_has_failed_gives_it_no_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler that waits for 30 s would end the launcher before it has reported why."""
    monkeypatch.setattr(supervisor, "FAILURE_TIMEOUT_S", 3.0)
    monkeypatch.setattr(supervisor, "END_TIMEOUT_S", 0.4)
    script = f"echo '{PDSH.format('n1', 1).strip()}'; exec sleep 600"
    run = supervisor.Supervisor(Command(("sh", "-c", script), 2, {}, ()), tmp_path, remote=SshRanks({}))

    def signal_once_it_has_failed() -> None:
        while run.state is not supervisor.RunState.FAILING:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=signal_once_it_has_failed, daemon=True).start()
    began = time.monotonic()
    assert run.run() == 1 and run.signals == [signal.SIGTERM]
    assert time.monotonic() - began < 0.5 * supervisor.SAVE_TIMEOUT_S
    assert "the run failed: " in capfd.readouterr().err


@pytest.mark.parametrize("signalled", [False, True])
@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_launcher_that_outlives_its_ranks_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int, signalled: bool
) -> None:
    """They have said how they ended, which counts, whatever its own code is; srun waits for a node without a daemon."""
    monkeypatch.setattr(observer, "LAUNCHER_EXIT_S", 1.5)
    for rank, beat in beats(r0=0, r1=code).items():
        if rank < 2:
            (tmp_path / f"line-{rank}").write_bytes(beat.encode())
    script = f"cd {tmp_path}; for r in 0 1; do cp line-$r heartbeat-$r.json; done; exec sleep 600"
    run = supervisor.Supervisor(Command(("sh", "-c", script), 2, {}, ()), tmp_path, remote=SshRanks({}))
    if signalled:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert run.run() == code
    assert run.processes[0].poll() == -9 and bool(run.signals) == signalled
    assert run.abort is supervisor.AbortReason.OUTLIVED
    assert run.state is (supervisor.RunState.STOPPING if signalled else supervisor.RunState.RUNNING)
    assert "their launcher still waits; terminating it" in capfd.readouterr().err


def test_a_stop_that_comes_before_a_rank_is_known_reaches_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pdsh passes no signal on: without a heartbeat the ranks would never stop."""
    monkeypatch.setattr(remote, "run_over_ssh", lambda host, command: subprocess.run(["sh", "-c", command]))
    (tmp_path / "line").write_bytes(beats()[0].encode().replace(b'"pid": 1,', b'"pid": PID,'))
    known = 'until [ -e go ]; do sleep 0.1; done; sed "s/PID/$$/" line > heartbeat-0.json'
    script = f"trap 'exit 130' USR1; cd {tmp_path}; {known}; while :; do sleep 0.1; done"
    run = supervisor.Supervisor(Command(("sh", "-c", script), 1, {}, ()), tmp_path, remote=SshRanks({"n1": [0]}))
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    threading.Timer(1.5, (tmp_path / "go").touch).start()
    assert run.run() == 130
    assert run.processes[0].poll() == 130


def test_a_rank_elsewhere_that_waits_for_one_that_has_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In NCCL it hears of no signal; the other's heartbeat says that it has ended by one."""
    monkeypatch.setattr(supervisor, "FAILURE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(supervisor, "END_TIMEOUT_S", 1.0)
    ended = beats(r0=75)[0].encode()
    file = tmp_path / "heartbeat-0.json"
    monkeypatch.setattr(remote, "run_over_ssh", lambda host, command: file.write_bytes(ended))
    for rank in (0, 1):
        (tmp_path / f"line-{rank}").write_bytes(beats()[rank].encode())
    script = f"cd {tmp_path}; for r in 0 1; do cp line-$r heartbeat-$r.json; done; exec sleep 600"
    run = supervisor.Supervisor(Command(("sh", "-c", script), 2, {}, ()), tmp_path, remote=SshRanks({"n1": [0, 1]}))
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert run.run() == 143
    assert run.processes[0].poll() == -9
    assert "the run failed" not in capfd.readouterr().err


def test_a_rank_that_reported_its_exit_is_not_considered_killed() -> None:
    assert SSH.parse_statuses(PDSH.format("n2.example.org", 247), beats(r2=1)) == {3: -9}
    assert SSH.parse_statuses(PDSH.format("n2", 247), beats(r2=1, r3=1)) == {}
