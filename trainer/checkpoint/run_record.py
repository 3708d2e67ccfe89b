"""The record of a run (resolved configuration, versions, commit, command) and the list of files it wrote.

training_config.json, run.json   the record
written.txt                      names that zerolora wrote into the folder, one per line; only these are ever deleted
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from trainer.config import RunConfig, UserError
from trainer.config.files import read_json, read_text
from trainer.contract.home import CHECKOUT
from trainer.contract.known_versions import package_versions
from trainer.contract.lock_file import LOCK_FILE
from trainer.contract.rank_arguments import command_typed
from trainer.contract.whole_files import sync, write_json, write_whole

CONFIG, RUN, WRITTEN = "training_config.json", "run.json", "written.txt"
LOGS = "logs"
STARTED_IN, PROMPT_TEXT = "working_directory", "prompt_text"
RESULT_KEYS = ("checksums", "identity")
RESULT = ".writing-result"
RUN_FILES = (
    *(CONFIG, RUN, WRITTEN, RESULT, "initial_adapter", "metrics.jsonl", "tensorboard", "tracker-ids.json"),
    *("wandb", "swanlab"),
    *("answers.json", "report.html", "profile", "scu_config.json", "scu_metrics.json", "scu_history.json"),
    *("scu_reference.json", "samples", "time_by_phase.json", "examples.json"),
)
# Prefix of checkpoints that were set aside; the rest of the name is listed.
ABANDONED = re.compile(r"^abandoned-(?:\d+-)?(?=checkpoint-)")
CHECKPOINT = re.compile(r"(abandoned-(\d+-)?)?checkpoint-\d+")
# Names in folders that count as empty: logs of an attempt that never trained, and files of the file system or git.
IGNORED_ENTRIES = re.compile(r"logs|lost\+found|\.nfs.*|\.gitignore|\.gitkeep")


def find_run_dir(folder: Path) -> Path:
    """Return the output folder of a run, or that of a checkpoint in it. Raises UserError if it is neither."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; pass the output_dir of a run, or a checkpoint-N in it")
    run_dir = folder.resolve().parent if CHECKPOINT.fullmatch(folder.resolve().name) else folder
    if not (run_dir / CONFIG).is_file():
        raise UserError(f"{folder}: not the folder of a run: it has no {CONFIG}; pass the output_dir of a run")
    return run_dir


def write_run_record(
    run_dir: Path, config: RunConfig, world_size: int, device: str, precision: str, prompt_text: str | None = None
) -> None:
    """Write training_config.json (which `zerolora train` accepts) and run.json (what the run used).

    `prompt_text` is the prompt format of the training data, None for conversations.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / CONFIG).exists() and not any(map(_is_checkpoint, list_run_files(run_dir))):
        (run_dir / WRITTEN).touch()  # a list started in a folder that lost its list would be incomplete
    note_written(run_dir, RUN_FILES)
    resolved, earlier = config.model_dump_json(indent=1), {}
    with suppress(UserError):  # a damaged record is replaced
        earlier = read_record(run_dir)
    write_whole(run_dir / CONFIG, resolved)
    record = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_typed(sys.argv),
        STARTED_IN: os.getcwd(),
        "world_size": world_size,
        "device": device,
        "device_name": _device_name(device),
        "precision": precision,
        PROMPT_TEXT: prompt_text,
        "python": platform.python_version(),
        "packages": package_versions(),
        "commit": commit(),
        "config_sha256": hashlib.sha256(resolved.encode()).hexdigest(),
    }
    # The earlier result stays in the folder until this run has written its own.
    write_json(run_dir / RUN, record | {key: earlier[key] for key in RESULT_KEYS if key in earlier})


def read_record(run_dir: Path) -> dict[str, Any]:
    """Return run.json; empty if the folder has none. Raises UserError if it is damaged."""
    return read_json(run_dir / RUN) if (run_dir / RUN).is_file() else {}


def note_written(run_dir: Path, names: Iterable[str]) -> None:
    """Add names that are about to be written to the run's list, except those of the user's existing files.

    Does nothing for a folder without a list.
    """
    listed = written_names(run_dir)
    if listed is None:
        return
    new = [name for name in names if name not in listed and not (name != WRITTEN and os.path.lexists(run_dir / name))]
    if new:
        # Append, never rewrite: a merge may add its name while the run adds a checkpoint's.
        with (run_dir / WRITTEN).open("a", encoding="utf-8") as file:
            if (run_dir / WRITTEN).read_bytes()[-1:] not in (b"", b"\n"):
                file.write("/\n")  # a full disk truncated the last name: turn it into one that no file can have
            file.write("".join(f"{name}\n" for name in new))
            file.flush()
            os.fsync(file.fileno())


def written_names(run_dir: Path) -> set[str] | None:
    """Return the names on the run's list, without a truncated last line; None if there is no list."""
    try:
        text = read_text(run_dir / WRITTEN)
    except FileNotFoundError:
        return None
    return {name for name in text.split("\n")[:-1] if name and Path(name).name == name and name != LOGS}


