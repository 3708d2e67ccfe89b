"""The ranks of mpirun, torchrun and the bare deepspeed command, against those of `zerolora train`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, ZEROLORA, environment, losses
from tests.cluster.hosts import needs_programs

pytestmark = pytest.mark.slow
PYTHON = sys.executable
BESIDE = Path(sys.executable).parent
# Open MPI refuses root otherwise, and counts the cores of a small machine.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe"]


def run(command: list[str], workplace: Path, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(workplace / "config.yaml"), f"output_dir={workplace / name}", "training.max_steps=6"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment() | AS_ROOT | variables, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def six_steps(workplace: Path) -> list[float]:
    """The losses of `zerolora train` with two ranks; the learning rate falls sooner than in a longer run."""
    done = run([*ZEROLORA, "train"], workplace, "six")
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(workplace / "six")


def test_mpirun_starts_the_console_script(workplace: Path, six_steps: list[float]) -> None:
    needs_programs("mpirun")
    done = run([*MPIRUN, str(BESIDE / "zerolora-rank")], workplace, "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "world        2 ranks on " in done.stdout
    assert losses(workplace / "mpi") == pytest.approx(six_steps, rel=1e-4)


def test_zerolora_train_starts_mpirun(workplace: Path, six_steps: list[float]) -> None:
    needs_programs("mpirun")
    done = run([*ZEROLORA, "train", "--launcher", "mpi", "--num-gpus", "2"], workplace, "train-mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(workplace / "train-mpi") == pytest.approx(six_steps, rel=1e-4)


def test_mpirun_without_mpi4py_says_how_to_get_it(workplace: Path, tmp_path: Path) -> None:
    """Shadowed by a module of its name that cannot be imported, as a broken installation cannot."""
    needs_programs("mpirun")
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    done = run([*MPIRUN, PYTHON, "-m", "trainer.train"], workplace, "no-mpi4py", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "pip install 'zerolora[mpi]'" in done.stdout + done.stderr
    assert losses(workplace / "no-mpi4py") == []


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("torchrun", [str(BESIDE / "torchrun"), "--nproc-per-node", "2", "-m", "trainer.train"]),
        (
            "torch.distributed.run",
            [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainer.train"],
        ),
        ("deepspeed", [str(BESIDE / "deepspeed"), "--num_gpus", "2", "--module", "trainer.train"]),
    ],
)
def test_other_launchers_start_the_same_run(
    workplace: Path, six_steps: list[float], name: str, command: list[str]
) -> None:
    """DeepSpeed's puts --local_rank=N before the arguments."""
    done = run(command, workplace, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(workplace / name) == six_steps
