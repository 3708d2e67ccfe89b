"""What a run may write into, what becomes of an earlier run, and that nothing of the user's is ever lost."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainer.checkpoint.output_folder import check_no_conflict, check_output_folder, describe_output_problem
from trainer.checkpoint.run_record import (
    RESULT,
    clear_folder,
    is_run_folder,
    move_result_into_place,
    read_record,
    write_run_record,
)
from trainer.config import RunConfig, UserError
from trainer.contract.whole_files import write_json, write_text_atomic

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project: a model, data, a cache, and a home of its own."""
    place = tmp_path / "project"
    for name in ("model", "data", "cache", "../home/me"):
        (place / name).mkdir(parents=True)
    (place / "model" / "model.safetensors").write_text("weights")
    (place / "model" / "config.json").write_text("{}")
    (place / "data" / "train.jsonl").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    monkeypatch.chdir(place)
    return place


def config(output_dir: str = "out", **changes: object) -> RunConfig:
    tree = {
        "base_model": "model",
        "output_dir": output_dir,
        "dataset": {"path": "data/train.jsonl", "cache_dir": "cache"},
    }
    return RunConfig.model_validate(tree | changes)


def refusal(settings: RunConfig) -> str:
    with pytest.raises(UserError) as refused:
        check_output_folder(settings)
        check_no_conflict(settings)
    assert refused.value.exit_code == 2
    return str(refused.value)


