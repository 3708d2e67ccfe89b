"""The part of the Hugging Face Hub's interface that a download of one model needs, on this machine."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

MODEL = "tests/tiny"
COMMIT = hashlib.sha1(b"tiny").hexdigest()


class Hub(ThreadingHTTPServer):
    """Serve the files of a folder as `MODEL`."""

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


@contextmanager
def served_model(folder: Path, environment: Mapping[str, str], *, cache: Path) -> Iterator[dict[str, str]]:
    """Serve a model's folder; yield the environment of a process that downloads it into the cache."""
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    online = {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}
    yield online | {
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(cache),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
    }
    server.shutdown()
    thread.join()
    server.server_close()
