"""The files of a finished adapter: their checksums in run.json, and what is wrong with those that are found."""

import json
from pathlib import Path

from trainer.checkpoint.checkpoint_files import checksum, damage_of_file, damage_of_safetensors
from trainer.contract.whole_files import write_json

WEIGHTS, SETTINGS, RECORD = "adapter_model.safetensors", "adapter_config.json", "run.json"


def record_checksums(run_dir: Path) -> None:
    """Add the checksums of the result's weights and of the adapter's settings to run.json, by which they are known."""
    path = run_dir / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    files = [*sorted(run_dir.glob("*.safetensors")), *run_dir.glob(SETTINGS)]
    record["checksums"] = {file.name: checksum(file) for file in files}
    write_json(path, record)


def damage_of_adapter(folder: Path) -> str | None:
    """What is wrong with the adapter in a folder, its file named: missing, pickled, cut, or not as it was written.

    Whether it is as it was written is known of runs and checkpoints that kept checksums.
    """
    try:
        problem = damage_of_safetensors(folder / WEIGHTS) or damage_of_file(folder, WEIGHTS)
        kept = _recorded(folder)
        if problem is None and WEIGHTS in kept and checksum(folder / WEIGHTS) != kept[WEIGHTS]:
            problem = f"is damaged: its checksum is not that of {RECORD}"
        if not isinstance(json.loads((folder / SETTINGS).read_text(encoding="utf-8")), dict):
            raise ValueError("no settings")
        if SETTINGS in kept and checksum(folder / SETTINGS) != kept[SETTINGS]:
            return f"{SETTINGS} was changed: its checksum is not that of {RECORD}; take it from a checkpoint"
    except FileNotFoundError as error:
        return f"no {Path(error.filename).name}; only safetensors are loaded"
    except ValueError:
        return f"{SETTINGS} holds no settings in JSON; take it from a checkpoint, or from where the adapter came from"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    return f"{WEIGHTS} {problem}; take it from a checkpoint, or from where the adapter came from" if problem else None


def _recorded(run_dir: Path) -> dict[str, str]:
    """What `record_checksums` has kept; nothing for a checkpoint, or a run from before there were any."""
    try:
        sums = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))["checksums"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, from before there were any, or damaged itself
        return {}
    return sums if isinstance(sums, dict) else {}
