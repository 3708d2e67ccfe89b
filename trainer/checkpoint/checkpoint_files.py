"""Find, verify and atomically publish checkpoints.

COMPLETE is written last. It contains a line `xxh3-128 bytes name` for every other file, and a digest of these lines, so
that a single changed bit in any file is detected.
"""

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
from trainer.contract.whole_files import sync, write_text_atomic

MARKER = "COMPLETE"
FORMAT_VERSION = 4
CHUNK = 1 << 25
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class CheckpointChoice:
    """The checkpoint to resume from (None for a fresh start), and a warning about skipped damaged checkpoints."""

    checkpoint: Path | None
    warning: str | None = None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the completely written checkpoints of a run, oldest first, without reading their contents."""
    return [path for path in list_checkpoint_folders(run_dir) if (path / MARKER).exists()]


def list_checkpoint_folders(run_dir: Path) -> list[Path]:
    """Return all `checkpoint-N` folders of a run, complete or not, oldest first."""
    return sorted(
        (path for path in run_dir.glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name)), key=parse_step
    )


def parse_step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def choose_checkpoint(setting: str | None, run_dir: Path, *, verify: bool) -> CheckpointChoice:
    """Resolve `training.resume_from_checkpoint`; with `verify`, also verify all checksums.

    `latest` and `auto` skip damaged checkpoints. Raises UserError if the named checkpoint or all checkpoints are
    damaged, or if `latest` finds none.
    """
    if setting is None:
        return CheckpointChoice(None)
    if setting in ("latest", "auto"):
        return _choose_newest_intact(setting, run_dir, verify)
    path, prefix = Path(setting).expanduser(), f"training.resume_from_checkpoint={setting}"
    if not (path / "state.json").exists() and not (path / MARKER).exists():
        raise UserError(f"{prefix}: is not a checkpoint folder; use latest, or {run_dir}/checkpoint-N")
    problem = _describe_problem(path, verify)
    if problem is None:
        return CheckpointChoice(path)
    raise UserError(f"{prefix}: {problem}; use another checkpoint, or latest for the newest complete checkpoint")


def _choose_newest_intact(setting: str, run_dir: Path, verify: bool) -> CheckpointChoice:
    damaged: list[str] = []
    for folder in reversed(list_checkpoint_folders(run_dir)):
        problem = _describe_problem(folder, verify)
        if problem is None:
            warning = f"skipped {'; '.join(damaged)}; resuming from {folder.name}" if damaged else None
            return CheckpointChoice(folder, warning)
        damaged.append(f"{folder.name} ({problem})")
    if damaged:
        # Even `auto` does not start over: it would overwrite checkpoints that may still be recovered.
        raise UserError(
            f"training.resume_from_checkpoint={setting}: no complete checkpoint in {run_dir}: {'; '.join(damaged)}; "
            "start a new run in another output_dir"
        )
    if setting == "latest":
        fix = "use auto to start from scratch"
        raise UserError(f"training.resume_from_checkpoint=latest: no complete checkpoint in {run_dir}; {fix}")
    return CheckpointChoice(None)


def _describe_problem(checkpoint: Path, verify: bool) -> str | None:
    return describe_damage(checkpoint) if verify or not (checkpoint / MARKER).exists() else None


def describe_damage(checkpoint: Path) -> str | None:
    """Verify a checkpoint's checksums; return the first problem, including the file's name, or None if all match."""
    try:
        checksums = _parse_checksums((checkpoint / MARKER).read_bytes())
        if checksums is None:
            return f"{MARKER} is damaged"
        for name, (digest, size) in checksums.items():
            if (size_found := (checkpoint / name).stat().st_size) != size:
                return f"{name} is damaged: it has {size_found:,} of {size:,} bytes"
            if compute_checksum(checkpoint / name) != digest:
                return f"{name} is damaged: its checksum does not match"
        return None
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return "is incomplete: it has no COMPLETE file" if name == MARKER else f"{name} is missing"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read ({error.strerror})"


def read_recorded_checksums(checkpoint: Path) -> dict[str, str]:
    checksums = _parse_checksums((checkpoint / MARKER).read_bytes()) if (checkpoint / MARKER).is_file() else None
    return {name: digest for name, (digest, _) in (checksums or {}).items()}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return `state.json` of a checkpoint. Raises UserError if it cannot be read or has an unknown format."""
    try:
        state: dict[str, Any] = read_json(checkpoint / "state.json")
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: has no state.json; use another checkpoint") from None
    if state.get("format") != FORMAT_VERSION:
        raise UserError(
            f"{checkpoint}: has format {state.get('format')}, but this version reads {FORMAT_VERSION}; "
            "resume with the version of zerolora that wrote it"
        )
    return state


