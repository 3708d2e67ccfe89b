"""The optimizers that `training.optimizer` names: their classes, their state, and the settings they need."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.aliases import read_table


@dataclass(frozen=True)
class OptimizerKind:
    """One row of optimizers.yaml."""

    path: str
    state: Sequence[str]
    bits: int = 32
    whole: bool = False
    takes: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """The package that has the class."""
        return self.path.partition(".")[0]


OPTIMIZERS = {
    name: OptimizerKind(row.pop("class"), **row)
    for name, row in read_table(Path(__file__).with_suffix(".yaml")).items()
}
