"""The files of checkpoints: which are whole, the checksums that prove it, and how one takes its place for good.

COMPLETE is written last. It holds a line `xxh3-128 bytes name` for every other file and ends with the digest of those
lines, so that a single changed bit is found in any file.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import xxhash

from trainer.config import UserError
from trainer.config.files import read_json

MARKER = "COMPLETE"
FORMAT = 3
CHUNK = 1 << 25
NAME = re.compile(r"checkpoint-(\d+)")
NO_SUCH_CALL = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, None for the start; and what was wrong with newer ones."""

    checkpoint: Path | None
    warning: str | None = None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints of a run that were written to the end, oldest first; their bytes are not read."""
    return [path for path in checkpoint_folders(run_dir) if (path / MARKER).exists()]


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """All folders `checkpoint-N` of a run, whole or not, oldest first."""
    return sorted((path for path in run_dir.glob("checkpoint-*") if NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def choose_checkpoint(setting: str | None, run_dir: Path, *, read: bool) -> Choice:
    """What `training.resume_from_checkpoint` means; with `read` every byte of the checkpoint is held against its sum.

    `latest` and `auto` pass over damaged ones. Raises UserError if there is none, or the one that is named is damaged.
    """
    if setting is None:
        return Choice(None)
    if setting in ("latest", "auto"):
        return _newest_whole(setting, run_dir, read)
    path, asked = Path(setting).expanduser(), f"training.resume_from_checkpoint={setting}"
    if not (path / "state.json").exists() and not (path / MARKER).exists():
        raise UserError(f"{asked}: not the folder of a checkpoint; use latest")
    problem = _problem(path, read)
    if problem is None:
        return Choice(path)
    step = step_of(path) if path.name.rsplit("-", 1)[-1].isdigit() else 0
    before = [other for other in list_checkpoints(path.parent) if step_of(other) < step]
    complete = next((other for other in reversed(before) if damage(other) is None), None)
    fix = (
        f"the newest complete one before it is {complete}"
        if complete
        else "no earlier one is complete; start a new run"
    )
    raise UserError(f"{asked}: {problem}; {fix}")


def _newest_whole(setting: str, run_dir: Path, read: bool) -> Choice:
    damaged: list[str] = []
    folders = checkpoint_folders(run_dir)
    for folder in reversed(folders):
        problem = _problem(folder, read)
        if problem is None:
            warning = f"skipped {'; '.join(damaged)}; resuming from {folder.name}" if damaged else None
            return Choice(folder, warning)
        damaged.append(f"{folder.name} ({problem})")
    if damaged:
        # `auto` does not start over here either: it would write over what may still be rescued.
        raise UserError(
            f"training.resume_from_checkpoint={setting}: no complete checkpoint in {run_dir}: {'; '.join(damaged)}; "
            "start a new run in another output_dir"
        )
    if setting == "latest":
        raise UserError(
            f"training.resume_from_checkpoint=latest: no complete checkpoint in {run_dir}; "
            "use auto, which then starts from scratch"
        )
    return Choice(None)


def _problem(checkpoint: Path, read: bool) -> str | None:
    return damage(checkpoint) if read or not (checkpoint / MARKER).exists() else None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, its file named; None if every byte is as it was written."""
    try:
        marker = (checkpoint / MARKER).read_bytes()
        sums = _sums_in(marker)
        if sums is None:
            return f"{MARKER} is damaged"
        for name, (digest, size) in sums.items():
            if problem := _difference(checkpoint / name, digest, size):
                return f"{name} {problem}"
        return None
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return "was not written to the end: no COMPLETE in it" if name == MARKER else f"{name} is missing"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read ({error.strerror})"


