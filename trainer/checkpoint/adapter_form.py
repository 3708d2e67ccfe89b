"""PEFT's file layout of an adapter, determined once so that a save only writes bytes.

PEFT's `save_pretrained` walks the model, fills a model card and copies tensors under the GIL: tenths of a second for
the 448 factors of an 8B model, during which the training thread waits.
"""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trainer.checkpoint.adapter_files import SETTINGS, WEIGHTS
from trainer.model.expert_layers import ExpertFactor
from trainer.model.older_names import names_in_file
from trainer.parallel.engine.adapter_choice import DEFAULT, find_choice


@dataclass(frozen=True)
class AdapterForm:
    """The stored name of each trained tensor, and the adapter's settings."""

    names: Mapping[str, str]
    """Name in the file -> name in the model."""
    settings: str
    """Content of adapter_config.json."""
    factors: Mapping[str, ExpertFactor]
    """Factors that PEFT stores in another shape, by name in the model."""

    @classmethod
    def from_model(cls, model: Any, trained: Iterable[str]) -> "AdapterForm":
        """Determine the layout by letting PEFT save the model with an index in place of each tensor.

        Takes tenths of a second. Raises UserError for tensors that PEFT alone could not load.
        """
        trained = list(trained)
        adapter = (choice.selected if (choice := find_choice(model)) else None) or DEFAULT
        factors = {f"{path}.weight": part for path, part in model.named_modules() if isinstance(part, ExpertFactor)}
        with tempfile.TemporaryDirectory() as temporary:
            folder = temporary
            end = f".{DEFAULT}.weight"
            own = [f"{name.removesuffix(end)}.{adapter}.weight" if name.endswith(end) else name for name in trained]
            numbers = {name: torch.tensor([number]) for number, name in enumerate(own)}
            model.save_pretrained(folder, state_dict=numbers, selected_adapters=[adapter])
            folder = folder if adapter == DEFAULT else str(Path(folder) / adapter)
            saved = load_file(Path(folder) / WEIGHTS)
            in_file = names_in_file(model, saved)
            names = {in_file[name]: trained[int(number)] for name, number in saved.items()}
            settings = (Path(folder) / SETTINGS).read_text(encoding="utf-8")
        return cls(names, settings, {name: factors[name] for name in trained if name in factors})

    def build_tensors(self, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the trained tensors in PEFT's shapes, by their names in the file."""
        peft = {name: factor.to_peft(trained[name]).contiguous() for name, factor in self.factors.items()}
        return {stored: peft.get(name, trained[name]) for stored, name in self.names.items()}

    def for_unchanged_base(self) -> "AdapterForm":
        """Return the layout of an equivalent adapter for the unchanged base, for PiSSA and OLoRA.

        W + dW = (W - s B0 A0) + s B A, so dW = s [B, -B0] [A; A0]: rank 2r with the same scale. PEFT's own conversion
        loads a second adapter into the model, which must not happen during training.
        """
        settings = json.loads(self.settings)
        growth = math.sqrt(2) if settings["use_rslora"] else 2
        settings |= {"r": 2 * settings["r"], "lora_alpha": growth * settings["lora_alpha"], "init_lora_weights": True}
        return replace(self, settings=json.dumps(settings, indent=2, sort_keys=True))


def stack_difference(now: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of `AdapterForm.for_unchanged_base` from the trained and the initial ones."""
    joined = dict(now)
    for name, value in now.items():
        if "lora_A" in name:
            joined[name] = torch.cat([value, start[name]], dim=0)
        elif "lora_B" in name:
            joined[name] = torch.cat([value, -start[name]], dim=1)
    return joined
