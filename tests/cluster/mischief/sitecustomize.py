"""What goes wrong on purpose in a rank of a test that puts this folder on PYTHONPATH.

ZEROLORA_MISCHIEF=RANK:KIND:CALLS: the rank with that number misbehaves in the CALLS-th call of a function, a slow one
from then on. Without a number it is every process of the run that is no rank.
"""

import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RANK, KIND, CALLS = os.environ.get("ZEROLORA_MISCHIEF", "::0").split(":")
# Where each kind sits: the module that is changed once it has been imported, and its function.
PLACES = {
    "hang": ("trainer.step", "sum_over_ranks"),
    "raise": ("trainer.step", "sum_over_ranks"),
    "eat": ("trainer.step", "sum_over_ranks"),
    "spin": ("trainer.step", "sum_over_ranks"),
    "slow step": ("trainer.step", "sum_over_ranks"),
    "slow load": ("trainer.run", "build_model"),
    "slow save": ("trainer.checkpoint.checkpoint", "save_file"),
    "dead save": ("trainer.checkpoint.checkpoint", "save_file"),
    "dead tokenise": ("trainer.data.cache", "encode_source"),
    "dead load": ("trainer.run", "build_model"),
    "dead evaluate": ("trainer.run", "evaluate_loss"),
}
SLOW_S = 25.0
SLOW_CALL_S = 0.25  # two of them a step


def misbehave() -> None:
    if KIND == "slow step":
        time.sleep(SLOW_CALL_S)
        return
    if KIND == "raise":
        raise ValueError("the middle of the model is missing")
    if KIND == "spin":
        import torch

        torch.cuda._sleep(2**50)  # a kernel of some days, before which nothing else on this stream runs
        return
    if KIND == "eat":
        eaten = bytearray(0)
        while True:
            eaten += b"x" * 2**24
    started = time.monotonic()
    while KIND not in ("slow save", "slow load") or time.monotonic() - started < SLOW_S:
        time.sleep(0.2)
        if KIND == "slow save":
            sum(range(300_000))  # as a real one compresses, copies and writes


def wrap(module: Any, name: str) -> None:
    original, calls = getattr(module, name), 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(CALLS) or (KIND == "slow step" and calls > int(CALLS)):
            misbehave()
        return original(*arguments, **options)

    setattr(module, name, wrapped)


class Finder:
    """Lets the usual finders find the module, and changes it when it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != PLACES[KIND][0]:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            wrap(module, PLACES[KIND][1])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if KIND and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "")) == RANK:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
