"""Check the files of a finished adapter, and map its tensors to PEFT's format."""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trainer.checkpoint.checkpoint_files import MARKER, compute_checksum, read_recorded_checksums
from trainer.config import UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.config.files import UnreadableFileError, read_json, read_safetensors_header, read_value
from trainer.contract.whole_files import write_json
from trainer.model.expert_layers import ExpertFactor
from trainer.model.older_names import map_saved_names
from trainer.model.saved_adapter import build_empty_base, load_on_empty_base
from trainer.parallel.engine.adapter_choice import DEFAULT, find_choice

WEIGHTS, SETTINGS, RECORD = "adapter_model.safetensors", SETTINGS_FILE, "run.json"
TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of settings and tokenizer files."""
UNVERIFIED = ("state.json", "README.md")
"""Files that may change after training."""


def record_result(run_dir: Path, names: Iterable[str], identity: dict[str, Any] | None) -> None:
    """Add the result files' checksums and the run's identity to run.json."""
    path = run_dir / RECORD
    checksums = {name: compute_checksum(run_dir / name) for name in names if name not in UNVERIFIED}
    write_json(path, read_json(path) | {"checksums": checksums, "identity": identity})


def describe_adapter_damage(folder: Path) -> str | None:
    """Return why the adapter in a folder cannot be loaded, prefixed with a file name; None if it can be loaded.

    Compares the weights with their recorded checksum if there is one. Raises UserError if the settings are missing.
    """
    if (folder / "state.json").is_file() and not read_recorded_checksums(folder):
        return f"{MARKER} is missing or damaged, so the checkpoint may be incomplete; use another checkpoint"
    try:
        read_safetensors_header(folder / WEIGHTS)
        read_adapter_settings(folder)
        if _has_changed(folder, WEIGHTS, _read_checksums(folder)):
            return f"{WEIGHTS} is damaged: its checksum differs from the recorded one; copy the file from a checkpoint"
        for name, tensor in load_file(folder / WEIGHTS).items():
            if not tensor.is_floating_point():
                return f"{name} is {str(tensor.dtype).removeprefix('torch.')}; use a 16-bit or fp32 adapter"
            if not torch.isfinite(tensor.float()).all():
                return f"{name} contains NaN or infinity; use an earlier checkpoint"
        return None
    except FileNotFoundError:
        return f"{WEIGHTS} is missing; use an adapter in safetensors format"
    except UnreadableFileError as error:
        return f"{error.path.name} {error.problem}; {error.fix}"


def find_changed_files(folder: Path) -> list[str]:
    recorded = _read_checksums(folder)
    texts = [name for name in recorded if name.endswith(TEXT_SUFFIXES) and name not in UNVERIFIED]
    return [name for name in texts if _has_changed(folder, name, recorded)]


def _has_changed(folder: Path, name: str, recorded: dict[str, str]) -> bool:
    try:
        return name in recorded and compute_checksum(folder / name) != recorded[name]
    except FileNotFoundError:
        return True
    except OSError as error:
        raise UnreadableFileError(folder / name, f"cannot be read ({error.strerror})") from None


def _read_checksums(folder: Path) -> dict[str, str]:
    if (folder / RECORD).is_file():
        return read_value(folder / RECORD, "checksums", dict[str, str] | None) or {}
    return read_recorded_checksums(folder)


class NotReloadableError(UserError):
    """Raised if PEFT could not load the saved adapter completely. Retrying or restarting would fail in the same way."""

    exit_code = 1


@dataclass(frozen=True)
class AdapterFormat:
    """Tensor names and settings of an adapter in PEFT's file format."""

    names: Mapping[str, str]
    """Maps names in the file to names in the model."""
    settings: str
    """Content of adapter_config.json."""
    factors: Mapping[str, ExpertFactor]
    """Factors that PEFT stores in a different shape, by name in the model."""
    empty_base: Any
    checked: set[Any] = field(default_factory=set)
    """Combinations of settings, names and shapes that PEFT has already loaded."""

    @classmethod
    def from_model(cls, model: Any, trained: Iterable[str]) -> "AdapterFormat":
        """Return the adapter format of a model.

        Finds the names in the file by having PEFT save an index in place of each tensor, which takes a few tenths of a
        second. Raises UserError for tensors that plain PEFT could not load.
        """
        trained = list(trained)
        adapter = (choice.selected if (choice := find_choice(model)) else None) or DEFAULT
        factors = {f"{path}.weight": part for path, part in model.named_modules() if isinstance(part, ExpertFactor)}
        with tempfile.TemporaryDirectory() as folder:
            end = f".{DEFAULT}.weight"
            peft_names = [
                f"{name.removesuffix(end)}.{adapter}.weight" if name.endswith(end) else name for name in trained
            ]
            numbers = {name: torch.tensor([number]) for number, name in enumerate(peft_names)}
            # PEFT would write a second copy of a grown embedding, under a name that it does not load.
            options = {"selected_adapters": [adapter], "save_embedding_layers": False}
            model.save_pretrained(folder, state_dict=numbers, **options)
            saved_folder = Path(folder) if adapter == DEFAULT else Path(folder, adapter)
            saved = load_file(saved_folder / WEIGHTS)
            stored_names = map_saved_names(model, saved)
            names = {stored_names[name]: trained[int(number)] for name, number in saved.items()}
            settings = (saved_folder / SETTINGS).read_text(encoding="utf-8")
        trained_factors = {name: factors[name] for name in trained if name in factors}
        return cls(names, settings, trained_factors, build_empty_base(model.get_base_model()))

    def check_loadable(self, folder: Path) -> None:
        """Raise NotReloadableError unless plain PEFT can load every tensor of a saved adapter.

        Loads into a base model on the meta device. A combination of settings, names and shapes that PEFT has
        already loaded is not checked again.
        """
        text = (folder / SETTINGS).read_text(encoding="utf-8")
        shapes = {name: tuple(entry.shape) for name, entry in read_safetensors_header(folder / WEIGHTS)[0].items()}
        if (key := (text, frozenset(shapes.items()))) in self.checked:
            return
        try:
            load_on_empty_base(self.empty_base, json.loads(text), shapes)
        except ValueError as error:
            name = folder.name.removeprefix(".writing-")
            problem = f"{name} was not saved: PEFT could not load it: {error}"
            raise NotReloadableError(f"{problem}; older checkpoints are untouched") from error
        self.checked.add(key)

    def build_tensors(self, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        peft = {name: factor.to_peft(trained[name]).contiguous() for name, factor in self.factors.items()}
        return {stored: peft.get(name, trained[name]) for stored, name in self.names.items()}

    def convert_for_unchanged_base(self) -> "AdapterFormat":
        """Return this format with settings for an equivalent adapter on the original base model.

        PiSSA and OLoRA change the base weights: W + dW = (W - s B0 A0) + s B A. The equivalent update of the
        original W is dW = s [B, -B0] [A; A0], with rank 2r and the same scale. PEFT's own conversion loads a second
        adapter into the model, which must not happen during training.
        """
        settings = json.loads(self.settings)
        growth = math.sqrt(2) if settings["use_rslora"] else 2
        settings |= {"r": 2 * settings["r"], "lora_alpha": growth * settings["lora_alpha"], "init_lora_weights": True}
        for name, factor in (("rank_pattern", 2), ("alpha_pattern", growth)):
            settings[name] = {pattern: factor * value for pattern, value in settings[name].items()}
        return replace(self, settings=json.dumps(settings, indent=2, sort_keys=True))


def subtract_initial_adapter(
    trained: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the factors of the update relative to the initial adapter, at twice the rank.

    Concatenates A to [A; A0] and B to [B, -B0], and keeps all other tensors. Load the result with the settings
    from `convert_for_unchanged_base`.
    """
    joined = dict(trained)
    for name, value in trained.items():
        if "lora_A" in name:
            joined[name] = torch.cat([value, initial[name]], dim=0)
        elif "lora_B" in name:
            joined[name] = torch.cat([value, -initial[name]], dim=1)
    return joined
