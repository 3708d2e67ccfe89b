"""Subtract waits for all-gathers in forward passes (ZeRO-3) from the time by which slow ranks are found."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from trainer.contract.known_versions import require
from trainer.contract.replacements import replaces
from trainer.parallel.engine.layer_gather.shards import find_layer_shards
from trainer.parallel.engine.layer_gather.unit import Waiting
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.stragglers import StragglerWatch


@replaces("the parameter fetch of stage 3, to time it")
def watch_stragglers(engine: Engine, ranks: Ranks, say: Callable[[str], None]) -> StragglerWatch | None:
    """Return a StragglerWatch that subtracts waits for gathers; None on a single rank. Every rank must call it."""
    if ranks.world_size == 1:
        return None
    watch = StragglerWatch(ranks, engine.device, say)
    shards = find_layer_shards(engine.module)
    if shards is not None:
        shards.time_waits(watch.waiting)
    elif engine.zero_optimization_stage() == 3:
        _time_fetches(engine, watch.waiting)
    return watch


def _time_fetches(engine: Engine, waiting: Waiting) -> None:
    """Time the fetches of DeepSpeed's own stage 3, during which the compute stream only waits.

    Read in DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`): gathers and the
    copies out of their buffers run on a separate stream.
    """
    offload = require(engine.optimizer, "parameter_offload", "deepspeed")
    coordinator = require(offload, "get_param_coordinator", "deepspeed")()
    fetch = require(coordinator, "fetch_sub_module", "deepspeed")

    @wraps(fetch)
    def timed(*arguments: Any, **options: Any) -> Any:
        with waiting():
            return fetch(*arguments, **options)

    coordinator.fetch_sub_module = timed
