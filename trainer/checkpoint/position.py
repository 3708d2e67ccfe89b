"""The position of a run in its data and evaluations."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Position:
    """The position of a run, saved in every checkpoint."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    """Samples of the epoch already used, over all ranks."""
    tokens: int = 0
    target_tokens: int = 0
    last_evaluation: float | None = None
    evaluated_at: int = -1
    """Step of the last evaluation."""
    best_loss: float = math.inf
    best_step: int = 0
    worse_in_a_row: int = 0
    nonfinite_in_a_row: int = 0
    nonfinite_steps: int = 0
    """Steps that changed no weight, or had a non-finite loss."""
    spikes: int = 0
    latest_losses: list[float] = field(default_factory=list)
    """Losses of the last steps, which the next loss is compared with; this and `spikes` are kept on rank 0 only."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON, with None for infinity and NaN."""
        losses = {"best_loss": self.best_loss, "last_evaluation": self.last_evaluation}
        known = {name: loss if loss is not None and math.isfinite(loss) else None for name, loss in losses.items()}
        return asdict(self) | known

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Position":
        """Undo `to_dict`; unknown keys are ignored."""
        known = {key: state[key] for key in cls.__dataclass_fields__ if key in state}
        if known.get("best_loss") is None:
            known["best_loss"] = math.inf
        return cls(**known)
