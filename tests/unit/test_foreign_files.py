"""Files of the user's working directory are never imported, and a foreign package with our name is one message."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.hosts import needs_programs
from tests.foreign_files import OURS, write_foreign_files
from tests.tiny import make_model, write_chats
from trainer.contract.rendezvous import find_free_port

SCRIPTS = Path(sys.executable).parent
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ground")
    write_chats(folder / "train.jsonl", 8)
    return make_model(folder / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """Where a user works, with a configuration."""
    settings = {
        "base_model": str(model),
        "output_dir": "run",
        "dataset": {"path": str(model.parent / "train.jsonl"), "max_length": 64, "cache_dir": str(tmp_path / "cache")},
        "training": {"max_steps": 1, "precision": "fp32", "max_restarts": 0},
        "logging": {"report_to": "none"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def run(command: list[str], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PATH": f"{SCRIPTS}:{os.environ['PATH']}"} | AS_ROOT | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    "words",
    ["--version", "config c.yaml", "validate c.yaml --settings-only", "sweep c.yaml seed=1,2 --dry-run",
     "submit c.yaml --dry-run", "validate c.yaml", "train c.yaml"],
)  # fmt: skip
def test_no_command_imports_a_file_of_the_working_folder(folder: Path, words: str) -> None:
    mark = write_foreign_files(folder)
    done = run(["zerolora", *words.split()], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not mark.exists(), mark.read_text()


LAUNCHERS = {
    "deepspeed": f"deepspeed --num_gpus 2 --master_port {find_free_port()} --no_python zerolora-rank",
    "torchrun": f"torchrun --nproc-per-node 2 --master-port {find_free_port()} --no-python zerolora-rank",
    "mpirun": "mpirun -np 2 --oversubscribe zerolora-rank",
    "zerolora train --launcher mpi": "zerolora train --launcher mpi --num-gpus 2",
}


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_rank_imports_a_file_of_the_working_folder(folder: Path, launcher: str) -> None:
    if "mpi" in launcher:
        needs_programs("mpirun")
    # The bare deepspeed starts a module of its own, which imports torch, in the working directory.
    mark = write_foreign_files(folder, OURS) if launcher == "deepspeed" else write_foreign_files(folder)
    done = run([*LAUNCHERS[launcher].split(), "c.yaml"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "run" / "adapter_model.safetensors").is_file()
    assert not mark.exists(), mark.read_text()


@pytest.mark.nightly
def test_what_a_dry_run_prints_imports_none_either(folder: Path) -> None:
    mark = write_foreign_files(folder)
    printed = run(["zerolora", "train", "c.yaml", "--dry-run"], folder)
    assert "PYTHONSAFEPATH=1" in shlex.split(printed.stdout)
    done = run(["bash", "-c", printed.stdout], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not mark.exists(), mark.read_text()


@pytest.mark.slow
def test_a_rank_that_is_started_as_a_module_imports_nothing_more(folder: Path) -> None:
    """`torchrun -m` looks for trainer in the working directory, but for nothing that is imported after it."""
    mark = write_foreign_files(folder, ("ops", "launcher", "datasets"))
    command = [
        "torchrun",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(find_free_port()),
        "-m",
        "trainer.train",
        "c.yaml",
    ]
    done = run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not mark.exists(), mark.read_text()


@pytest.mark.parametrize("name", ["trainer", "ops"])
def test_a_foreign_package_is_one_message(tmp_path: Path, name: str) -> None:
    """As PyPI's `trainer` in site-packages, which Python searches before the folder of an editable installation."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    metadata = tmp_path / "other_thing-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-thing\nVersion: 0.1\n")
    (metadata / "RECORD").write_text(f"{name}/__init__.py,,\n")
    done = run(["zerolora", "--version"], tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1 and f"package {name}; pip uninstall other-thing" in done.stderr
