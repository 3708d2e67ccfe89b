"""Write models for other programs atomically: to a temporary folder that is renamed when complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trainer.config import UserError
from trainer.contract.folder_lock import describe_live_holder
from trainer.contract.output_files import describe_disk, describe_disk_error
from trainer.contract.whole_files import apply_umask


def check_output(output: Path) -> None:
    """Raise UserError unless `output` is new or empty, is writable, and is not in an active run's folder."""
    if output.name in ("", ".."):
        raise UserError(f"{output}: is not a folder name; pass the name of a new folder with --output")
    try:
        occupied = os.path.lexists(output) and (not output.is_dir() or any(output.iterdir()))
        os.lstat(output.with_name(f".writing-{output.name}"))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); use another folder with --output") from None
    if occupied:
        raise UserError(f"{output}: already exists; use another folder with --output")
    real = Path(os.path.realpath(output))
    if os.path.ismount(real):
        raise UserError(f"{output}: is a mount point, which cannot be replaced; use a folder in it with --output")
    existing = next(parent for parent in real.parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"{output}: cannot be created in {existing}; use another folder with --output")
    for folder in real.parents:
        try:
            holder = describe_live_holder(folder)
        except OSError:
            continue  # no permission to read this parent folder
        if holder is not None:
            fix = "use a folder elsewhere with --output"
            raise UserError(f"{output}: a run is training in {folder} ({holder}) and may delete files there; {fix}")


@contextmanager
def temporary_output(output: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `output`, or next to the folder it links to, which is deleted on exit.

    Use `move_into_place` to keep results. Raises UserError if the folder cannot be created, and RuntimeError
    with the disk's free space if writing fails.
    """
    real = Path(os.path.realpath(output))
    temporary = real.with_name(f".writing-{real.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            if describe_disk_error(error):
                raise
            reason = error.strerror
            raise UserError(f"{output}: cannot be written ({reason}); use another folder with --output") from None
        yield temporary
    except Exception as error:  # tokenizers raises plain Exception
        reason = describe_disk_error(error) or (str(error) if isinstance(error, OSError | SafetensorError) else None)
        if reason is None:
            raise
        problem = f"{output}: cannot be written ({reason}; {describe_disk(output)})"
        raise RuntimeError(f"{problem}; free some space, or use another disk with --output") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_into_place(finished: Path, output: Path) -> None:
    """Rename a finished file or folder to `output`, replacing an empty folder, with permissions from the umask.

    If `output` is a symlink to an empty folder, that folder is replaced.
    """
    apply_umask(finished)
    real = Path(os.path.realpath(output))
    if real.is_dir():
        real.rmdir()
    os.replace(finished, real)