def a_run(folder: Path, *names: str) -> Path:
    """What a run leaves: its record, and files that it wrote."""
    write_run_record(folder, config(str(folder)).model_dump_json(), 1, "cpu", "fp32")
    write_json(folder / "run.json", read_record(folder) | {"checksums": dict.fromkeys(names, "")})
    for name in (*names, "metrics.jsonl", "samples/00-after.png", "logs/rank-0.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"of the run: {name}")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_found_the_disk_full_at_once_is_no_obstacle(place: Path) -> None:
    settings, folder = config(), place / "out"
    program = f"""
import resource, signal
from pathlib import Path
from trainer.checkpoint.run_record import write_run_record
from trainer.config import RunConfig
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
write_run_record(Path("out"), {settings.model_dump_json()!r}, 1, "cpu", "fp32")
"""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert "OSError" in done.stderr and contents(folder) == {}
    check_output_folder(settings)
    check_no_conflict(settings)
    a_run(folder, "adapter_model.safetensors")
    assert is_run_folder(folder)


# output_dir: what the line must hold
PLACES = {
    "model": "is also base_model",
    "./data/../model": "is also base_model",
    "model/lora": "is inside base_model (model)",
    ".": "contains base_model (model)",
    "data": "contains dataset.path (data/train.jsonl)",
    "cache": "is also dataset.cache_dir",
    "cache/run": "is inside dataset.cache_dir",
    "../home/me": "is your home folder",
    "../home": "contains your home folder",
    "/": "contains your home folder",
    "checkout": "is a git checkout",
    "project": "contains files not written by a run (README.md, adapter_utils.py, metrics.jsonl, ...)",
    "data/train.jsonl": "data/train.jsonl is a file",
    "data/train.jsonl/x": "data/train.jsonl is a file",
    "dangling": "dangling is a symlink to nowhere, which does not exist",
    "dangling/x": "dangling is a symlink to nowhere",
    "circle": "circle is a symlink to circle",
    "pipe": "pipe is a named pipe",
    "/dev/null": "/dev/null is a device",
    "/dev/full/x": "/dev/full is a device",
    "/proc/run": "/proc is on a virtual file system;",
    "odd": "logs is a file",
}


@pytest.mark.parametrize("overwrite", [False, True, "delete"])
@pytest.mark.parametrize("output_dir", PLACES)
def test_no_run_begins_where_it_could_do_harm(output_dir: str, overwrite: bool | str, place: Path) -> None:
    (place / "checkout" / ".git").mkdir(parents=True)
    (place / "project" / "samples").mkdir(parents=True)
    for name in ("README.md", "adapter_utils.py", "metrics.jsonl", "samples/own.png"):
        (place / "project" / name).write_text("mine")
    (place / "dangling").symlink_to("nowhere")
    (place / "circle").symlink_to("circle")
    os.mkfifo(place / "pipe")
    (place / "odd").mkdir()
    (place / "odd" / "logs").touch()
    before = sorted(place.rglob("*"))
    for resume in (None, "auto"):
        changes = {"output": {"overwrite": overwrite}, "training": {"resume_from_checkpoint": resume}}
        assert PLACES[output_dir] in refusal(config(output_dir, **changes))
    assert sorted(place.rglob("*")) == before


def test_what_else_a_run_reads_is_safe_from_it(place: Path) -> None:
    for name in ("adapter", "tokenizer", "held-out", "second"):
        (place / name).mkdir()
    reads = {
        "lora": {"adapter_path": "adapter"},
        "model": {"tokenizer": "tokenizer"},
        "dataset": {"mix": [{"path": "data"}, {"path": "second"}], "evaluation": {"path": "held-out"}},
    }
    for folder, setting in (
        ("adapter", "lora.adapter_path"),
        ("tokenizer", "model.tokenizer"),
        ("held-out/run", "dataset.evaluation.path"),
        ("second", "dataset.mix.1.path"),
    ):
        assert setting in refusal(config(folder, **reads))
    check_output_folder(config("runs/x", **reads))


def test_a_read_only_disk_and_a_full_one(place: Path) -> None:
    disk = place / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        assert "is on a read-only file system" in refusal(config("disk/run"))
        subprocess.run(["mount", "-o", "remount,rw,size=2g", str(disk)], check=True)
        a_run(disk, "adapter_model.safetensors")
        assert "cannot move a run out of a mount point" in refusal(config("disk", output={"overwrite": True}))
        check_no_conflict(config("disk", output={"overwrite": "delete"}))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_nobody_may_write_into() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        child = os.fork()
        if not child:  # root may write everywhere
            os.setuid(os.getuid() or 65534)
            try:
                line = refusal(config(f"{folder}/x"))
                os._exit(0 if f"no permission to write in {folder}" in line else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("left", [[], ["logs"], ["lost+found", ".gitignore", ".nfs0001"]])
def test_a_folder_without_anybodys_files_is_free(place: Path, left: list[str]) -> None:
    for name in left:
        (place / "out" / name).mkdir(parents=True)
    check_output_folder(config())
    check_no_conflict(config())


def test_the_advice_is_one_that_works(place: Path) -> None:
    """A run stopped before its first checkpoint cannot be resumed."""
    run = a_run(place / "out")
    line = refusal(config())
    assert "contains another run, without a complete checkpoint to resume from" in line
    assert "output.overwrite: true (moves it aside)" in line and "latest" not in line
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-5" / "COMPLETE").touch()
    assert "set training.resume_from_checkpoint: latest to resume it, or output.overwrite" in refusal(config())
    for changes in (
        {"output": {"overwrite": True}},
        {"output": {"overwrite": "delete"}},
        {"training": {"resume_from_checkpoint": "latest"}},
    ):
        check_output_folder(config(**changes))
        assert describe_output_problem(config(**changes)) is None


def test_copied_checkpoints_can_be_resumed(place: Path) -> None:
    (place / "out" / "checkpoint-5").mkdir(parents=True)
    (place / "out" / "checkpoint-5" / "state.json").write_text("{}")
    check_output_folder(config(training={"resume_from_checkpoint": "latest"}))
    (place / "out" / "thesis.tex").touch()
    assert "files not written by a run (checkpoint-5, thesis.tex)" in refusal(
        config(training={"resume_from_checkpoint": "latest"})
    )


def test_an_earlier_run_is_moved_aside_whole(place: Path) -> None:
    for expected in ("out.1", "out.2"):
        run = a_run(place / "out", "adapter_model.safetensors", "checkpoint-5/state.json")
        (run / "notes.txt").write_text("mine")
        before = contents(run)
        assert clear_folder(run, True) == f"moved the earlier run to {place / expected}"
        assert contents(place / expected) == before
        assert [path.name for path in run.iterdir()] == ["logs"], "the new run's logs are there already"
        assert is_run_folder(place / expected)


def test_a_run_behind_a_link_is_moved_where_it_is(place: Path) -> None:
    a_run(place / "disk" / "run", "adapter_model.safetensors")
    (place / "out").symlink_to(place / "disk" / "run")
    clear_folder(place / "out", True)
    assert (place / "disk" / "run.1" / "adapter_model.safetensors").exists() and (place / "out").is_symlink()


def test_deleting_leaves_what_the_run_did_not_write(place: Path) -> None:
    run = a_run(place / "out", "adapter_model.safetensors", "checkpoint-5")
    (run / "abandoned-2-checkpoint-5").mkdir()
    mine = {"notes.txt": "mine", "merged/model.safetensors": "mine", "adapter_utils.py": "mine"}
    for name, text in mine.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    (place / "kept").mkdir()
    (place / "kept" / "weights").write_text("mine")
    (run / "profile").symlink_to(place / "kept")
    assert clear_folder(run, "delete") is None
    assert contents(run) == {**mine, "logs/rank-0.log": "of the run: logs/rank-0.log"}
    assert contents(place / "kept") == {"weights": "mine"}, "a link is deleted, not what it leads to"


def test_a_run_killed_at_its_start_can_be_started_again(place: Path) -> None:
    run = place / "out"
    write_run_record(run, config().model_dump_json(), 1, "cpu", "fp32")
    (run / "run.json").unlink()
    assert is_run_folder(run)
    clear_folder(run, True)
    assert is_run_folder(place / "out.1") and not is_run_folder(run)


def test_a_recorded_name_reaches_nothing_outside_of_the_folder(place: Path) -> None:
    run = a_run(place / "out", "templates/tool.jinja")
    (run / "own.txt").write_text("mine")
    names = dict.fromkeys(["../model", "/", ".", "..", "", "logs", "data/train.jsonl", "templates/tool.jinja"], "")
    write_json(run / "run.json", read_record(run) | {"checksums": names})
    clear_folder(run, "delete")
    assert contents(place / "model") and contents(place / "data")
    assert contents(run) == {"logs/rank-0.log": "of the run: logs/rank-0.log", "own.txt": "mine"}


def test_the_result_takes_the_place_of_the_one_before(place: Path) -> None:
    run = a_run(place / "out", "adapter_model.safetensors", "templates/old.jinja")
    for name in ("README.md", "adapter_model.safetensors", "templates/tool.jinja"):
        (run / RESULT / name).parent.mkdir(parents=True, exist_ok=True)
        (run / RESULT / name).write_text("new")
    assert move_result_into_place(run) == ["README.md", "adapter_model.safetensors", "templates/tool.jinja"]
    found = contents(run)
    assert {found[name] for name in ("README.md", "adapter_model.safetensors", "templates/tool.jinja")} == {"new"}
    assert not (run / RESULT).exists() and "templates/old.jinja" not in found


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    """A limit on the size of files fails a write in its middle, as a full disk does."""
    record = tmp_path / "run.json"
    write_json(record, {"old": 1})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(OSError):
            write_text_atomic(record, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert contents(tmp_path) == {"run.json": '{\n "old": 1\n}\n'}


def test_a_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    """The writer is killed in the middle of it all."""
    record = tmp_path / "run.json"
    write_json(record, list(range(5000)))
    code = """
import sys
import tempfile
from pathlib import Path
from trainer.contract.whole_files import write_json
while True:
    write_json(Path(sys.argv[1]), list(range(5000)))
"""
    with subprocess.Popen([sys.executable, "-c", code, str(record)], cwd=ROOT) as writer:
        for _ in range(300):
            assert len(json.loads(record.read_text())) == 5000
        writer.kill()
    assert len(json.loads(record.read_text())) == 5000
