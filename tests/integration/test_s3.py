"""Data and runs on a real server of S3's protocol (moto): uploads, damage, a kill within an upload, another machine.

tests/servers/test_other_packages.py runs these tests with s3fs and moto, which the test environment lacks.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.runs_in_process import make_ground

missing = [name for name in ("s3fs", "moto", "flask") if find_spec(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(missing), reason=f"needs the packages {', '.join(missing)}; see tests/servers"),
]
RUN = "s3://bucket/runs/mine"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of S3's protocol on this machine, with an empty bucket."""
    found = import_module("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    host, port = found.get_host_and_port()
    yield f"http://{host}:{port}"
    found.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server's file system; processes find it by the variables of AWS."""
    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = import_module("s3fs").S3FileSystem(endpoint_url=server, use_listings_cache=False, skip_instance_cache=True)
    if found.exists("bucket"):
        found.rm("bucket", recursive=True)
    found.mkdir("bucket")
    return found


def zerolora(command: str, *words: str, machine: Path, check: bool = True) -> str:
    """Run the command line on a `machine`, which is a cache of its own; return its output."""
    environment = os.environ | {"ZEROLORA_CACHE": str(machine)}
    line = [sys.executable, "-m", "launcher.cli", command, *words]
    ran = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0 or not check, ran.stdout + ran.stderr
    return " ".join((ran.stdout + ran.stderr).split())


@pytest.fixture
def config(tmp_path: Path, bucket: Any) -> Path:
    ground = make_ground(tmp_path / "ground")
    bucket.put_file(str(ground / "train.jsonl"), "bucket/data/train.jsonl")
    settings = yaml.safe_load((ground / "base.yaml").read_text())
    settings["dataset"]["path"] = "s3://bucket/data/train.jsonl"
    settings["output_dir"] = RUN
    settings["training"]["save_steps"] = 1
    (ground / "s3.yaml").write_text(yaml.safe_dump(settings))
    return ground / "s3.yaml"


def test_a_run_is_resumed_and_evaluated_on_other_machines(bucket: Any, config: Path, tmp_path: Path) -> None:
    shown = zerolora("train", str(config), machine=tmp_path / "a")
    assert f"uploaded {RUN}" in shown and "not uploaded" not in shown
    stored = {path.removeprefix("bucket/runs/mine/") for path in bucket.find("bucket/runs/mine")}
    assert {"adapter_model.safetensors", "run.json", "report.html", "checkpoint-4/COMPLETE"} <= stored
    # One bit of the newest checkpoint changes on the server: the one before it is used.
    name = "bucket/runs/mine/checkpoint-4/adapter_model.safetensors"
    content = bucket.cat_file(name)
    bucket.pipe_file(name, content[:-1] + bytes([content[-1] ^ 1]))
    more = ("training.max_steps=5", "training.resume_from_checkpoint=latest")
    shown = zerolora("train", str(config), *more, machine=tmp_path / "b")
    assert "skipped checkpoint-4 (adapter_model.safetensors is damaged" in shown
    assert "at step 3" in shown
    assert json.loads(bucket.cat_file("bucket/runs/mine/checkpoint-5/state.json"))["step"] == 5
    held_out = str(config.with_name("held_out.jsonl"))
    assert "6 documents" in zerolora("eval", RUN, "--data", held_out, machine=tmp_path / "c")


def test_a_kill_within_an_upload_leaves_whole_checkpoints(bucket: Any, config: Path, tmp_path: Path) -> None:
    """The run is killed after it has put a file of a checkpoint that has no COMPLETE yet."""
    environment = os.environ | {"ZEROLORA_CACHE": str(tmp_path / "a")}
    line = [sys.executable, "-m", "launcher.cli", "train", str(config), "training.max_steps=200", "--num-gpus", "1"]
    run = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        names = [path.removeprefix("bucket/runs/mine/") for path in bucket.find("bucket/runs/mine")]
        folders = {name.partition("/")[0] for name in names if name.startswith("checkpoint-")}
        whole = {name.partition("/")[0] for name in names if name.endswith("/COMPLETE")}
        if whole and folders - whole:
            for process in (*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)):
                process.kill()
            break
        assert run.poll() is None, "the run ended before its upload was met"
    run.wait(60)
    names = [path.removeprefix("bucket/runs/mine/") for path in bucket.find("bucket/runs/mine")]
    assert any(name.endswith("/COMPLETE") for name in names)
    newest = max(int(name.split("/")[0].split("-")[1]) for name in names if name.endswith("/COMPLETE"))
    more = (f"training.max_steps={newest + 1}", "training.resume_from_checkpoint=latest", "--num-gpus", "1")
    shown = zerolora("train", str(config), *more, machine=tmp_path / "b")
    assert f"at step {newest}" in shown, shown


def test_a_bucket_that_is_missing_is_one_line(bucket: Any, config: Path, tmp_path: Path) -> None:
    shown = zerolora("validate", str(config), "dataset.path=s3://gone/a.jsonl", machine=tmp_path, check=False)
    assert "error: dataset.path=s3://gone/a.jsonl: cannot be accessed (FileNotFoundError: The specified bucket" in shown
    shown = zerolora("eval", "s3://gone/run", machine=tmp_path, check=False)
    assert shown.count("error: ") == 1 and "Traceback" not in shown, shown
