"""Write and read the record of a run, and move or delete the run's files.

training_config.json is the resolved configuration; run.json contains versions, commit and command.
"""

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

from trainer.config import UserError
from trainer.config.files import check_type, describe_broken_link, read_json
from trainer.contract.folder_lock import LOCK_FILE
from trainer.contract.home import CHECKOUT
from trainer.contract.known_versions import read_package_versions
from trainer.contract.rank_arguments import get_typed_command
from trainer.contract.whole_files import sync, write_json, write_text_atomic

CONFIG, RUN = "training_config.json", "run.json"
LOGS = "logs"
STARTED_IN, PROMPT_TEXT = "working_directory", "prompt_text"
RESULT_KEYS = ("checksums", "identity")
RESULT = ".writing-result"
RUN_FILES = (
    *("adapter_model.safetensors", "adapter_config.json", "pytorch_lora_weights.safetensors"),
    *(CONFIG, RUN, RESULT, "initial_adapter", "metrics.jsonl", "tensorboard", "tracker-ids.json"),
    *("wandb", "swanlab"),
    *("answers.json", "report.html", "profile", "scu_config.json", "scu_metrics.json", "scu_history.json"),
    *("samples", "time_by_phase.json", "examples.json"),
)
CHECKPOINT = re.compile(r"(abandoned-(\d+-)?)?checkpoint-\d+")
# A folder with only these entries counts as empty: logs of an attempt that never trained, file system and git files.
IGNORED_ENTRIES = re.compile(r"logs|lost\+found|\.nfs.*|\.gitignore|\.gitkeep")


def find_run_dir(folder: Path) -> Path:
    """Return the output folder of a run, given that folder or a checkpoint in it. Raises UserError for other paths."""
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else describe_broken_link(folder) or "no such folder"
        raise UserError(f"{folder}: {problem}; pass the output_dir of a run, or a checkpoint-N in it")
    run_dir = folder.resolve().parent if CHECKPOINT.fullmatch(folder.resolve().name) else folder
    if not (run_dir / CONFIG).is_file():
        problem = f"is not a run's output folder, because it has no {CONFIG}"
        example = "".join(f", such as {path.parent}" for path in sorted(run_dir.glob(f"*/{CONFIG}"))[:1])
        raise UserError(f"{folder}: {problem}; pass the output_dir of a run{example}")
    return run_dir


def write_run_record(
    run_dir: Path, settings: str, world_size: int, device: str, precision: str, prompt_format: str | None = None
) -> None:
    """Write training_config.json (`settings`, which `zerolora train` accepts) and run.json.

    `prompt_format` is the prompt format of the training data, or None for conversations.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    earlier: dict[str, Any] = {}
    with suppress(UserError):  # a damaged record is replaced
        earlier = read_record(run_dir)
    write_text_atomic(run_dir / CONFIG, settings)
    record = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": get_typed_command(sys.argv),
        STARTED_IN: os.getcwd(),
        "world_size": world_size,
        "device": device,
        "device_name": _get_device_name(device),
        "precision": precision,
        PROMPT_TEXT: prompt_format,
        "python": platform.python_version(),
        "packages": read_package_versions(),
        "commit": find_commit(),
    }
    # An earlier result stays in the folder until this run replaces it.
    write_json(run_dir / RUN, record | {key: earlier[key] for key in RESULT_KEYS if key in earlier})


def read_record(run_dir: Path) -> dict[str, Any]:
    """Return run.json; empty if the folder has none. Raises UserError if it is damaged."""
    return read_json(run_dir / RUN) if (run_dir / RUN).is_file() else {}


def list_run_files(run_dir: Path) -> list[Path]:
    """Return the sorted entries of the folder, except IGNORED_ENTRIES; empty if it does not exist."""
    if not run_dir.is_dir():
        return []
    return sorted(path for path in run_dir.iterdir() if not IGNORED_ENTRIES.fullmatch(path.name))


def is_run_folder(run_dir: Path) -> bool:
    """Return whether a folder belongs to a run: it has a record, or only checkpoints and part of a record."""
    if (run_dir / CONFIG).is_file() and (run_dir / RUN).is_file():
        return True
    entries = list_run_files(run_dir)
    return bool(entries) and all(
        path.name in (CONFIG, RUN) or (path.name.startswith("checkpoint-") and (path / "state.json").is_file())
        for path in entries
    )


def clear_folder(run_dir: Path, overwrite: bool | str) -> str | None:
    """Clear an earlier run's folder; return a message with the files' new path, or None if nothing was moved.

    `overwrite=True` moves all files to a new folder; "delete" deletes the files that the run wrote.
    """
    if not overwrite or not list_run_files(run_dir):
        return None
    assert is_run_folder(run_dir), f"{run_dir}: is not a run, but passed the check of the output folder"
    try:
        if overwrite == "delete":
            _delete_run_files(run_dir)
            return None
        new_folder = _move_to_new_folder(run_dir)
    except OSError as error:
        setting = f"output.overwrite={str(overwrite).lower()}"
        raise UserError(f"{setting}: {error}; the rest of the earlier run is untouched") from None
    return f"moved the earlier run to {new_folder}"


def _move_to_new_folder(run_dir: Path) -> Path:
    """Move all files to a new folder (run_dir.1, run_dir.2, ...) and return it; copy the logs, which are in use."""
    folder = run_dir.resolve()
    for number in count(1):
        new_folder = folder.with_name(f"{folder.name}.{number}")
        with suppress(FileExistsError):
            new_folder.mkdir()
            break
    if (folder / LOGS).is_dir():
        shutil.copytree(folder / LOGS, new_folder / LOGS, ignore=shutil.ignore_patterns(f"{LOCK_FILE}*"), symlinks=True)
    for path in _sort_record_last(list_run_files(folder)):
        os.rename(path, new_folder / path.name)
    sync(new_folder)
    sync(folder)
    return run_dir.with_name(new_folder.name)


def _delete_run_files(run_dir: Path) -> None:
    """Delete the files of a run, including checkpoints and the recorded result; keep all other files."""
    names = {*RUN_FILES}
    with suppress(UserError):  # a damaged record lists no result
        result = check_type(read_record(run_dir).get("checksums") or {}, run_dir / RUN, dict[str, str])
        names |= {name.partition("/")[0] for name in result}
    for path in _sort_record_last(list_run_files(run_dir)):
        if path.name not in names and not CHECKPOINT.fullmatch(path.name.removeprefix(".writing-")):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    sync(run_dir)


def _sort_record_last(paths: Iterable[Path]) -> list[Path]:
    """Return the paths with the run record last, so that a partly cleared folder still counts as a run."""
    return sorted(paths, key=lambda path: path.name in (CONFIG, RUN))


def move_result_into_place(run_dir: Path) -> list[str]:
    """Move the final weights and tokenizer from RESULT into the run's folder; return the file names."""
    result = run_dir / RESULT
    names = [str(path.relative_to(result)) for path in sorted(result.rglob("*")) if path.is_file()]
    for path in sorted(result.iterdir()):
        target = run_dir / path.name
        if path.is_dir() and target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    shutil.rmtree(result)
    sync(run_dir)
    return names


def _get_device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def find_commit() -> str | None:
    """Return zerolora's git commit, with `-dirty` if there are local changes; None outside of a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