def compute_checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        # Uninitialized memory: filling it with zeros would hold the GIL while training needs it.
        view = numpy.empty(min(CHUNK, file.stat().st_size) or 1, numpy.uint8).data
        while count := stream.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


def seal(folder: Path) -> None:
    """Write COMPLETE with the checksums of all files in the folder."""
    # A tokenizer with several chat templates stores them in a subfolder.
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != MARKER]
    checksums = {str(file.relative_to(folder)): (compute_checksum(file), file.stat().st_size) for file in files}
    _write_checksums(folder / MARKER, checksums)


def reseal(folder: Path, name: str) -> None:
    """Update the checksum of an intentionally rewritten file, if the folder is a sealed checkpoint."""
    marker = folder / MARKER
    checksums = _parse_checksums(marker.read_bytes()) if marker.is_file() else None
    if checksums and name in checksums:
        _write_checksums(marker, checksums | {name: (compute_checksum(folder / name), (folder / name).stat().st_size)})


def _write_checksums(marker: Path, checksums: dict[str, tuple[str, int]]) -> None:
    lines = "".join(f"{digest} {size} {name}\n" for name, (digest, size) in checksums.items())
    write_text_atomic(marker, f"{lines}{xxhash.xxh3_128_hexdigest(lines.encode())}\n")


def _parse_checksums(marker: bytes) -> dict[str, tuple[str, int]] | None:
    lines, digest_line = marker[:-33], marker[-33:]
    if digest_line != f"{xxhash.xxh3_128_hexdigest(lines)}\n".encode():
        return None
    rows = [line.split(" ", 2) for line in lines.decode().splitlines()]
    return {name: (digest, int(size)) for digest, size, name in rows}


def publish(folder: Path, final: Path, abandoned: list[Path]) -> list[Path]:
    """Seal a folder, flush it to disk and rename it to `final`.

    Before that rename, moves `abandoned` checkpoints and any existing `final` out of the way, and returns their
    new paths. A crash at any point leaves older checkpoints untouched.
    """
    seal(folder)
    for path in (*folder.rglob("*"), folder):
        sync(path)
    existing = [final] if final.exists() and final not in abandoned else []
    moved = [_rename_abandoned(checkpoint) for checkpoint in (*abandoned, *existing) if checkpoint.exists()]
    os.replace(folder, final)
    # The run's folder and its parents may be new too.
    for parent in final.absolute().parents:
        sync(parent)
        if parent.is_mount():
            break
    return moved


def _rename_abandoned(checkpoint: Path) -> Path:
    """Rename a checkpoint to `abandoned-...`, so that a run resumes from it only if it is named explicitly."""
    names = (f"abandoned{'' if number == 1 else f'-{number}'}-{checkpoint.name}" for number in range(1, 10_000))
    new = next(path for name in names if not (path := checkpoint.with_name(name)).exists())
    os.replace(checkpoint, new)
    return new


def list_later_checkpoints(run_dir: Path, step: int) -> list[Path]:
    """Return the checkpoints after a step, complete or not; a run that resumes from that step abandons them."""
    return [path for path in list_checkpoint_folders(run_dir) if parse_step(path) > step]


def list_surplus_checkpoints(run_dir: Path, keep: int | None, protect: tuple[int, ...]) -> Iterator[Path]:
    """Yield all complete checkpoints except the newest `keep` and any at a step in `protect`."""
    if keep is not None:
        yield from (path for path in list_checkpoints(run_dir)[:-keep] if parse_step(path) not in protect)
