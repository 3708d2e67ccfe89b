"""The ranks of mpirun, torchrun and the bare deepspeed command, against those of `zerolora train`."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.conftest import COMMAND, ROOT, ZEROLORA, environment, kill_rank, losses, wait_for
from tests.cluster.hosts import LOGIN, Hosts, needs_programs
from tests.ends import MISCHIEF
from tests.foreign_files import write_foreign_files

pytestmark = pytest.mark.slow
PYTHON = sys.executable
SCRIPTS = Path(sys.executable).parent
# Open MPI refuses root otherwise, and counts the cores of a small machine.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe"]


def run(command: list[str], workplace: Path, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(workplace / "config.yaml"), f"output_dir={workplace / name}", "training.max_steps=6"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment() | AS_ROOT | variables, capture_output=True, text=True
    )


def test_mpirun_starts_a_rank_on_each_of_two_hosts(
    hosts: Hosts, ssh: Mapping[str, str], workplace: Path, six_steps: list[float]
) -> None:
    """As in docs/guide/several-machines.md; Open MPI forwards only the listed variables."""
    needs_programs("mpirun")
    command = ["mpirun", "-np", "2", "--host", "n1:1,n2:1", "--bind-to", "none"]
    for name in ("PATH", "PYTHONPATH", "DS_ACCELERATOR", "OMP_NUM_THREADS"):
        command += ["-x", name]
    command += ["zerolora-rank", str(workplace / "config.yaml"), "training.max_steps=6"]
    command.append(f"output_dir={workplace / 'mpi-hosts'}")
    done = hosts.run(LOGIN, command, env={**ssh, **AS_ROOT}, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "world        2 ranks on n1, n2: cpu" in done.stdout
    assert losses(workplace / "mpi-hosts") == pytest.approx(six_steps, rel=1e-4)


def test_zerolora_train_starts_mpirun_on_the_hosts_of_a_file(
    hosts: Hosts, ssh: Mapping[str, str], workplace: Path, six_steps: list[float], hostfile: Path
) -> None:
    needs_programs("mpirun")
    mark = write_foreign_files(here := hostfile.parent)
    command = [COMMAND, "train", str(workplace / "config.yaml"), "--launcher", "mpi", "--hostfile", str(hostfile)]
    command += [f"output_dir={workplace / 'mpi-hostfile'}", "training.max_steps=6"]
    done = hosts.run(LOGIN, command, env={**ssh, **AS_ROOT}, cwd=here, timeout=600)
    assert done.returncode == 0 and not mark.exists(), done.stdout + done.stderr
    assert "world        2 ranks on n1, n2: cpu" in done.stdout
    assert losses(workplace / "mpi-hostfile") == pytest.approx(six_steps, rel=1e-4)


@pytest.mark.nightly
def test_a_rank_of_mpirun_killed_on_another_host_is_137(
    hosts: Hosts, ssh: Mapping[str, str], workplace: Path, hostfile: Path
) -> None:
    needs_programs("mpirun")
    run = workplace / "mpi-killed"
    command = [*ZEROLORA, "train", str(workplace / "config.yaml"), "--launcher", "mpi", "--hostfile", str(hostfile)]
    command += [f"output_dir={run}", "training.max_steps=100000"]
    process = hosts.start(
        LOGIN, command, env={**ssh, **AS_ROOT}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(lambda: losses(run) or process.poll() is not None, lambda: "no step")
    kill_rank(hosts, "n2", other="n1")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 137, out
    assert "the run failed: rank 1 on n2 was killed by signal 9 (SIGKILL) (" in out


@pytest.mark.nightly
def test_a_rank_of_mpirun_that_is_stopped_before_its_first_heartbeat_is_named(workplace: Path) -> None:
    """The other waits for it in MPI_Init, which knows no time limit and lets no thread of Python run."""
    needs_programs("mpirun")
    command = [*ZEROLORA, "train", str(workplace / "config.yaml"), "--launcher", "mpi", "--num-gpus", "2"]
    command += [f"output_dir={workplace / 'mpi-stopped'}", "training.hang_timeout=0.25"]
    variables = {"ZEROLORA_MISCHIEF": "1:stop@begin:1", "PYTHONPATH": f"{MISCHIEF}:{ROOT}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | AS_ROOT | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    silent = "rank 1 has sent no heartbeat since it was started; the others have stopped sending heartbeats"
    assert f"the run failed: {silent}" in done.stderr


def test_mpirun_without_mpi4py_says_how_to_get_it(workplace: Path, tmp_path: Path) -> None:
    """Shadowed by a module of its name that cannot be imported, as a broken installation cannot."""
    needs_programs("mpirun")
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    done = run([*MPIRUN, PYTHON, "-m", "trainer.train"], workplace, "no-mpi4py", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "pip install mpi4py" in done.stdout + done.stderr
    assert losses(workplace / "no-mpi4py") == []


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("torchrun", [str(SCRIPTS / "torchrun"), "--nproc-per-node", "2", "-m", "trainer.train"]),
        ("deepspeed", [str(SCRIPTS / "deepspeed"), "--num_gpus", "2", "--module", "trainer.train"]),
    ],
)
def test_other_launchers_start_the_same_run(
    workplace: Path, six_steps: list[float], name: str, command: list[str]
) -> None:
    """DeepSpeed's puts --local_rank=N before the arguments."""
    done = run(command, workplace, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(workplace / name) == six_steps
