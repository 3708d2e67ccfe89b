"""Hosts with ranks that fall silent while the others train: SLURM takes minutes to say that a node is lost."""

from pathlib import Path

import pytest

from launcher.supervision.remote import SrunReach
from launcher.supervision.silence import SilentHosts
from launcher.targets.slurm import Allocation
from trainer.contract.heartbeat import Heartbeat


def beat(rank: int, host: str, at: float, exit_code: int | None = None) -> Heartbeat:
    return Heartbeat(rank, host, 1, 3, "forward", None, None, None, 0.0, False, 1.0, 1.0, at, exit_code)


def test_a_host_that_falls_silent_is_named_once() -> None:
    hosts, reported = SilentHosts(), []
    for now in range(200):
        lost = min(now, 20)  # n2 beats no more after 20 s; one rank of n1 hangs, the other does not
        beats = {0: beat(0, "n1", now), 1: beat(1, "n1", 5), 2: beat(2, "n2", lost), 3: beat(3, "n2", lost)}
        reported += [(now, host) for host in hosts.find_newly_silent(beats, float(now))]
    assert reported == [(81, "n2")]


def test_nobody_is_named_where_all_are_silent_or_have_ended() -> None:
    hosts = SilentHosts()
    for now in range(200):
        beats = {0: beat(0, "n1", 0), 1: beat(1, "n2", 0)}
        assert hosts.find_newly_silent(beats, float(now)) == []
    hosts = SilentHosts()
    for now in range(200):
        beats = {0: beat(0, "n1", now), 1: beat(1, "n2", 0, exit_code=0)}
        assert hosts.find_newly_silent(beats, float(now)) == []


def test_slurms_own_patience_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\necho 'SlurmctldTimeout        = 120 sec'\necho 'SlurmdTimeout           = 300 sec'\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    reported = SrunReach(Allocation(1, ("n1", "n2"), 1)).describe_wait()
    assert reported == "SLURM gives a lost node up after its SlurmdTimeout (300 sec); waiting for that"
