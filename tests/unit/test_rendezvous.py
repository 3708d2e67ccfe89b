"""A process's place among the ranks, under every launcher."""

import socket

import pytest

from launcher.targets import slurm
from trainer.config import UserError
from trainer.contract import rendezvous
from trainer.contract.rendezvous import find_free_port, parse_first_host, read_rank_variables, read_srun_rendezvous
from trainer.parallel.ranks.group import Ranks

TORCH = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "2"}
# The shell of a batch script: one process, whatever the job is going to start.
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (None, 0, 1, 0)),
        (TORCH, ("torch", 3, 8, 1)),
        (OPEN_MPI, ("Open MPI", 2, 4, 0)),
        (MPICH, ("MPICH", 1, 2, 1)),
        (SRUN, ("SLURM", 5, 6, 2)),
        (BATCH, (None, 0, 1, 0)),
        (TORCH | OPEN_MPI | SRUN, ("torch", 3, 8, 1)),
        (OPEN_MPI | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ("Open MPI", 2, 4, 0)),
        (OPEN_MPI | {"RANK": "7"}, ("Open MPI", 2, 4, 0)),
    ],
)
def test_the_place(variables: dict[str, str], place: tuple[str | None, int, int, int]) -> None:
    assert read_rank_variables(variables) == place
    assert Ranks.from_environment(variables) == Ranks(*place[1:])


@pytest.mark.parametrize(
    ("variables", "expected", "complaint"),
    [
        ({"RANK": "7"}, None, "RANK=7: WORLD_SIZE is missing"),
        (TORCH | {"WORLD_SIZE": "3"}, None, "RANK=3: must be below WORLD_SIZE=3"),
        (SRUN | {"SLURM_PROCID": "6"}, None, "SLURM_PROCID=6: must be below SLURM_STEP_NUM_TASKS=6"),
        ({}, 16, "16 ranks were requested, but the environment on .* sets rank 0 of 1"),
        (TORCH, 16, "16 ranks were requested, .* rank 3 of 8"),
    ],
)
def test_a_place_that_cannot_be(variables: dict[str, str], expected: int | None, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Ranks.from_environment(variables, expected_world_size=expected)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[003-006,9],login", "gpu003"),
        ("a,b[1-2]", "a"),
        ("rack[2,4-5]-gpu", "rack2-gpu"),
        ("node-01.cluster", "node-01.cluster"),
    ],
)
def test_the_first_host_of_a_short_form(node_list: str, first: str) -> None:
    assert parse_first_host(node_list) == first


def test_srun_alone_gives_a_meeting_point() -> None:
    assert read_srun_rendezvous({"SLURM_STEP_NODELIST": "gpu[7-9]", "SLURM_JOB_ID": "4567890"}) == ("gpu7", 17890)


def test_launcher_and_rank_work_out_the_same_port() -> None:
    for job in (1, 19_999, 20_000, 123_456_789):
        _, port = read_srun_rendezvous({"SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": str(job)})
        assert port == slurm.Allocation(job, ("n1",), 1).port
        assert 10_000 <= port < 30_000


def test_a_free_port_can_be_listened_on_and_is_no_outgoing_one() -> None:
    with socket.socket() as listener:
        port = find_free_port()
        listener.bind(("127.0.0.1", port))
    assert 10_000 <= port < 30_000


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as first:
        first.bind(("", find_free_port()))
        first.listen()
        taken = first.getsockname()[1]
        tried = iter([taken, taken, find_free_port()])
        monkeypatch.setattr(rendezvous, "choose_random_port", lambda: next(tried))
        assert find_free_port() != taken
        monkeypatch.setattr(rendezvous, "choose_random_port", lambda: taken)
        with pytest.raises(UserError, match="--master-port PORT, or set MASTER_PORT"):
            find_free_port()
