"""What leaves the machine: the files, the card, nothing of the machine's folders and no token; a hub that says no."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_after_run import make_run
from trainer.checkpoint.checkpoint_files import seal
from trainer.checkpoint.finished_run import FinishedRun, find_run
from trainer.commands import push
from trainer.commands.push import read_records, stage_files
from trainer.config import LoraSection
from trainer.config.files import read_json
from trainer.monitor.report.model_card import MARKER, OLD_MARKER, PEFT_PLACEHOLDER, get_public_name
from trainer.tasks.language import LanguageTask

ROOT = Path(__file__).parent.parent.parent
TOKEN = "hf_ThisIsNobodysToken1234567890abcd"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = make_run(tmp_path, adapter="qlora", model={"added_tokens": ["<tool>"]})
    lines = [{"step": 0, "time": 1.0, "eval/loss": 2.5}]
    lines += [{"step": step, "time": 1.0 + step, "train/loss": 3.0 / step} for step in (1, 2, 3, 4)]
    lines += [{"step": 2, "time": 3.0, "eval/loss": 1.5}, {"step": 4, "time": 5.0, "eval/loss": 1.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {"command": ["train.py", str(tmp_path / "c.yaml")], "world_size": 2, "device": "cpu", "started": "2026"}
    record |= {"device_name": "x86_64", "python": "3.11.7", "packages": {"torch": "2.13.0"}, "commit": None}
    file = folder / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | record))
    return folder


def card_of(run: FinishedRun) -> str:
    return LanguageTask.build_model_card(run.config, run.run_dir, read_records(run), "me/tiny")


def test_only_the_named_files_are_staged_and_none_names_a_folder_of_this_machine(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "secrets.txt").write_text(TOKEN)
    folder = tmp_path / "staged"
    folder.mkdir()
    names = {str(path.relative_to(folder)) for path in stage_files(find_run(run_dir), "me/tiny", folder)}
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    extra = names - {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert all(name.startswith("tokenizer") or name.endswith(".jinja") for name in extra), extra
    for path in folder.iterdir():
        content = path.read_bytes()
        assert str(tmp_path).encode() not in content, path.name
        assert TOKEN.encode() not in content
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "model"
    assert (folder / "adapter_model.safetensors").read_bytes() == (run_dir / "adapter_model.safetensors").read_bytes()


def test_the_card_names_base_data_and_usage(run_dir: Path) -> None:
    card = card_of(find_run(run_dir, "org/Base-1B", needs_base=False))
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "org/Base-1B"
    assert "qlora" in yaml.safe_load(front)["tags"]
    for said in (
        "# tiny\n",
        "A QLoRA adapter for [org/Base-1B]",
        "Held-out loss **2.5000 → 1.2500** nats per token (-50.0%)",
        'PeftModel.from_pretrained(base, "me/tiny")',
        'AutoModelForCausalLM.from_pretrained("org/Base-1B", dtype="auto")',
        "base.resize_token_embeddings(len(tokenizer)",
        "| data | gone.jsonl |",
        "| held out | held.jsonl |",
        "| 4-bit base | nf4, blocks of 64, double quantization |",
        "| optimizer steps | 4 |",
        "| versions | python 3.11.7, torch 2.13.0 |",
    ):
        assert said in body, said
    assert "c.yaml" not in body


@pytest.mark.parametrize("place", ["below the working directory", "below home"])
def test_the_code_of_a_local_card_loads_the_adapter(run_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    if place == "below home":
        monkeypatch.setenv("HOME", str(run_dir.parent))
    else:
        monkeypatch.chdir(run_dir.parent)
    config = find_run(run_dir).config.model_copy(update={"lora": LoraSection(dora=True)})
    card = LanguageTask.build_model_card(config, run_dir, [], str(run_dir))
    assert "DoRA" in card and "magnitudes" in card and str(run_dir.parent) not in card
    found: dict[str, Any] = {}
    exec(card.partition("```python\n")[2].partition("```")[0], found)
    assert type(found["model"]).__name__ == "PeftModelForCausalLM"
    assert len(found["tokenizer"]) <= found["model"].get_input_embeddings().weight.shape[0]


def test_a_card_for_the_hub_has_a_placeholder_for_a_local_base(run_dir: Path) -> None:
    assert 'from_pretrained("path/to/model", ' in card_of(find_run(run_dir))


def test_the_card_of_a_checkpoint_has_no_later_steps(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoint-2"
    checkpoint.mkdir()
    for path in run_dir.glob("adapter_*"):
        (checkpoint / path.name).write_bytes(path.read_bytes())
    (checkpoint / "state.json").write_text(json.dumps({"run": read_json(run_dir / "run.json")["identity"]}))
    seal(checkpoint)
    card = card_of(find_run(checkpoint))
    assert "**2.5000 → 1.5000**" in card and "1.25" not in card


def test_a_card_that_a_person_wrote_is_kept_and_others_are_written_anew(run_dir: Path, tmp_path: Path) -> None:
    card = run_dir / "README.md"
    assert PEFT_PLACEHOLDER in card.read_text()
    for number, (before, kept) in enumerate(
        ((None, False), (f"old\n{MARKER}\n", False), (f"{OLD_MARKER}\n", False), ("# My own\n\n50 % better!\n", True))
    ):
        if before is not None:
            card.write_text(before)
        folder = tmp_path / f"staged-{number}"
        folder.mkdir()
        stage_files(find_run(run_dir), "me/tiny", folder)
        assert (folder / "README.md").read_text() == card.read_text()
        assert (card.read_text() == before) is kept


def test_names_of_the_hub_stay_and_paths_lose_their_folders(tmp_path: Path) -> None:
    snapshot = "/home/me/.cache/huggingface/hub/models--org--Base-1B/snapshots/0123abc"
    for name, expected in (
        ("org/Base-1B", "org/Base-1B"),
        (snapshot, "org/Base-1B"),
        ("/home/me/models/llama", "llama"),
        ("~/models/llama/", "llama"),
        ("./llama", "llama"),
        ("data/train.jsonl", "train.jsonl"),
        (str(tmp_path), tmp_path.name),
    ):
        assert get_public_name(name) == expected


def test_a_dry_run_writes_the_card_lists_the_files_and_needs_no_login(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert push.main([str(run_dir), "me/tiny", "--dry-run"]) == 0
    captured = capsys.readouterr()
    size = (run_dir / "adapter_model.safetensors").stat().st_size
    assert f"{size:>14,}  adapter_model.safetensors" in captured.out
    assert MARKER in (run_dir / "README.md").read_text()
    assert "model is a local model; pass its Hub ID" in captured.err


class Hub(ThreadingHTTPServer):
    """As much of the hub as an upload needs: repositories are made, commits are kept, or every request is refused."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubRequest)
        self.status = 200
        self.created: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}