def recorded_checksums(checkpoint: Path) -> dict[str, str]:
    """Return the checksums of a checkpoint's files by name; none where it was written without."""
    sums = _sums_in((checkpoint / MARKER).read_bytes()) if (checkpoint / MARKER).is_file() else None
    return {name: digest for name, (digest, _) in (sums or {}).items()}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return `state.json` of a checkpoint. Raises UserError if it cannot be read or is of another version."""
    try:
        state: dict[str, Any] = read_json(checkpoint / "state.json")
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: has no state.json; use another checkpoint") from None
    if state.get("format") != FORMAT:
        raise UserError(f"{checkpoint}: written in format {state.get('format')}, this version reads {FORMAT}")
    return state


def checksum(file: Path) -> str:
    """XXH3 of a file, 128 bits: as fast as the disk."""
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        # Not filled with zeros, which the thread that trains would wait for.
        view = numpy.empty(min(CHUNK, file.stat().st_size) or 1, numpy.uint8).data
        while count := stream.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


def seal(folder: Path) -> None:
    """Write COMPLETE: the checksums of all files in the folder, and of themselves."""
    # A tokenizer with several chat templates has a folder of them.
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != MARKER]
    sums = {str(file.relative_to(folder)): (checksum(file), file.stat().st_size) for file in files}
    _write_sums(folder / MARKER, sums)


def reseal(folder: Path, name: str) -> None:
    """Take in a file that was rewritten on purpose, such as the model card, if the folder is a sealed checkpoint."""
    marker = folder / MARKER
    sums = _sums_in(marker.read_bytes()) if marker.is_file() else None
    if sums and name in sums:
        _write_sums(marker, sums | {name: (checksum(folder / name), (folder / name).stat().st_size)})


def _write_sums(marker: Path, sums: dict[str, tuple[str, int]]) -> None:
    lines = "".join(f"{digest} {size} {name}\n" for name, (digest, size) in sums.items())
    partial = marker.with_name(f".{MARKER}.partial")
    partial.write_text(f"{lines}{xxhash.xxh3_128_hexdigest(lines.encode())}\n", encoding="utf-8")
    os.replace(partial, marker)


def _sums_in(marker: bytes) -> dict[str, tuple[str, int]] | None:
    """Return checksum and size by file name; None for a damaged marker."""
    lines, own = marker[:-33], marker[-33:]
    if own != f"{xxhash.xxh3_128_hexdigest(lines)}\n".encode():
        return None
    rows = [line.split(" ", 2) for line in lines.decode().splitlines()]
    return {name: (digest, int(size)) for digest, size, name in rows}


def _difference(file: Path, digest: str, size: int) -> str | None:
    found = file.stat().st_size
    if found != size:
        return f"is damaged: {found:,} bytes of {size:,}"
    return None if checksum(file) == digest else "is damaged: its checksum is another"


def publish(folder: Path, final: Path, later: list[Path]) -> list[Path]:
    """Seal a folder, put it on the disk for good, and give it its name; checkpoints that are `later` step aside first.

    A crash at any point leaves the older checkpoints as they were. Returns the new names of what stepped aside.
    """
    seal(folder)
    for path in (*folder.rglob("*"), folder):
        _sync(path)
    in_the_way = [final] if final.exists() and final not in later else []
    aside = [_set_aside(checkpoint) for checkpoint in (*later, *in_the_way) if checkpoint.exists()]
    os.replace(folder, final)
    # The run's folder may be as new as the checkpoint, and those above it.
    for parent in final.absolute().parents:
        _sync(parent)
        if parent.is_mount():
            break
    return aside


def _set_aside(checkpoint: Path) -> Path:
    """Give a checkpoint a name under which nothing looks for it; nothing is deleted."""
    names = (f"abandoned{'' if number == 1 else f'-{number}'}-{checkpoint.name}" for number in range(1, 10_000))
    new = next(path for name in names if not (path := checkpoint.with_name(name)).exists())
    os.replace(checkpoint, new)
    return new


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # a folder above that we may pass through but not read is none that we made
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:  # some network file systems know no fsync of folders
            raise
    finally:
        os.close(descriptor)


def later_checkpoints(run_dir: Path, step: int) -> list[Path]:
    """Those after a step, whole or not: what a run that goes on from that step leaves behind."""
    return [path for path in checkpoint_folders(run_dir) if step_of(path) > step]


def oldest_beyond(run_dir: Path, keep: int | None, protect: tuple[int, ...]) -> Iterator[Path]:
    """The whole checkpoints beyond the newest `keep`, but for those at the steps to `protect`."""
    if keep is not None:
        yield from (path for path in list_checkpoints(run_dir)[:-keep] if step_of(path) not in protect)
