"""Integrity checks of a finished adapter's files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.checkpoint.checkpoint_files import checksum, recorded_checksums
from trainer.config.adapter_settings import FILE, read_adapter_settings
from trainer.config.files import UnreadableFile, check_shape, read_json, read_safetensors_header
from trainer.contract.whole_files import write_json

WEIGHTS, SETTINGS, RECORD = "adapter_model.safetensors", FILE, "run.json"
TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""File suffixes of settings and tokenizer files."""
UNVERIFIED = ("state.json", "README.md")


def record_result(run_dir: Path, names: Iterable[str], identity: dict[str, Any] | None) -> None:
    """Add the checksums of the result's files and the run's identity to run.json."""
    path = run_dir / RECORD
    checksums = {name: checksum(run_dir / name) for name in names if name not in UNVERIFIED}
    write_json(path, read_json(path) | {"checksums": checksums, "identity": identity})


def find_adapter_damage(folder: Path) -> str | None:
    """Return why the adapter in a folder cannot be loaded, starting with the file's name; None if it can.

    Weights are compared with their recorded checksum, if any. Raises UserError if the settings are missing.
    """
    try:
        read_safetensors_header(folder / WEIGHTS)
        read_adapter_settings(folder)
        if _has_changed(folder, WEIGHTS, _recorded_checksums(folder)):
            return f"{WEIGHTS} is damaged: its checksum differs from the recorded one; take it from a checkpoint"
    except FileNotFoundError:
        return f"no {WEIGHTS}; only safetensors are loaded"
    except UnreadableFile as error:
        return f"{error.path.name} {error.problem}; {error.fix}"
    return None


def changed_files(folder: Path) -> list[str]:
    """Return the adapter's settings and tokenizer files that were changed since training."""
    recorded = _recorded_checksums(folder)
    texts = [name for name in recorded if name.endswith(TEXT_SUFFIXES) and name not in UNVERIFIED]
    return [name for name in texts if _has_changed(folder, name, recorded)]


def _has_changed(folder: Path, name: str, recorded: dict[str, str]) -> bool:
    try:
        return name in recorded and checksum(folder / name) != recorded[name]
    except FileNotFoundError:
        return True
    except OSError as error:
        raise UnreadableFile(folder / name, f"cannot be read ({error.strerror})") from None


def _recorded_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums that a checkpoint or finished run recorded, by file name; empty if none."""
    if (folder / RECORD).is_file():
        return check_shape(read_json(folder / RECORD).get("checksums") or {}, folder / RECORD, dict[str, str])
    return recorded_checksums(folder)
