"""`zerolora doctor` as a user runs it: a machine that is well, and one on which much is wrong at once."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.slurm_cluster import SlurmCluster
from tests.distributed.conftest import environment
from tests.tiny import make_model, write_chats

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

OLDER_PEFT = Path(__file__).parent / "older_peft"
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", 20)
    settings = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / "runs" / "run"),
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture
def extensions(tmp_path: Path) -> Path:
    """A folder of built extensions of the test's own."""
    folder = tmp_path / "extensions"
    folder.mkdir()
    return folder


def doctor(workplace: Path, *options: str, **variables: str) -> tuple[int, dict[str, list[dict[str, str]]], str]:
    """Exit code, checks by name, and stderr."""
    command = [sys.executable, "-m", "launcher.cli", "doctor", str(workplace / "config.yaml"), *options, "--json"]
    done = subprocess.run(
        command, env=environment() | variables, cwd=workplace, capture_output=True, text=True, timeout=600
    )
    found: dict[str, list[dict[str, str]]] = {}
    report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"checks": []}
    for check in report["checks"]:
        found.setdefault(check["name"], []).append(check)
    return done.returncode, found, done.stderr


def test_a_healthy_machine_passes_all_checks(workplace: Path, extensions: Path) -> None:
    code, checks, err = doctor(workplace, TORCH_EXTENSIONS_DIR=str(extensions))
    assert code == 0, (checks, err)
    expected = "python packages driver torch operators port ranks versions clocks all-reduce output_dir"
    assert set(expected.split()) < set(checks)
    assert {"build locks", "run", "host memory", "/dev/shm", "disk: output_dir"} < set(checks)
    assert "sums over 2 ranks are exact" in checks["all-reduce"][0]["found"]
    assert "GB/s at 16 MiB" in checks["all-reduce speed"][0]["found"]
    assert not (workplace / "runs").exists(), "the doctor writes nothing"
    assert not list(workplace.glob(".zerolora-doctor*"))
    assert not list(extensions.iterdir()), "CPU ranks join without a compiler"


@pytest.fixture
def full_disk(workplace: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB at the place of the runs, filled."""
    folder = workplace / "runs"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with open(folder / "full", "wb") as file:
            file.write(b"\0" * 2**21)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def test_all_problems_are_found_at_once(workplace: Path, full_disk: Path, extensions: Path) -> None:
    lock = extensions / "zerolora_lora_0" / "lock"
    lock.parent.mkdir()
    lock.touch()
    path = os.pathsep.join([str(OLDER_PEFT), environment()["PYTHONPATH"]])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        code, checks, _ = doctor(
            workplace, "--master-port", port, TORCH_EXTENSIONS_DIR=str(extensions), PYTHONPATH=path
        )  # fmt: skip
    assert code == 1
    failed = {name: check for name, found in checks.items() for check in found if check["state"] == "FAIL"}
    assert set(failed) == {"port", "build lock", "disk: output_dir", "run", "versions"}
    assert "is already in use" in failed["port"]["found"]
    assert failed["build lock"]["fix"] == f"rm {lock}"
    assert "No space left on device" in failed["disk: output_dir"]["found"]
    assert "peft differs" in failed["versions"]["found"] and "0.1.0 on n2" in failed["versions"]["found"]
    assert f"on {HOST}" in failed["versions"]["found"]
    assert all(check["fix"] for check in failed.values())


def test_a_host_that_cannot_be_reached_is_named(workplace: Path) -> None:
    hostfile = workplace / "hosts"
    hostfile.write_text("no-such-host.invalid slots=1\n")
    code, checks, err = doctor(workplace, "--launcher", "hostfile", "--hostfile", str(hostfile))
    assert code == 1, err
    (ssh,) = checks["ssh"]
    assert (ssh["state"], ssh["host"]) == ("FAIL", "no-such-host.invalid")
    assert checks["ranks"][0]["state"] == "WARN", "they are not started, and that is said"


def test_mpi_is_tested_by_its_own_launcher(workplace: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt install openmpi-bin")
    code, checks, err = doctor(
        workplace, "--launcher", "mpi", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"
    )
    assert code == 0, (checks, err)
    assert "2 ranks" in checks["ranks"][0]["found"]


@pytest.mark.nightly
def test_every_node_of_an_allocation_is_checked(workplace: Path, slurm: SlurmCluster) -> None:
    """srun reaches both, the ranks meet across them, and a file left on one is seen on the other."""
    command = [sys.executable, "-m", "launcher.cli", "doctor", str(workplace / "config.yaml"), "--json"]
    said = slurm.run("salloc", "--nodes=2", "--ntasks-per-node=1", *command, timeout=600)
    report = json.loads(said)
    assert report["counts"]["FAIL"] == 0, report
    found = {check["name"]: check["found"] for check in report["checks"]}
    assert found["ranks"] == "2 ranks on n1, n2"
    assert found["versions"].endswith("the same on all 2 hosts")
    assert found["output_dir"].endswith("shared by all 2 hosts")
    assert {check["host"] for check in report["checks"]} == {"", "n1", "n2"}


def test_impossible_options_are_a_usage_error(workplace: Path) -> None:
    code, checks, err = doctor(workplace, "--launcher", "pigeon")
    assert (code, checks) == (2, {}) and err.startswith("error: --launcher pigeon")
