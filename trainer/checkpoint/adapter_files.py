"""The files of a finished adapter: what is wrong with them, and which ones differ from what training wrote."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.checkpoint.checkpoint_files import checksum, recorded_checksums
from trainer.config.adapter_settings import FILE, read_adapter_settings
from trainer.config.files import UnreadableFile, check_shape, read_json, read_safetensors_header
from trainer.contract.whole_files import write_json

WEIGHTS, SETTINGS, RECORD = "adapter_model.safetensors", FILE, "run.json"
TEXTS = (".json", ".jinja", ".model", ".txt")
"""Suffixes of settings and tokenizer files."""
OTHERS = ("state.json", "README.md")


def record_result(run_dir: Path, names: Iterable[str], identity: dict[str, Any] | None) -> None:
    """Add to run.json what identifies the result: checksums of its files, and base, data and settings."""
    path = run_dir / RECORD
    checksums = {name: checksum(run_dir / name) for name in names if name not in OTHERS}
    write_json(path, read_json(path) | {"checksums": checksums, "identity": identity})


def damage_of_adapter(folder: Path) -> str | None:
    """Return why the adapter in a folder cannot be loaded, beginning with the file; None if it can be.

    Weights are compared with their checksum where a run or checkpoint recorded one. Raises UserError if the settings
    are missing.
    """
    try:
        read_safetensors_header(folder / WEIGHTS)
        read_adapter_settings(folder)
        if _differs(folder, WEIGHTS, _recorded(folder)):
            return (
                f"{WEIGHTS} is damaged: its checksum is not the one that training recorded; take it from a checkpoint"
            )
    except FileNotFoundError:
        return f"no {WEIGHTS}; only safetensors are loaded"
    except UnreadableFile as error:
        return f"{error.path.name} {error.problem}; {error.fix}"
    return None


def changed_files(folder: Path) -> list[str]:
    """Return the names of an adapter's settings and tokenizer files that are not as training wrote them."""
    recorded = _recorded(folder)
    texts = [name for name in recorded if name.endswith(TEXTS) and name not in OTHERS]
    return [name for name in texts if _differs(folder, name, recorded)]


def _differs(folder: Path, name: str, recorded: dict[str, str]) -> bool:
    try:
        return name in recorded and checksum(folder / name) != recorded[name]
    except FileNotFoundError:
        return True
    except OSError as error:
        raise UnreadableFile(folder / name, f"cannot be read ({error.strerror})") from None


def _recorded(folder: Path) -> dict[str, str]:
    """Return the checksums of a checkpoint or a finished run; none of one from before there were any."""
    if (folder / RECORD).is_file():
        return check_shape(read_json(folder / RECORD).get("checksums") or {}, folder / RECORD, dict[str, str])
    return recorded_checksums(folder)
