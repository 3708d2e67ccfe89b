"""The files of deploy/: known to their tools, and their commands train."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.conftest import ROOT, environment
from tests.tiny import make_model, write_chats
from trainer.contract.rendezvous import find_free_port

DEPLOY = ROOT / "deploy"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the configuration my.yaml of a tiny run of three steps."""
    make_model(tmp_path / "model")
    write_chats(tmp_path / "train.jsonl", 12)
    settings: dict[str, Any] = {
        "base_model": str(tmp_path / "model"),
        "dataset": {"path": str(tmp_path / "train.jsonl"), "max_length": 96, "cache_dir": str(tmp_path / "cache")},
        "training": {"max_steps": 3, "batch_size": 1, "precision": "fp32"},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def variables(**more: str) -> dict[str, str]:
    """The environment of CPU ranks, with this Python's commands first."""
    own = environment()
    return own | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}", **more}


def steps(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]


def kubeflow() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubeflow.yaml").read_text())}


def lost(given: Any, read: Any, name: str = "") -> list[str]:
    """Names of values that a reader dropped or changed."""
    if isinstance(given, dict):
        return [each for key in given for each in lost(given[key], (read or {}).get(key), f"{name}.{key}")]
    if isinstance(given, list):
        return [each for index, value in enumerate(given) for each in lost(value, read[index], f"{name}[{index}]")]
    return [] if given == read else [name]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ClusterTrainingRuntime", "TrainJob"])
def test_kubeflow_knows_every_field(kind: str) -> None:
    try:
        models = importlib.import_module("kubeflow_trainer_api.models")
    except ImportError:
        pytest.skip("needs the package kubeflow-trainer-api: pip install kubeflow-trainer-api")
    given = kubeflow()[kind]
    assert lost(given, getattr(models, f"TrainerV1alpha1{kind}").from_dict(given).to_dict()) == []


@pytest.mark.nightly
def test_skypilot_knows_every_field() -> None:
    try:
        sky = importlib.import_module("sky")
    except ImportError:
        pytest.skip("needs the package skypilot: pip install skypilot")
    task = sky.Task.from_yaml(str(DEPLOY / "skypilot.yaml"))
    assert task.num_nodes == 2 and {str(each.accelerators) for each in task.resources} == {"{'H100': 8}"}


@pytest.mark.slow
def test_the_command_of_kubeflow_trains_and_resumes(place: Path) -> None:
    trainer = kubeflow()["TrainJob"]["spec"]["trainer"]
    command = [word.replace("/shared", str(place)) for word in (*trainer["command"], *trainer["args"])]
    # What Kubeflow's torch plugin sets.
    nodes = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    for _ in range(2):
        server = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(find_free_port())}
        done = subprocess.run(command, cwd=ROOT, env=variables(**nodes, **server), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert steps(place / "runs" / "my") == [1, 2, 3]


@pytest.mark.slow
def test_the_script_of_skypilot_trains(place: Path) -> None:
    script = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["run"]
    script = script.replace("source .venv/bin/activate\n", "").replace("29500", str(find_free_port()))
    given = variables(
        SKYPILOT_NUM_NODES="1", SKYPILOT_NUM_GPUS_PER_NODE="2", SKYPILOT_NODE_RANK="0", SKYPILOT_NODE_IPS="127.0.0.1",
        CONFIG=str(place / "my.yaml"), RUNS=str(place / "runs"),
    )  # fmt: skip
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps(place / "runs" / "my") == [1, 2, 3]


def test_hugging_face_takes_the_job() -> None:
    """The real `hf`, which prints the job instead of submitting it."""
    given = variables(IMAGE="me/zerolora", BUCKET="me/runs", HF_TOKEN="hf_none", HF_JOBS_OPTIONS="--dry-run")
    script = str(DEPLOY / "hf-job.sh")
    done = subprocess.run([script, "my.yaml", "seed=3"], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command = "zerolora train /bucket/my.yaml output_dir=/bucket/runs/my training.resume_from_checkpoint=auto seed=3"
    assert command in done.stdout and "h200x8" in done.stdout


@pytest.mark.nightly
def test_ray_takes_the_options(place: Path) -> None:
    """The real `ray`, which has no server to submit to here."""
    if not Path(sys.executable).with_name("ray").is_file():
        pytest.skip("needs the package ray: pip install 'ray[default]'")
    given = variables(RAY_ADDRESS="http://127.0.0.1:9", GPUS="2")
    script = str(DEPLOY / "ray-job.sh")
    done = subprocess.run([script, str(place / "my.yaml")], env=given, capture_output=True, text=True)
    assert "No such option" not in done.stderr and "Failed to connect to Ray" in done.stdout + done.stderr
