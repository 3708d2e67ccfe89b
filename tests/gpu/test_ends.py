"""How runs on several GPUs end when NCCL is stuck: as test_ends.py of tests/cluster has it for CPU ranks."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from tests.distributed.conftest import ROOT
from tests.ends import HOST, TRAIN, Run, Start, runs_below, write_endless_run
from trainer.checkpoint.checkpoint_files import list_checkpoints

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

# Minutes; before and in the first step, where kernels are compiled, three times as long.
SOON = "training.hang_timeout=0.25"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_run(tmp_path_factory.mktemp("ends-gpu"))


@pytest.fixture
def start(workplace: Path, tmp_path: Path) -> Iterator[Start]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env.pop("DS_ACCELERATOR", None)
    with runs_below(tmp_path, env) as start_run:
        command = [*TRAIN, str(workplace / "config.yaml"), "--num-gpus", "2"]
        yield partial(start_run, command)


def end(run: Run) -> tuple[int, str]:
    """Return exit code and stderr of a run that must leave no ranks, long before NCCL's own timeout would end it."""
    code, _, err = run.end()
    print(f"ended with {code}: {err.splitlines()[:1]}")
    for rank in (0, 1):
        pid = run.pid(rank)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return code, err


def gpus_of(pid: int) -> list[int]:
    """The GPUs on which a process has a context, by the driver."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    found = [
        index
        for index, handle in enumerate(handles)
        if any(process.pid == pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    ]
    pynvml.nvmlShutdown()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_fails_ends_the_other_in_its_collective(start: Start, stage: int) -> None:
    run = start(f"zero.stage={stage}", mischief="1:raise:40")
    run.wait_for_step(2)
    code, err = end(run)
    assert code == 1 and err.startswith(f"the run failed: rank 1 on {HOST} exited with code 1"), err
    assert "ValueError: the middle of the model is missing" in err


def test_a_killed_rank_ends_the_other_in_its_collective(start: Start) -> None:
    run = start()
    run.wait_for_step(3)
    os.kill(run.pid(1), signal.SIGKILL)
    code, err = end(run)
    assert code == 137 and err.startswith(f"the run failed: rank 1 on {HOST} was killed by signal 9"), err


def test_a_stopped_rank_is_named_without_using_another_gpu(start: Start) -> None:
    """Rank 0, which has the store that NCCL's own threads ask, and the GPU that threads begin on."""
    run = start(SOON)
    run.wait_for_step(3)
    own = [gpus_of(run.pid(rank)) for rank in (0, 1)]
    os.kill(run.pid(0), signal.SIGSTOP)
    time.sleep(3.0)
    if all(own):  # not where the driver numbers processes otherwise, as in containers
        assert [len(gpus) for gpus in own] == [1, 1] and gpus_of(run.pid(1)) == own[1]
    code, err = end(run)
    first = err.splitlines()[0]
    assert code == 1 and f"rank 0 on {HOST}" in first and "the process is stopped (SIGSTOP, or a debugger)" in first
    assert "; rank 1 waits for it in" in first, first


def test_a_rank_that_hangs_in_python_is_named_while_nccl_runs(start: Start) -> None:
    run = start(SOON, mischief="1:hang:40")
    run.wait_for_step(2)
    code, err = end(run)
    first = err.splitlines()[0]
    assert code == 1 and f"rank 1 on {HOST}" in first and "misbehave" in first, err
    assert "; rank 0 waits for it in" in first, first


def test_a_kernel_that_never_ends_is_a_hang_of_its_rank(start: Start) -> None:
    """All hosts wait in the same collective; all ranks end, and their GPUs are free again."""
    run = start(SOON, mischief="1:spin:40")
    run.wait_for_step(2)
    code, err = end(run)
    first = err.splitlines()[0]
    assert code == 1 and f"the run is hung: rank 1 on {HOST}" in first and "the GPU is behind" in first, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_saves_and_ends(start: Start, tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = start()
    run.wait_for_step(3)
    run.process.send_signal(number)
    assert end(run)[0] == code
    assert len(list_checkpoints(tmp_path / "run")) == 1
