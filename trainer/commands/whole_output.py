"""A model for other programs on the disk: written beside its place, renamed when it is whole, gone if it cannot be."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trainer.checkpoint.run_record import note_written
from trainer.config import UserError
from trainer.contract.folder_lock import living_holder
from trainer.contract.full_disk import disk_error, disk_of
from trainer.contract.whole_files import apply_umask


def check_output(output: Path) -> None:
    """Raise UserError unless `output` is free: not there or an empty folder, and not in a folder that a run is in."""
    if output.name in ("", ".."):
        raise UserError(f"{output}: a new folder is written, which needs a name; name one in it with --output")
    try:
        occupied = os.path.lexists(output) and (not output.is_dir() or any(output.iterdir()))
        os.lstat(output.with_name(f".writing-{output.name}"))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); name another folder with --output") from None
    if occupied:
        raise UserError(f"{output}: exists and would be overwritten; remove it, or name another folder with --output")
    existing = next(parent for parent in output.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"{output}: cannot be written in {existing}; name another folder with --output")
    _check_no_run_in(output)


def _check_no_run_in(output: Path) -> None:
    """A run that trains clears its folder, and removes its older checkpoints with all that is in them."""
    for folder in output.absolute().parents:
        try:
            holder = living_holder(folder)
        except OSError:
            continue  # nothing can be asked of a folder above that this user may not look into
        if holder is not None:
            raise UserError(
                f"{output}: a run is training in {folder} ({holder}), and may remove what is written there; "
                "name a folder elsewhere with --output"
            )


@contextmanager
def writing(output: Path) -> Iterator[Path]:
    """A new folder beside `output` to write in, both on the list of the run that they lie in; it is gone afterwards.

    What is whole is moved out of it: `put_in_place`. Raises RuntimeError, with the disk's name, if writing fails.
    """
    beside = output.with_name(f".writing-{output.name}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        note_written(output.parent, [output.name, beside.name])
        beside.mkdir(parents=True)
        yield beside
    except Exception as error:  # tokenizers raises plain Exception
        reason = disk_error(error) or (str(error) if isinstance(error, OSError | SafetensorError) else None)
        if reason is None:
            raise
        raise RuntimeError(
            f"{output}: cannot be written ({reason}); {disk_of(output)}; make room, or name another with --output"
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def put_in_place(whole: Path, output: Path) -> None:
    """Rename a finished file or folder to `output`, which may be an empty folder; other users may then read it."""
    apply_umask(whole)
    if output.is_dir():
        output.rmdir()
    os.replace(whole, output)
