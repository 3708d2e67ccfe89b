"""Compute nodes without the internet, as docs/guide/several-machines.md has it: download, prepare, a job offline."""

import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.conftest import ROOT, ZEROLORA, end_of, environment, log_of, losses
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.nightly
MODEL = "tests/tiny"
COMMIT = hashlib.sha1(b"tiny").hexdigest()


class Hub(ThreadingHTTPServer):
    """The part of the hub's interface that a download needs, for one model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._file()

    def do_GET(self) -> None:
        if not self.path.startswith(f"/api/models/{MODEL}"):
            self._file()
            return
        files = sorted(self.server.folder.iterdir())
        path = urlsplit(self.path).path
        if path.endswith(f"/tree/{COMMIT}") or path.endswith("/tree/main"):
            reply: object = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
        elif "/tree/" in path:
            self._send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
            return
        else:
            reply = {"id": MODEL, "sha": COMMIT, "siblings": [{"rfilename": file.name} for file in files]}
        self._send(json.dumps(reply).encode(), {"Content-Type": "application/json"})

    def _file(self) -> None:
        name = self.path.partition(f"/{MODEL}/resolve/")[2].partition("/")[2]
        path = self.server.folder / name
        if not name or not path.is_file():
            self._send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
            return
        content = path.read_bytes()
        self._send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(workplace: Path) -> Iterator[Hub]:
    server = Hub(workplace / "model")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_cache_filled_on_the_login_node_is_enough_for_the_job(
    slurm: SlurmCluster, hub: Hub, workplace: Path, tmp_path: Path, six_steps: list[float]
) -> None:
    """The hosts of the cluster have no way to the hub: its address is one of this machine."""
    online = {name: value for name, value in environment().items() if not name.lower().endswith("_proxy")}
    online |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    arguments = [str(workplace / "config.yaml"), f"base_model={MODEL}", "training.max_steps=6"]
    for command in (["download", MODEL], ["prepare", *arguments]):
        done = subprocess.run([*ZEROLORA, *command], env=online, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("model.safetensors"))
    offline = ["env", f"HF_HOME={tmp_path}", "HF_HUB_OFFLINE=1"]
    options = ["--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1", "--time", "30"]
    submit = [*ZEROLORA, "submit", *arguments, f"output_dir={workplace / 'offline'}", *options]
    job = slurm.run(*offline, *submit).split()[0]
    assert end_of(slurm, job) == "COMPLETED", log_of(workplace, "offline")
    assert losses(workplace / "offline") == pytest.approx(six_steps, rel=1e-4)
