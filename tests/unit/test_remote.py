"""How ranks ended that nobody on this host has seen end, from what their launcher wrote."""

import pytest

from launcher.supervision.remote import Reach, ThroughLauncher, ThroughSrun, ThroughSsh
from launcher.targets.slurm import Allocation
from trainer.contract.heartbeat import Heartbeat

SSH = ThroughSsh({"n1": [0, 1], "user@n2.example.org": [0, 1]})
SRUN = ThroughSrun(Allocation(7, ("n1", "n2"), 2))
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
    ("reach", "log", "statuses"),
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
            ThroughLauncher(),
            "mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 9 (Killed).\n",
            {3: -9},
        ),
    ],
)  # fmt: skip
def test_a_launchers_log_tells_how_ranks_ended(reach: Reach, log: str, statuses: dict[int, int]) -> None:
    assert reach.statuses(f"before\n{log}after\n", beats()) == statuses


def test_a_rank_that_said_itself_how_it_ended_is_not_the_one_that_was_killed() -> None:
    assert SSH.statuses(PDSH.format("n2.example.org", 247), beats(r2=1)) == {3: -9}
    assert SSH.statuses(PDSH.format("n2", 247), beats(r2=1, r3=1)) == {}