def list_run_files(run_dir: Path) -> list[Path]:
    """Return the folder's entries, sorted, without logs and without an empty list; empty if it does not exist.

    An empty list is left by a run that found the disk full before it could write anything.
    """
    if not run_dir.is_dir():
        return []
    found = (path for path in run_dir.iterdir() if not IGNORED_ENTRIES.fullmatch(path.name))
    return sorted(path for path in found if not (path.name == WRITTEN and path.lstat().st_size == 0))


def holds_run(run_dir: Path) -> bool:
    """Return whether a folder belongs to a run: it has a record, or only checkpoints and files that a run listed."""
    if (run_dir / CONFIG).is_file() and (run_dir / RUN).is_file():
        return True
    listed, found = written_names(run_dir) or set(), list_run_files(run_dir)
    return bool(found) and all(ABANDONED.sub("", path.name) in listed or _is_checkpoint(path) for path in found)


def clear_folder(run_dir: Path, overwrite: bool | str) -> str | None:
    """Clear the folder of an earlier run; return a message that names its new place, None if nothing was moved.

    `overwrite` true moves everything in the folder aside, `delete` deletes the files that the run wrote.
    """
    if not overwrite or not list_run_files(run_dir):
        return None
    assert holds_run(run_dir), f"{run_dir}: holds no run, and passed the check of the output folder"
    try:
        if overwrite == "delete" and written_names(run_dir) is not None:
            _delete_written(run_dir)
            return None
        aside = _move_aside(run_dir)
    except OSError as error:
        setting = f"output.overwrite={str(overwrite).lower()}"
        raise UserError(f"{setting}: {error}; the rest of the earlier run is untouched") from None
    unlisted = " (it has no list of its files, so nothing was deleted)" if overwrite == "delete" else ""
    return f"the earlier run is now {aside}{unlisted}"


def _move_aside(run_dir: Path) -> Path:
    """Move everything to the first free run_dir.1, run_dir.2, ..., except for the logs in use, which are copied."""
    folder = run_dir.resolve()
    for number in count(1):
        aside = folder.with_name(f"{folder.name}.{number}")
        try:
            aside.mkdir()
            break
        except FileExistsError:
            continue
    if (folder / LOGS).is_dir():
        shutil.copytree(folder / LOGS, aside / LOGS, ignore=shutil.ignore_patterns(f"{LOCK_FILE}*"), symlinks=True)
    for path in _record_last(list_run_files(folder)):
        os.rename(path, aside / path.name)
    sync(aside)
    sync(folder)
    return run_dir.with_name(aside.name)


def _delete_written(run_dir: Path) -> None:
    """Delete what is on the run's list and keep everything else."""
    listed = written_names(run_dir) or set()
    for path in _record_last(list_run_files(run_dir)):
        if ABANDONED.sub("", path.name) not in listed:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    sync(run_dir)


def _record_last(paths: Iterable[Path]) -> list[Path]:
    """Sort the record last, so that a partly cleared folder is still recognized as a run's."""
    return sorted(paths, key=lambda path: path.name in (CONFIG, RUN, WRITTEN))


def place_result(run_dir: Path) -> list[str]:
    """Move the final weights and tokenizer from RESULT into the run's folder; return their names.

    A README.md of the user is kept instead of ours; other files of the user with such a name are renamed.
    """
    result, listed = run_dir / RESULT, written_names(run_dir)
    entries = sorted(result.iterdir())
    names = [str(path.relative_to(result)) for path in sorted(result.rglob("*")) if path.is_file()]
    for path in entries:
        target = run_dir / path.name
        if listed is not None and path.name not in listed and os.path.lexists(target):
            if path.name == "README.md":
                continue
            os.rename(target, _free_name(target))
        note_written(run_dir, [path.name])
        if path.is_dir() and target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    shutil.rmtree(result)
    sync(run_dir)
    return names


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def _is_checkpoint(path: Path) -> bool:
    return bool(re.fullmatch(r"checkpoint-\d+", path.name)) and (path / "state.json").is_file()


def _device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return zerolora's git commit, with `-dirty` if files differ from it; None if installed without a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            ["git", "status", "--porcelain"], cwd=CHECKOUT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")
