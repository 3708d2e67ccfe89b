"""What becomes of an earlier run, of the user's files next to it, and of a run that loses its folder: real training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.conftest import ROOT, environment
from tests.tiny import make_model, write_chats
from trainer.checkpoint.run_record import RUN_FILES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    settings = {
        "base_model": str(make_model(folder / "model")),
        "output_dir": "unset",
        "lora": {"r": 4},
        "dataset": {
            "path": str(write_chats(folder / "train.jsonl", 40)),
            "max_length": 96,
            "cache_dir": str(folder / "cache"),
        },
        "training": {"batch_size": 2, "max_steps": 4, "learning_rate": 1e-3, "precision": "fp32"},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "tests.distributed.folder_rank", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def seen(folder: Path, number: int) -> dict[str, int]:
    """Path -> size of everything in out, out.1 ... after that run."""
    found: dict[str, int] = json.loads((folder / f"seen-{number}.json").read_text())
    return found


def in_folder(files: dict[str, int], name: str) -> dict[str, int]:
    return {path.removeprefix(f"{name}/"): size for path, size in files.items() if path.startswith(f"{name}/")}


def test_the_earlier_run_is_moved_aside_whole_and_the_new_one_is_alone(folder: Path) -> None:
    first, second = in_folder(seen(folder, 1), "out"), seen(folder, 2)
    assert in_folder(second, "out.1") == first and "notes.txt" in first and "checkpoint-4/COMPLETE" in first
    assert f"moved the earlier run to {folder / 'out.1'}" in (folder / "console.txt").read_text()
    assert "checkpoint-4/COMPLETE" not in in_folder(second, "out")
    steps = [json.loads(line)["step"] for line in (folder / "out.1" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 4


def test_deleting_leaves_what_is_the_users(folder: Path) -> None:
    third = seen(folder, 3)
    assert (folder / "out" / "notes.txt").read_text() == "mine"
    assert "out/checkpoint-3/COMPLETE" in third and "out/adapter_model.safetensors" in third
    assert not [path for path in third if path.startswith("out.2")]
    events = [path for path in third if path.startswith("out/tensorboard")]
    assert len(events) == 1, "those of the run before are deleted"


def test_everything_that_a_run_writes_is_known(folder: Path) -> None:
    recorded = json.loads((folder / "out.1" / "run.json").read_text())["checksums"]
    known = {*RUN_FILES, *(name.split("/")[0] for name in recorded), "logs", "README.md"}
    names = {path.split("/")[0] for path in in_folder(seen(folder, 2), "out.1")}
    assert {name for name in names - known if not name.startswith("checkpoint-")} == {"notes.txt"}


def test_a_run_that_lost_its_folder_ends_without_another_checkpoint(folder: Path) -> None:
    assert "taken over by another run by process 1 on n7" in (folder / "lost.txt").read_text()
    checkpoints = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    last = int((folder / "last-step.txt").read_text())
    assert checkpoints and all(int(name.split("-")[1]) <= last < 2000 for name in checkpoints)
    assert not (folder / "out" / "adapter_model.safetensors").exists()
    assert json.loads((folder / "out" / "logs" / "lock.json").read_text())["token"] == "t7", "the other's lock stays"
