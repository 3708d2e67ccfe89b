"""What goes wrong on purpose in a rank of a test that puts this folder on PYTHONPATH.

ZEROLORA_MISCHIEF=RANK:KIND[@PHASE]:CALLS: the rank with that number misbehaves in the CALLS-th call of a function, a
slow one from then on, and of a SLURM job in its first start only. Without a number it is every process of the run that
is no rank. With ZEROLORA_MISCHIEF_ONCE, the path of a file that this makes, it happens in one process only: what is
started again finds the file and behaves. Several, with `;` between them, have a file each, with their number behind its
name.
"""

import functools
import os
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Where each kind sits: the module that is changed once it has been imported, and its function.
PLACES = {
    "hang": ("trainer.step", "sum_over_ranks"),
    "raise": ("trainer.step", "sum_over_ranks"),
    "kill": ("trainer.step", "sum_over_ranks"),
    "lose": ("trainer.step", "sum_over_ranks"),
    "eat": ("trainer.step", "sum_over_ranks"),
    "spin": ("trainer.step", "sum_over_ranks"),
    "late numbers": ("trainer.step", "StepInFlight"),
    "slow step": ("trainer.step", "sum_over_ranks"),
    "slow layer": ("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb"),
    "slow load": ("trainer.setup.build", "Builder.build_model"),
    "slow save": ("trainer.checkpoint.checkpoint", "write_tensors"),
    "dead save": ("trainer.checkpoint.checkpoint", "write_tensors"),
    "dead tokenise": ("trainer.data.cache", "encode_source"),
    "dead load": ("trainer.setup.build", "Builder.build_model"),
    "dead evaluate": ("trainer.evaluation", "evaluate_loss"),
}
# Where the kinds without a place of their own happen, `kill@load`.
PHASES = {
    "begin": ("trainer.parallel.ranks.watchdog", "Watchdog"),
    "tokenise": ("trainer.data.cache", "encode_source"),
    "load": ("trainer.setup.build", "Builder.build_model"),
    "data": ("trainer.data.batches", "collate_samples"),
    "step": ("trainer.step", "sum_over_ranks"),
    "loss": ("trainer.patches.loss_head", "TokenLoss.__call__"),
    "evaluate": ("trainer.evaluation", "evaluate_loss"),
    "save": ("trainer.checkpoint.checkpoint", "write_tensors"),
    "end": ("trainer.checkpoint.run_folder", "move_result_into_place"),
}
HEARD_S = 300.0
SLOW_S = {"slow load": 8.0, "slow save": 25.0}
SETTLED_S = 2.0  # a checkpoint that is being written is whole by then
SLOW_CALL_S = {"slow step": 0.25, "slow layer": 0.01}  # of every call; of the first there are two a step


class Mischief:
    """One thing that goes wrong."""

    def __init__(self, text: str, once: str) -> None:
        self.rank, kind, calls = text.split(":")
        self.kind, _, phase = kind.partition("@")
        self.once, self.in_call, self.calls = once, int(calls), 0
        self.spoils = False
        assert self.kind != "nan" or phase == "loss", f"{text}: a loss alone can be made NaN: nan@loss"
        self.place = PHASES.get(phase) or PLACES.get(self.kind, ("", ""))

    def call(self) -> None:
        """Of the function in its place."""
        self.calls += 1
        if self.calls == self.in_call or (self.kind in SLOW_CALL_S and self.calls > self.in_call):
            self._misbehave()

    def _misbehave(self) -> None:
        if self.once:
            if os.path.exists(self.once):
                return
            with open(self.once, "x") as file:
                file.write(f"{time.time()} {os.getpid()}")
        kind = self.kind
        if kind in SLOW_CALL_S:
            time.sleep(SLOW_CALL_S[kind] if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0.0)
            return
        if kind in ("kill", "lose"):
            time.sleep(SETTLED_S)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if kind == "nan":
            self.spoils = True
            return
        if self.once and kind in ("call", "eat"):  # the test acts now, and signals when it is done
            started = time.monotonic()
            while not os.path.exists(f"{self.once}.done") and time.monotonic() - started < HEARD_S:
                time.sleep(0.05)
        if kind == "call":
            return
        if kind == "raise":
            raise ValueError("the middle of the model is missing")
        misbehave(kind)


def misbehave(kind: str) -> None:
    if kind == "spin":
        import torch

        torch.cuda._sleep(2**50)  # a kernel of some days, before which nothing else on this stream runs
        return
    if kind == "exhaust":
        import torch

        card, taken = f"cuda:{os.environ['LOCAL_RANK']}", []
        while True:  # until the allocator raises what it raises in any pass
            taken.append(torch.empty(2**28, dtype=torch.uint8, device=card))
    if kind == "eat":
        eaten = bytearray(0)
        while True:
            eaten += b"x" * 2**24
    started = time.monotonic()
    while kind not in SLOW_S or time.monotonic() - started < SLOW_S[kind]:
        time.sleep(0.2)
        if kind == "slow save":
            sum(range(300_000))  # as a real one compresses, copies and writes


def wrap(module: Any, mischief: Mischief) -> None:
    if mischief.kind == "late numbers":  # read in the step after theirs, as those of a device
        module.StepInFlight.on_device = property(lambda self: True)
        return
    *path, name = mischief.place[1].split(".")
    owner = functools.reduce(getattr, path, module)
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        mischief.call()
        result = original(*arguments, **options)
        if mischief.spoils:
            mischief.spoils, result = False, result * float("nan")
        return result

    setattr(owner, name, wrapped)


class Finder:
    """Lets the usual finders find the modules, and changes each when it has been executed."""

    def __init__(self, mischiefs: list[Mischief]) -> None:
        self._of: dict[str, list[Mischief]] = {}
        for mischief in mischiefs:
            self._of.setdefault(mischief.place[0], []).append(mischief)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        mischiefs = self._of.pop(name, None)
        if mischiefs is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for mischief in mischiefs:
                wrap(module, mischief)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def begin() -> None:
    """Let what is asked for happen, as far as it is this process's."""
    texts = [text for text in os.environ.get("ZEROLORA_MISCHIEF", "").split(";") if text]
    once = os.environ.get("ZEROLORA_MISCHIEF_ONCE", "")
    files = [f"{once}.{number}" if once and len(texts) > 1 else once for number in range(len(texts))]
    mischiefs = [Mischief(text, file) for text, file in zip(texts, files, strict=True)]
    places = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    own = next((os.environ[name] for name in places if name in os.environ), "")
    mine = [mischief for mischief in mischiefs if mischief.rank == own and mischief.kind]
    for mischief in mine:
        if mischief.kind == "lose" and os.path.exists(mischief.once) and os.environ.get("RANK"):
            os.kill(os.getpid(), signal.SIGKILL)  # its GPU has been missing since the first time
    if mine:
        sys.meta_path.insert(0, Finder(mine))  # type: ignore[arg-type]


begin()
