"""The `deepspeed` command line for a machine, and the search for the GPUs it may use."""

import os
import sys
from pathlib import Path

import pytest

from launcher.plan import LaunchRequest, plan_launch
from launcher.targets.local import build_local_command
from trainer.config import UserError
from trainer.contract import default_ranks
from trainer.contract.default_ranks import list_visible_gpus, select_gpus

NODES = {"SLURM_JOB_NODELIST": "n[1-2]"}
UUIDS = ["GPU-4c1d0000", "GPU-4c1e0000", "GPU-9f000000"]
LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-4c1d0000)
  MIG 1g.18gb     Device  0: (UUID: MIG-77)
GPU 1: NVIDIA H200 (UUID: GPU-4c1e0000)
"""


def test_every_rank_gets_the_variables_of_deepspeeds_launcher() -> None:
    command = build_local_command(["c.yaml", "seed=1"], gpus=[2, 3, 5], num_gpus=2, port=29123)
    assert command.argv == (sys.executable, "-u", "-m", "trainer.train", "c.yaml", "seed=1")
    assert Path(command.manual_argv[0]).name == "deepspeed"
    assert command.manual_argv[1:] == (
        "--include=localhost:2,3", "--master_port=29123", "--module", "trainer.train", "c.yaml", "seed=1",
    )  # fmt: skip
    assert command.ranks == 2
    assert not command.set_variables
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "2,3"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29123"}
    assert [dict(variables) for variables in command.rank_environments] == [
        shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")
    ]


def test_without_gpus_two_cpu_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    command = build_local_command(["c.yaml"], gpus=[], num_gpus=None, port=1)
    assert "--num_gpus=2" in command.manual_argv and command.ranks == len(command.rank_environments) == 2
    assert command.set_variables["DS_ACCELERATOR"] == "cpu"
    assert build_local_command(["c.yaml"], gpus=[], num_gpus=3, port=1).ranks == 3
    with pytest.raises(UserError, match="--num-gpus 5: no GPU found, and each CPU rank needs one of the 4 cores"):
        build_local_command(["c.yaml"], gpus=[], num_gpus=5, port=1)


def test_the_environment_of_an_outer_job_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = build_local_command(["a b.yaml"], gpus=[], num_gpus=2, port=1)
    environment = command.build_environment()
    assert "RANK" not in environment and "CUDA_VISIBLE_DEVICES" not in environment
    assert environment["PATH"] == os.environ["PATH"]
    assert command.format_shell().startswith("env -uRANK -uCUDA_VISIBLE_DEVICES PYTHONSAFEPATH=1 DS_ACCELERATOR=cpu ")
    assert command.format_shell().endswith("trainer.train 'a b.yaml'")


@pytest.mark.parametrize(("gpus", "wanted"), [([0, 1], 3), ([0], 2)])
def test_more_gpus_than_available_are_refused(gpus: list[int], wanted: int) -> None:
    with pytest.raises(UserError, match=rf"--num-gpus {wanted}: "):
        build_local_command(["c.yaml"], gpus=gpus, num_gpus=wanted, port=1)


@pytest.mark.parametrize(
    ("allowed", "chosen"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [1]),
        ("GPU-9f", [2]),
        ("GPU-4c1e0000, 0", [1, 0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(allowed: str, chosen: list[int]) -> None:
    assert select_gpus(UUIDS, allowed) == chosen


@pytest.mark.parametrize(
    ("allowed", "complaint"),
    [
        ("3", "3 is not one of this machine's 3 GPUs"),
        ("GPU-4c1", "GPU-4c1 is not one of"),
        ("cuda:0", "cuda:0 is not one of"),
        ("1,1", "1 is listed twice"),
        ("MIG-77", "torchrun"),
    ],
)
def test_cuda_visible_devices_that_cannot_be_met_is_refused(allowed: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        select_gpus(UUIDS, allowed)


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat <<END\n{LISTING}END\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list_visible_gpus() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4c1e")
    assert list_visible_gpus() == [1]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert list_visible_gpus() == []


@pytest.mark.parametrize(
    ("variables", "gpus", "ranks"),
    [
        ({}, [], 2),
        ({}, ["GPU-a", "GPU-b", "GPU-c"], 3),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ["GPU-a", "GPU-b", "GPU-c"], 1),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "h200:4", **NODES}, [], 8),
    ],
)
def test_what_would_start_is_counted_as_it_is_started(
    variables: dict[str, str], gpus: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho n1\necho n2\n")
    for program in (srun, scontrol):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(default_ranks, "list_installed_gpus", lambda: gpus)
    build, _ = plan_launch(LaunchRequest(), tmp_path)
    assert default_ranks.choose_default_ranks() == build(["c.yaml"]).ranks == ranks
