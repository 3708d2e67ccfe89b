"""The `deepspeed` command line for a machine, and the search for the GPUs it may use."""

import os
import sys
from pathlib import Path

import pytest

from launcher.targets.local import local_command, select_gpus, visible_gpus
from trainer.config import UserError

UUIDS = ["GPU-4c1d0000", "GPU-4c1e0000", "GPU-9f000000"]
LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-4c1d0000)
  MIG 1g.18gb     Device  0: (UUID: MIG-77)
GPU 1: NVIDIA H200 (UUID: GPU-4c1e0000)
"""


def test_a_rank_for_each_gpu_gets_what_deepspeeds_launcher_would_give_it() -> None:
    command = local_command(["c.yaml", "seed=1"], gpus=[2, 3, 5], num_gpus=2, port=29123)
    assert command.argv == (sys.executable, "-u", "-m", "trainer.train", "c.yaml", "seed=1")
    assert Path(command.by_hand[0]).name == "deepspeed"
    assert command.by_hand[1:] == (
        "--include=localhost:2,3", "--master_port=29123", "--module", "trainer.train", "c.yaml", "seed=1",
    )  # fmt: skip
    assert command.ranks == 2
    assert not command.set_variables
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "2,3"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29123"}
    assert [dict(variables) for variables in command.of_each_rank] == [
        shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")
    ]


def test_without_gpus_two_cpu_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    command = local_command(["c.yaml"], gpus=[], num_gpus=None, port=1)
    assert "--num_gpus=2" in command.by_hand and command.ranks == len(command.of_each_rank) == 2
    assert command.set_variables["DS_ACCELERATOR"] == "cpu"
    assert local_command(["c.yaml"], gpus=[], num_gpus=3, port=1).ranks == 3
    with pytest.raises(UserError, match="--num-gpus 5: there is no GPU, and this process may use 4 cores"):
        local_command(["c.yaml"], gpus=[], num_gpus=5, port=1)


def test_the_environment_of_an_outer_job_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = local_command(["a b.yaml"], gpus=[], num_gpus=2, port=1)
    environment = command.environment()
    assert "RANK" not in environment and "CUDA_VISIBLE_DEVICES" not in environment
    assert environment["PATH"] == os.environ["PATH"]
    assert command.shell().startswith("env -uRANK -uCUDA_VISIBLE_DEVICES DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 ")
    assert command.shell().endswith("trainer.train 'a b.yaml'")


@pytest.mark.parametrize(("gpus", "wanted"), [([0, 1], 3), ([0], 0), ([], -1)])
def test_more_gpus_than_there_are_is_refused(gpus: list[int], wanted: int) -> None:
    with pytest.raises(UserError, match=rf"--num-gpus {wanted}: "):
        local_command(["c.yaml"], gpus=gpus, num_gpus=wanted, port=1)


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
        ("1,1", "1 is named twice"),
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
    assert visible_gpus() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4c1e")
    assert visible_gpus() == [1]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert visible_gpus() == []
