"""Check the output folder and inputs of a run, without importing torch (an import-linter contract).

Does not write anything, except that a run's folder on an object store is first copied to this machine.
"""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.constants import HF_HUB_CACHE

from trainer.checkpoint.checkpoint_files import choose_checkpoint, list_checkpoints
from trainer.checkpoint.run_record import LOGS, is_run_folder, list_run_files
from trainer.config import RunConfig, SourceSection, UserError
from trainer.config.evaluation_section import check_task_names
from trainer.config.files import describe_broken_link
from trainer.contract.folder_lock import describe_live_holder
from trainer.contract.json_records import SWEEP_RECORD_FILE
from trainer.contract.object_store import fetch_run
from trainer.data.source_files import read_template
from trainer.data.sources import resolve_local_path
from trainer.model.model_source import check_source
from trainer.model.published_shapes import is_random

MIN_FREE_GIB = 1.0
MAX_SHOWN_NAMES = 3
REQUIRED_FILES = {"base_model": ["config.json", "model_index.json"], "lora.adapter_path": ["adapter_config.json"]}
Result = TypeVar("Result")


def check_inputs_and_output(config: RunConfig, *, for_training: bool = True) -> None:
    """Raise UserError if the output folder cannot be used, or the model, template or data do not exist.

    With `for_training=False` the output folder may already contain a run, or lack a checkpoint to resume from.
    """
    check_output_folder(config)
    for run in config.runs:
        prefix_errors(check_inputs_and_output, run, for_training=for_training)
    if config.runs:
        has_checkpoint = any(list_checkpoints(Path(run.output_dir)) for run in config.runs)
        if for_training and config.training.resume_from_checkpoint == "latest" and not has_checkpoint:
            raise UserError("training.resume_from_checkpoint=latest: no adapter has a checkpoint; remove the setting")
        return
    if for_training:
        choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), verify=False)
        check_no_conflict(config)
    names = {"model.tokenizer": config.model.tokenizer, "lora.adapter_path": config.lora.adapter_path}
    for setting, name in ({"base_model": config.base_model} | names).items():
        if name and not is_random(name) and not Path(name).exists():
            check_source(setting, name)
    if config.dataset.chat_template is not None:
        read_template(config.dataset.chat_template)
    if config.scu.reference is not None:
        resolve_local_path(SourceSection(path=config.scu.reference), "scu.reference")
    check_task_names(config.evaluation.tasks)
    data = config.dataset
    sources = [(f"dataset.mix.{index}", source) for index, source in enumerate(data.mix)] or [("dataset", data)]
    for label, source in [*sources, ("dataset.evaluation", data.evaluation)]:
        if source is not None and source.path is not None:
            resolve_local_path(source, label)


def prefix_errors(check: Callable[..., Result], run: RunConfig, *arguments: Any, **options: Any) -> Result:
    """Call `check` for one adapter's run, and prefix its errors with the adapter's name."""
    try:
        return check(run, *arguments, **options)
    except UserError as error:
        raise UserError(f"adapter {Path(run.output_dir).name}: {error}") from None


def check_output_folder(config: RunConfig) -> None:
    """Raise UserError if the output folder is not writable, or contains files not written by a run."""
    folder = Path(config.output_dir)
    fetch_run(folder)
    try:
        _check_writable(folder, _find_nearest_existing(folder))
        if (folder / LOGS).exists() and not (folder / LOGS).is_dir():
            raise UserError(f"output_dir={folder}: {LOGS} is a file, but the run writes logs there; use another folder")
        _check_separate(config, folder)
        entries = list_run_files(folder)
        is_run = is_run_folder(folder) or (config.adapters and (folder / SWEEP_RECORD_FILE).is_file())
        if entries and not is_run:
            names = ", ".join(path.name for path in entries[:MAX_SHOWN_NAMES])
            names += ", ..." * (len(entries) > MAX_SHOWN_NAMES)
            raise UserError(f"output_dir={folder}: contains files not written by a run ({names}); use a new folder")
    except OSError as error:
        raise UserError(f"output_dir={folder}: {error.strerror}; use another folder") from None


def check_no_conflict(config: RunConfig) -> None:
    """Raise UserError unless a run may start or resume in the folder. Does not check the folder's lock."""
    if problem := _find_conflict(config):
        raise UserError(f"output_dir={config.output_dir}: {problem}")


def describe_output_problem(config: RunConfig) -> str | None:
    """Return why `zerolora train` would reject the output folder now, with the fix; None if it would accept it."""
    if holder := describe_live_holder(Path(config.output_dir)):
        return f"is in use by an active run ({holder}); wait until it exits, or use another folder"
    return _find_conflict(config)


