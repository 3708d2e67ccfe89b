"""Per-expert adapter factors, and their conversion to PEFT's format. Legend: trainer/model/expert_adapter.py."""

from typing import Any

from torch import Tensor, nn


class ExpertFactor(nn.Module):
    """One factor of all experts, A [E, R, I] or B [E, O, R]."""

    def __init__(self, weight: Tensor, experts: int, *, down: bool) -> None:
        """Convert PEFT's matrix; `down` marks A, which projects down to the rank."""
        super().__init__()
        self.down, self.experts = down, experts
        self.weight = nn.Parameter(self.from_peft_form(weight).contiguous())
        self.register_load_state_dict_pre_hook(self._from_file)

    def in_peft_form(self, weight: Tensor) -> Tensor:
        """Return the factor in PEFT's shape: A [E R, I], B [O, R E]."""
        if self.down:
            return weight.flatten(0, 1)
        return weight.permute(1, 2, 0).flatten(1)

    def from_peft_form(self, weight: Tensor) -> Tensor:
        """Undo `in_peft_form`."""
        if self.down:
            return weight.unflatten(0, (self.experts, -1))
        return weight.unflatten(1, (-1, self.experts)).permute(2, 0, 1)

    def _from_file(self, module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        name = f"{prefix}weight"
        if name in state and state[name].dim() == 2:
            state[name] = self.from_peft_form(state[name])
