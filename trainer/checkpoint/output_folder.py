"""Whether a run may write into its output folder: where it lies, what is there already. Nothing is written here."""

import errno
import os
import shutil
import stat
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from trainer.checkpoint.checkpoint_files import list_checkpoints
from trainer.checkpoint.run_record import LOGS, files_in, holds_run, written_names
from trainer.config import RunConfig, UserError
from trainer.contract.folder_lock import living_holder

FREE_GIB_NEEDED = 1.0
NAMES_SHOWN = 3


def check_place(config: RunConfig) -> None:
    """Raise UserError for a folder that cannot be written, or that no run belongs in, whatever it is to do there."""
    folder = Path(config.output_dir)
    try:
        existing = _nearest_existing(folder)
        _check_writable(folder, existing)
        if (folder / LOGS).exists() and not (folder / LOGS).is_dir():
            raise UserError(f"output_dir={folder}: {LOGS} in it is a file, and logs go there; name another folder")
        _check_not_among(config, folder)
        found = files_in(folder)
        if found and not holds_run(folder):
            names = ", ".join(path.name for path in found[:NAMES_SHOWN]) + (", ..." if len(found) > NAMES_SHOWN else "")
            raise UserError(f"output_dir={folder}: holds files that are no run's ({names}); name a new folder")
    except OSError as error:
        raise UserError(f"output_dir={folder}: {error.strerror}; name another folder") from None


def check_free(config: RunConfig) -> None:
    """Raise UserError unless a run may begin in the folder, or go on in it; whose lock it is the caller knows."""
    problem = _occupied(config)
    if problem:
        raise UserError(f"output_dir={config.output_dir}: {problem}")


def obstacle(config: RunConfig) -> str | None:
    """Why `zerolora train` would now refuse to write into the folder, with the fix; None if it would not."""
    holder = living_holder(Path(config.output_dir))
    if holder:
        return f"a run is in it now, {holder}; wait for its end, or name another folder"
    return _occupied(config)


def _occupied(config: RunConfig) -> str | None:
    """What is to be done about the run that the folder holds; None if nothing is."""
    folder, overwrite = Path(config.output_dir), config.output.overwrite
    if not files_in(folder):
        return None
    if overwrite and (overwrite != "delete" or written_names(folder) is None):
        return _why_not_moved(folder)
    if overwrite or config.training.resume_from_checkpoint is not None:
        return None
    overwriting = "output.overwrite: true to move it aside (delete to delete it)"
    if list_checkpoints(folder):
        going_on = "training.resume_from_checkpoint: latest to go on with it"
        return f"holds another run; name a new folder, set {going_on}, or {overwriting}"
    return f"holds another run, without a whole checkpoint to go on from; name a new folder, or set {overwriting}"


def _why_not_moved(folder: Path) -> str | None:
    """Why the folder's content cannot be renamed into one beside it."""
    real = folder.resolve()
    if os.path.ismount(real):
        return "output.overwrite cannot move a run out of a mounted disk; name a folder below it"
    if not os.access(real.parent, os.W_OK | os.X_OK):
        return f"output.overwrite cannot move the run there aside, no permission to write in {real.parent}"
    return None


def _nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there. Raises UserError for a link that leads nowhere."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"output_dir={folder}: {path} is a link to {os.readlink(path)}, which is not there; make that folder, "
                "or name another"
            )
        if path.exists():
            return path
    return Path()


def _check_writable(folder: Path, existing: Path) -> None:
    mode = existing.stat().st_mode
    if not stat.S_ISDIR(mode):
        kinds = ((stat.S_ISREG, "file"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"))
        kind = next((word for is_kind, word in kinds if is_kind(mode)), "device")
        raise UserError(f"output_dir={folder}: {existing} is a {kind}; name another folder")
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        raise UserError(f"output_dir={folder}: the disk of {existing} is mounted read-only; name a folder on another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output_dir={folder}: no permission to write in {existing}; name another folder")
    free_gib = shutil.disk_usage(existing).free / 2**30
    if free_gib < FREE_GIB_NEEDED:
        raise UserError(
            f"output_dir={folder}: {free_gib:.2f} GiB free on its disk, checkpoints need "
            f"{FREE_GIB_NEEDED} at least; make room"
        )


def _check_not_among(config: RunConfig, folder: Path) -> None:
    """A run's files must not come among what it reads, a project's sources, or everything of a user."""
    real = folder.resolve()
    try:
        home = Path.home().resolve()
    except RuntimeError:
        home = Path("/")  # a user without a home
    if real == home or real in home.parents:
        what = "your home folder" if real == home else "above your home folder"
        raise UserError(f"output_dir={folder}: is {what}; name a folder of its own")
    if (real / ".git").exists():
        raise UserError(f"output_dir={folder}: is a git checkout; name a folder of its own, such as {folder / 'run'}")
    for name, path in _read_from(config):
        read = path.resolve()
        if read == real:
            raise UserError(f"output_dir={folder}: is {name} as well; name a folder of its own")
        if real in read.parents:
            raise UserError(f"output_dir={folder}: holds {name} ({path}); name a folder of its own")
        if read in real.parents and read.is_dir():
            raise UserError(f"output_dir={folder}: lies within {name} ({path}); name a folder outside of it")


def _read_from(config: RunConfig) -> list[tuple[str, Path]]:
    """(setting, path) of what a run reads on this machine, and of its caches."""
    data = config.dataset
    given = [
        ("base_model", config.base_model),
        ("model.tokenizer", config.model.tokenizer),
        ("lora.adapter_path", config.lora.adapter_path),
        ("dataset.path", data.path),
        ("dataset.evaluation.path", data.evaluation.path if data.evaluation else None),
        *((f"dataset.mix.{index}.path", source.path) for index, source in enumerate(data.mix)),
        ("dataset.chat_template", data.chat_template),
    ]
    found = [(name, Path(text).expanduser()) for name, text in given if text and _is_there(text)]
    caches = [("dataset.cache_dir", Path(data.cache_dir).expanduser()), ("the hub's cache", Path(HF_HUB_CACHE))]
    return [*found, *caches]


def _is_there(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:
        # Too long for a path: the name on the hub, or a whole chat template.
        if isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.EACCES):
            raise
        return False