def _find_conflict(config: RunConfig) -> str | None:
    if config.runs:  # each run has its own folder
        return next((f"{run.output_dir} {conflict}" for run in config.runs if (conflict := _find_conflict(run))), None)
    folder, overwrite = Path(config.output_dir), config.output.overwrite
    if not list_run_files(folder):
        return None
    if overwrite and overwrite != "delete":
        real = folder.resolve()
        if os.path.ismount(real):
            return "output.overwrite cannot move a run out of a mount point; use a subfolder of it"
        if not os.access(real.parent, os.W_OK | os.X_OK):
            return f"output.overwrite cannot move the run: no permission to write in {real.parent}; use another folder"
        return None
    if overwrite or config.training.resume_from_checkpoint is not None:
        return None
    overwriting = "output.overwrite: true (moves it aside) or delete (deletes it)"
    if list_checkpoints(folder):
        resuming = "training.resume_from_checkpoint: latest to resume it"
        return f"contains another run; use a new folder, set {resuming}, or {overwriting}"
    return f"contains another run, without a complete checkpoint to resume from; use a new folder, or set {overwriting}"


def _find_nearest_existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent. Raises UserError for a broken link or an unresolvable `..`."""
    for path in (folder, *folder.parents):
        if problem := describe_broken_link(path):
            raise UserError(f"output_dir={folder}: {problem}; fix the link, or use another folder")
        if path.exists():
            if ".." in (missing := folder.relative_to(path).parts):
                name = path.joinpath(*missing[: missing.index("..")])
                raise UserError(
                    f"output_dir={folder}: {name} does not exist, so .. after it cannot be resolved; remove both"
                )
            return path
    return Path()


def _check_writable(folder: Path, existing: Path) -> None:
    mode = existing.stat().st_mode
    if not stat.S_ISDIR(mode):
        kinds = ((stat.S_ISREG, "file"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"))
        kind = next((name for is_kind, name in kinds if is_kind(mode)), "device")
        raise UserError(f"output_dir={folder}: {existing} is a {kind}; use another folder")
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        raise UserError(f"output_dir={folder}: {existing} is on a read-only file system; use another disk")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output_dir={folder}: no permission to write in {existing}; use another folder")
    disk = shutil.disk_usage(existing)
    if not disk.total:
        raise UserError(f"output_dir={folder}: {existing} is on a virtual file system; use another folder")
    free_gib = disk.free / 2**30
    if free_gib < MIN_FREE_GIB:
        raise UserError(
            f"output_dir={folder}: {free_gib:.2f} GiB free on its disk, but checkpoints need at least "
            f"{MIN_FREE_GIB} GiB; free some space"
        )


def _check_separate(config: RunConfig, folder: Path) -> None:
    """Raise UserError if the folder is a home directory or a git checkout, or overlaps with an input of the run."""
    real = folder.resolve()
    try:
        home = Path.home().resolve()
    except RuntimeError:
        home = Path("/")  # a user without a home directory
    if real == home or real in home.parents:
        problem = "is your home folder" if real == home else "contains your home folder"
        raise UserError(f"output_dir={folder}: {problem}; use a separate folder")
    if (real / ".git").exists():
        raise UserError(f"output_dir={folder}: is a git checkout; use a separate folder, such as {folder / 'run'}")
    cache = Path(os.path.realpath(config.dataset.cache_dir))
    for name, path in _list_inputs(config):
        real_input = Path(os.path.realpath(path))  # unlike resolve(), accepts a loop of symlinks
        if real_input == real:
            raise UserError(f"output_dir={folder}: is also {name}; use a separate folder")
        if real in real_input.parents:
            raise UserError(f"output_dir={folder}: contains {name} ({path}); use a separate folder")
        if not any((real_input / file).exists() for file in REQUIRED_FILES.get(name, [""])):
            continue  # the input is the mistake
        if real_input in real.parents and real_input.is_dir():
            raise UserError(f"output_dir={folder}: is inside {name} ({path}); use a folder outside it")
        if name in ("base_model", "model.tokenizer", "lora.adapter_path") and real_input in (cache, *cache.parents):
            problem = f"is inside {name} ({path}); use a folder outside it"
            raise UserError(f"dataset.cache_dir={config.dataset.cache_dir}: {problem}")


def _list_inputs(config: RunConfig) -> list[tuple[str, Path]]:
    """Return the run's local inputs and caches as (setting, path)."""
    data = config.dataset
    inputs = [
        ("base_model", config.base_model),
        ("model.tokenizer", config.model.tokenizer),
        ("lora.adapter_path", config.lora.adapter_path),
        ("dataset.path", data.path),
        ("dataset.evaluation.path", data.evaluation.path if data.evaluation else None),
        *((f"dataset.mix.{index}.path", source.path) for index, source in enumerate(data.mix)),
        ("dataset.chat_template", data.chat_template),
    ]
    # os.path accepts any text, such as a chat template or a Hub ID.
    paths = [(name, Path(os.path.expanduser(text))) for name, text in inputs if text]
    existing = [(name, path) for name, path in paths if os.path.exists(path)]
    caches = [("dataset.cache_dir", Path(data.cache_dir).expanduser()), ("the Hub cache", Path(HF_HUB_CACHE))]
    return [*existing, *caches]