class _HubRequest(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"http://127.0.0.1:{hub.server_port}/me/tiny"
        answer: dict[str, object] = {}
        if hub.status == 200 and self.path.endswith("/repos/create"):
            hub.created.append(json.loads(body))
            answer = {"url": url, "name": "me/tiny", "id": "1"}
        elif hub.status == 200 and "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            answer["files"] = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
        elif hub.status == 200 and "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{url}/commit/1", "commitOid": "1", "success": True}
        else:
            answer = {"error": f"refused; you sent {self.headers['Authorization']}"}
        self._log(hub.status, answer)

    def do_GET(self) -> None:
        self._log(404, {"error": "nothing here"})

    def _log(self, status: int, answer: dict[str, object]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def push_to(endpoint: str, run_dir: Path, *options: str, offline: bool = False) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1" if offline else "0"}
    command = [sys.executable, "-m", "launcher.module", "trainer.commands.push", str(run_dir), "me/tiny", *options]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_push_commits_the_staged_files(hub: Hub, run_dir: Path) -> None:
    done = push_to(f"http://127.0.0.1:{hub.server_port}", run_dir, "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/me/tiny")
    assert hub.created[0]["name"] == "tiny" and hub.created[0]["visibility"] == "private"
    assert hub.files["adapter_model.safetensors"] == (run_dir / "adapter_model.safetensors").read_bytes()
    assert hub.files["README.md"].decode().startswith("---\nlibrary_name: peft")
    assert TOKEN not in done.stdout + done.stderr
    assert not any(str(run_dir.parent).encode() in content for content in hub.files.values())


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "rejected the token; run `hf auth login`"),
        pytest.param(403, "has no write access there", marks=pytest.mark.slow),
        pytest.param(404, "no such user or organization", marks=pytest.mark.slow),
        pytest.param(500, "HTTP 500", marks=pytest.mark.slow),
    ],
)
def test_a_refusal_is_one_line_without_the_token(hub: Hub, run_dir: Path, status: int, message: str) -> None:
    hub.status = status
    done = push_to(f"http://127.0.0.1:{hub.server_port}", run_dir, "--base-model", "org/Base-1B")
    assert done.returncode == 2
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: me/tiny: ") and message in done.stderr
    assert TOKEN not in done.stderr


def test_no_network_and_the_offline_switch_are_one_line(run_dir: Path) -> None:
    for offline, message in ((False, "cannot be reached (ConnectError)"), (True, "HF_HUB_OFFLINE is set")):
        done = push_to("http://127.0.0.1:9", run_dir, "--base-model", "org/Base-1B", offline=offline)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1 and message in done.stderr
        assert TOKEN not in done.stderr
