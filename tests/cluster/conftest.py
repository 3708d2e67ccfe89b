"""Hosts, a SLURM cluster, a tiny model, and one run on one machine that all others are compared with."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.hosts import Hosts, needs_root
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.ssh_daemons import ssh_daemons
from tests.tiny import make_model, write_chats

ROOT = Path(__file__).parents[2]
ZEROLORA = [sys.executable, "-m", "launcher.cli"]
COMMAND = str(Path(sys.executable).parent / "zerolora")
STEPS = 160
# Long enough for every rank's imports on a machine that is busy with others.
PATIENCE_S = 420.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts several ranks on several hosts."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def environment() -> dict[str, str]:
    """A user's shell with this checkout's Python, for CPU ranks without a network."""
    changes = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    changes["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **changes}


def losses(run: Path) -> list[float]:
    """The training loss of every step of a run."""
    if not (run / "metrics.jsonl").exists():
        return []
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return [record["train/loss"] for record in records if "train/loss" in record]


def wait_for(condition: Callable[[], Any], what: Callable[[], str], *, every_s: float = 0.1) -> Any:
    """What `condition` returns once it is true; fails with `what()` if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(every_s)
    return result


def end_of(slurm: SlurmCluster, job: str) -> str:
    """Wait until a job is over; the state it ended in."""
    going_on = ("PENDING", "RUNNING", "COMPLETING")
    wait_for(lambda: slurm.state(job) not in going_on, lambda: slurm.run("squeue"), every_s=0.5)
    return slurm.state(job)


def kill_rank(hosts: Hosts, host: str, *, other: str) -> None:
    """SIGKILL to the rank on a host, while the one on the other host is halted and cannot notice."""
    ranks = {
        name: [found for found in hosts.processes(name) if found.cmdline()[1:4] == ["-u", "-m", "trainer.train"]]
        for name in (host, other)
    }
    for process in ranks[other]:
        process.suspend()
    assert ranks[host]
    for process in ranks[host]:
        process.kill()


def log_of(workplace: Path, name: str) -> str:
    parts = [workplace / f"{name}.log", *sorted((workplace / name / "logs").glob("*.log"))]
    return "\n".join(f"== {part}\n{part.read_text()[-3000:]}" for part in parts if part.exists())


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and config.yaml."""
    folder = tmp_path_factory.mktemp("cluster-runs")
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", 60)
    settings = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / "run"),
        "lora": {"r": 4, "alpha": 8},
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
        "training": {
            "batch_size": 2,
            "max_restarts": 0,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "precision": "fp32",
            "save_steps": 20,
            "save_total_limit": 2,
        },
        "logging": {"report_to": "none"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="session")
def reference(workplace: Path) -> list[float]:
    """The losses of two ranks on this machine: the same global batch as two nodes with a rank each."""
    command = [*ZEROLORA, "train", str(workplace / "config.yaml"), f"output_dir={workplace / 'reference'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses(workplace / "reference")
    assert len(found) == STEPS and sum(found[-20:]) < 0.97 * sum(found[:20])
    return found


@pytest.fixture(scope="session")
def six_steps(workplace: Path) -> list[float]:
    """The same of a run of six steps; its learning rate falls sooner than in a longer one."""
    command = [*ZEROLORA, "train", str(workplace / "config.yaml"), f"output_dir={workplace / 'six'}"]
    command.append("training.max_steps=6")
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(workplace / "six")


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """`login`, `n1` and `n2`."""
    needs_root()
    hosts = Hosts(["n1", "n2"], tmp_path_factory.mktemp("hosts"))
    yield hosts
    hosts.close()


@pytest.fixture(scope="session")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> SlurmCluster:
    """A SLURM cluster of n1 and n2, four GPUs in the books of each; it ends with the hosts."""
    needs_root("munged", "slurmctld", "slurmd", "sbatch")
    return SlurmCluster(hosts, tmp_path_factory.mktemp("slurm"), environment())


@pytest.fixture(scope="module")
def ssh(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Let this user log in to both nodes; return the environment of a shell with the right `ssh`.

    Not for longer than a module: those of SLURM switch a node off, and the daemon with it.
    """
    needs_root("sshd", "ssh", "pdsh")
    with ssh_daemons(hosts, ("n1", "n2"), tmp_path_factory.mktemp("ssh"), environment()) as env:
        yield env


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("# the two nodes\nn1 slots=1\nn2 slots=1\n")
    return path
