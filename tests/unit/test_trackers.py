"""Metrics in wandb, MLflow, trackio, SwanLab and Comet, each with its real package, offline."""

import importlib.util
import io
import json
import sqlite3
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from trainer.config import LoggingSection
from trainer.monitor import trackers
from trainer.monitor.metrics import Metrics
from trainer.monitor.trackers import IDENTITY_FILE


def log_run(folder: Path, name: str, *, first_step: int = 0) -> str:
    """Log three steps and an image after `first_step`, and return what the console showed."""
    shown = io.StringIO()
    logging = LoggingSection(report_to=(name,), run_name="mine", project="zerolora-tests", progress="off")
    settings = {"lora": {"r": 16}, "dataset": {"mix": []}}
    metrics = Metrics(
        folder / "run", logging, Console(file=shown, width=300), first_step=first_step, total_steps=9, settings=settings
    )
    for step in range(first_step + 1, first_step + 4):
        metrics.log(step, {"train/loss": 1 / step, "scu/lambda": 0.5})
    metrics.log_image(first_step + 3, "cat", Image.new("RGB", (8, 8)))
    metrics.close()
    return shown.getvalue()


def needs(name: str) -> None:
    """Skip a nightly test if its package is missing; tests/servers/test_other_packages.py installs them."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs the package {name}: pip install {name}")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_mlflow_has_both_attempts_of_a_resumed_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{place}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for first_step in (0, 2):
        assert "warning" not in log_run(place, "mlflow", first_step=first_step)
    identity = json.loads((place / "run" / IDENTITY_FILE).read_text())["mlflow"]
    (folder,) = (place / "store").glob(f"*/{identity}")
    lines = (folder / "metrics" / "train" / "loss").read_text().splitlines()
    assert [int(line.split()[2]) for line in lines] == [1, 2, 3, 3, 4, 5]
    assert (folder / "params" / "lora.r").read_text() == "16"


def test_wandb_continues_the_run_of_a_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for first_step in (0, 2):
        assert "warning" not in log_run(place, "wandb", first_step=first_step)
    identity = json.loads((place / "run" / IDENTITY_FILE).read_text())["wandb"]
    assert len([*(place / "run" / "wandb").glob(f"offline-run-*-{identity}*/run-{identity}.wandb")]) == 2


@pytest.mark.nightly
def test_comet_writes_an_archive(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("comet_ml")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(place / "archives"))
    assert "logging stopped" not in log_run(place, "comet_ml")
    (archive,) = (place / "archives").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        text = "".join(file.read(name).decode(errors="replace") for name in file.namelist() if name.endswith(".json"))
    assert json.loads((place / "run" / IDENTITY_FILE).read_text())["comet_ml"] in text and "train/loss" in text


@pytest.mark.nightly
def test_swanlab_writes_its_log(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    assert "logging stopped" not in log_run(place, "swanlab")
    assert any(b"train/loss" in path.read_bytes() for path in (place / "run" / "swanlab").rglob("*") if path.is_file())


@pytest.mark.nightly
def test_trackio_has_the_metrics(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(place / "trackio"))
    assert "logging stopped" not in log_run(place, "trackio")
    (database,) = (place / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, text in rows if "train/loss" in str(text)] == [1, 2, 3]


@pytest.mark.parametrize("name", [pytest.param("mlflow", marks=pytest.mark.nightly), "wandb"])
def test_training_continues_without_a_service_that_fails(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(name)

    def fail(*_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{place}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    opened = trackers._OPENERS[name]
    monkeypatch.setitem(trackers._OPENERS, name, lambda wanted: replace(opened(wanted), log=fail))
    assert log_run(place, name).count("logging stopped: ConnectionError: no route to host") == 1
    assert len((place / "run" / "metrics.jsonl").read_text().splitlines()) == 3
