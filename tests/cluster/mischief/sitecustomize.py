"""What goes wrong on purpose in a rank of a test that puts this folder on PYTHONPATH.

ZEROLORA_MISCHIEF=RANK:KIND[@PHASE]:CALLS: the rank with that number misbehaves in the CALLS-th call of a function, a
slow one from then on. Without a number it is every process of the run that is no rank. With ZEROLORA_MISCHIEF_ONCE, the
path of a file that this makes, it happens in one process only: what is started again finds the file and behaves.
"""

import os
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ONCE = os.environ.get("ZEROLORA_MISCHIEF_ONCE", "")
RANK, KIND, CALLS = os.environ.get("ZEROLORA_MISCHIEF", "::0").split(":")
KIND, _, PHASE = KIND.partition("@")
# Where each kind sits: the module that is changed once it has been imported, and its function.
PLACES = {
    "hang": ("trainer.step", "sum_over_ranks"),
    "raise": ("trainer.step", "sum_over_ranks"),
    "kill": ("trainer.step", "sum_over_ranks"),
    "lose": ("trainer.step", "sum_over_ranks"),
    "eat": ("trainer.step", "sum_over_ranks"),
    "spin": ("trainer.step", "sum_over_ranks"),
    "slow step": ("trainer.step", "sum_over_ranks"),
    "slow load": ("trainer.run", "build_model"),
    "slow save": ("trainer.checkpoint.checkpoint", "write_tensors"),
    "dead save": ("trainer.checkpoint.checkpoint", "write_tensors"),
    "dead tokenise": ("trainer.data.cache", "encode_source"),
    "dead load": ("trainer.run", "build_model"),
    "dead evaluate": ("trainer.evaluation", "evaluate_loss"),
}
# Where the kinds without a place of their own happen, `kill@load`.
PHASES = {
    "tokenise": ("trainer.data.cache", "encode_source"),
    "load": ("trainer.run", "build_model"),
    "data": ("trainer.data.batches", "collate"),
    "step": ("trainer.step", "sum_over_ranks"),
    "evaluate": ("trainer.evaluation", "evaluate_loss"),
    "save": ("trainer.checkpoint.checkpoint", "write_tensors"),
    "end": ("trainer.run_folder", "place_result"),
}
PLACE = PHASES.get(PHASE) or PLACES.get(KIND, ("", ""))
HEARD_S = 120.0
SLOW_S = 25.0
SETTLED_S = 2.0  # a checkpoint that is being written is whole by then
SLOW_CALL_S = 0.25  # two of them a step


def misbehave(arguments: tuple[Any, ...]) -> None:
    if ONCE:
        if os.path.exists(ONCE):
            return
        with open(ONCE, "x") as file:
            file.write(f"{time.time()} {os.getpid()}")
    if KIND == "slow step":
        time.sleep(SLOW_CALL_S)
        return
    if KIND in ("kill", "lose"):
        time.sleep(SETTLED_S)
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if KIND == "nan":
        arguments[0].fill_(float("nan"))
        return
    if ONCE and KIND in ("call", "eat"):  # somebody outside does something now, and says when it is done
        started = time.monotonic()
        while not os.path.exists(f"{ONCE}.done") and time.monotonic() - started < HEARD_S:
            time.sleep(0.05)
    if KIND == "call":
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
            misbehave(arguments)
        return original(*arguments, **options)

    setattr(module, name, wrapped)


class Finder:
    """Lets the usual finders find the module, and changes it when it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != PLACE[0]:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            wrap(module, PLACE[1])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if KIND == "lose" and os.path.exists(ONCE) and os.environ.get("RANK") == RANK:
    os.kill(os.getpid(), signal.SIGKILL)  # its card is gone since the first time
if KIND and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "")) == RANK:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
