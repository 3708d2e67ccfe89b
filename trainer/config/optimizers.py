"""The optimizers that `training.optimizer` names: their classes, their state, and the settings they need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from trainer.config.errors import Mistake
from trainer.config.sections import RunConfig
from trainer.config.types import AUTO
from trainer.config.zero import engine_stage

SCHEDULE_FREE = "schedule_free_adamw"


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


_ROWS = yaml.safe_load(Path(__file__).with_name("optimizers.yaml").read_text(encoding="utf-8"))
OPTIMIZERS = {name: OptimizerKind(row.pop("class"), **row) for name, row in _ROWS.items()}


def check_optimizer(config: RunConfig) -> Iterator[Mistake]:
    """Yield a mistake for each setting that the optimizer cannot be combined with."""
    zero, training = config.zero, config.training
    name, kind, setting = training.optimizer, OPTIMIZERS[training.optimizer], "training.optimizer"
    if kind.library == "bitsandbytes" and zero.offload_optimizer:
        fix = "turn zero.offload_optimizer off"
        yield Mistake(setting, name, "its state must stay on the GPU", fix, "zero.offload_optimizer")
    if kind.library == "bitsandbytes" and zero.stage == 0 and training.precision in ("bf16", "fp16"):
        yield Mistake(setting, name, "not with zero.stage=0 in 16 bits", "use zero.stage: 1, 2 or 3", "zero.stage")
    if kind.whole and zero.stage != 0:
        stage = "auto" if zero.stage == AUTO else zero.stage
        problem = f"computes with whole matrices, and zero.stage={stage} partitions them"
        yield Mistake(setting, name, problem, "use zero.stage: 0", "zero.stage")
    if kind.whole and (config.adapter == "none" or config.lora.dora):
        switch = "adapter" if config.adapter == "none" else "lora.dora"
        yield Mistake(setting, name, "trains only matrices", "use adamw, or an adapter without DoRA", switch)
    if name == SCHEDULE_FREE:
        yield from _check_schedule_free(config)
    if kind.library != "torch" and find_spec(kind.library) is None:
        yield Mistake(setting, name, f"needs {kind.library}", f"pip install {kind.library}")


def _check_schedule_free(config: RunConfig) -> Iterator[Mistake]:
    zero, training, setting = config.zero, config.training, "training.optimizer"
    if training.lr_scheduler not in ("constant", "constant_with_warmup"):
        problem = f"replaces the schedule, and training.lr_scheduler is {training.lr_scheduler}"
        fix = "use training.lr_scheduler: constant or constant_with_warmup"
        yield Mistake(setting, SCHEDULE_FREE, problem, fix, "training.lr_scheduler")
    if config.scu.enabled:
        problem = "scu measures weights that it does not average"
        yield Mistake(setting, SCHEDULE_FREE, problem, "use adamw, or turn scu.enabled off", "scu.enabled")
    if zero.stage != AUTO and engine_stage(config) == 3:
        problem = "its averaged weights are not available at DeepSpeed's own stage 3"
        yield Mistake(
            setting, SCHEDULE_FREE, problem, "use zero.gather: layer, or a lower stage", "zero.stage zero.gather"
        )
