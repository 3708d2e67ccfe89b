"""How PEFT stores the adapter of a model: asked of PEFT once, so that a save has nothing left to do but to write bytes.

PEFT's `save_pretrained` walks the model, fills a model card and copies tensors under Python's global lock: with the 448
factors of an 8B model tenths of a second, in which the thread that trains waits.
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
from trainer.model.expert_factor import ExpertFactor
from trainer.model.older_names import names_in_file


@dataclass(frozen=True)
class AdapterForm:
    """Under which name a file has each trained tensor, and the settings that stand beside it."""

    names: Mapping[str, str]
    """Name in the file -> name in the model."""
    settings: str
    """Of adapter_config.json."""
    factors: Mapping[str, ExpertFactor]
    """By name in the model, those that PEFT has in another shape."""

    @classmethod
    def of(cls, model: Any, trained: Iterable[str]) -> "AdapterForm":
        """Let PEFT save the model with a number in place of each tensor. Takes tenths of a second.

        Raises UserError for tensors that PEFT alone would not find again.
        """
        trained = list(trained)
        factors = {f"{path}.weight": part for path, part in model.named_modules() if isinstance(part, ExpertFactor)}
        with tempfile.TemporaryDirectory() as folder:
            numbers = {name: torch.tensor([number]) for number, name in enumerate(trained)}
            model.save_pretrained(folder, state_dict=numbers)
            saved = load_file(Path(folder) / WEIGHTS)
            in_file = names_in_file(model, saved)
            names = {in_file[name]: trained[int(number)] for name, number in saved.items()}
            settings = (Path(folder) / SETTINGS).read_text(encoding="utf-8")
        return cls(names, settings, {name: factors[name] for name in trained if name in factors})

    def stored(self, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a file has of the trained tensors, by its names."""
        return {stored: self._in_peft_form(name, trained[name]) for stored, name in self.names.items()}

    def _in_peft_form(self, name: str, value: torch.Tensor) -> torch.Tensor:
        factor = self.factors.get(name)
        return value if factor is None else factor.in_peft_form(value).contiguous()

    def as_difference(self) -> "AdapterForm":
        """The settings of an adapter for the unchanged base, where this one's start was taken out of the base.

        W + dW = (W - s B0 A0) + s B A, so dW = s [B, -B0] [A; A0]: rank 2r with the same scale (PEFT's own conversion
        loads a second adapter into the model, which must not happen in the middle of training).
        """
        settings = json.loads(self.settings)
        growth = math.sqrt(2) if settings["use_rslora"] else 2
        settings |= {"r": 2 * settings["r"], "lora_alpha": growth * settings["lora_alpha"], "init_lora_weights": True}
        return replace(self, settings=json.dumps(settings, indent=2, sort_keys=True))


def difference(now: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `AdapterForm.as_difference`, of those that are trained and those that it began with."""
    joined = dict(now)
    for name, value in now.items():
        if "lora_A" in name:
            joined[name] = torch.cat([value, start[name]], dim=0)
        elif "lora_B" in name:
            joined[name] = torch.cat([value, -start[name]], dim=1)
    return joined
