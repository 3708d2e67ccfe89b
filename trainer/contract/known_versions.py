"""The libraries on whose insides zerolora relies, and the versions with which every such use has been tested.

Private names change without notice within the ranges of pyproject.toml. A run on another version is warned once; a
private name that is gone is one line (`require`), and never passes as a feature that is switched off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.config.errors import UserError
from trainer.contract.versions import installed_version


@dataclass(frozen=True)
class Reliance:
    """One library: its tested versions, newest last, and what is taken from its insides."""

    tested: tuple[str, ...]
    inside: str


KNOWN = {
    "torch": Reliance(
        ("2.11.0", "2.13.0"),
        "clipping within its fused AdamW, freed storage, time limits, flash attention's operators",
    ),
    "deepspeed": Reliance(("0.19.8",), "gradient norms, loss scale, partitions, reduction after running out of memory"),
    "transformers": Reliance(("5.17.0", "5.23.0"), "attention of packs, recomputation, loading piece by piece"),
    "peft": Reliance(("0.21.2",), "forward of adapted layers"),
    "bitsandbytes": Reliance(("0.50.2",), "4-bit weights, 8-bit moments"),
    "diffusers": Reliance(("0.42.1",), "packed latents of samples, a mark on models in 4 bits"),
    "datasets": Reliance(("5.2.0",), "fingerprints of data from the hub"),
    "torchao": Reliance(("0.18.0",), "rounding of weights (training.qat)"),
    "compressed-tensors": Reliance(("0.20.0",), "packing of rounded weights for servers"),
}


def installed(library: str) -> str | None:
    """Return the installed version without what names a build (2.13.0 of 2.13.0+cpu); None if it is not installed."""
    found = installed_version(library)
    return found and found.partition("+")[0]


def unproven() -> list[str]:
    """`transformers 5.24.0 (tested: 5.17.0, 5.23.0; unproven: ...)` for each library of an untested version."""
    found = {library: installed(library) for library in KNOWN}
    return [
        f"{library} {found[library]} (tested: {', '.join(reliance.tested)}; unproven: {reliance.inside})"
        for library, reliance in KNOWN.items()
        if found[library] is not None and found[library] not in reliance.tested
    ]


def warning() -> str | None:
    """One line for the start of a run, or None where every version is a tested one."""
    lines = unproven()
    return f"not tested with {'; '.join(lines)}; constraints.txt has tested versions" if lines else None


def changed(library: str, what: str) -> UserError:
    """Return the error for private code of a library that differs from what zerolora relies on."""
    found, tested = installed(library), KNOWN[library].tested[-1]
    fix = f"install {library}=={tested}, with which it was tested"
    if found == tested:  # so it is this model or setting
        fix = "report it with the configuration of the run"
    return UserError(f"{library} {found}: {what}, on which zerolora relies; {fix}")


def require(owner: object, name: str, library: str) -> Any:
    """`owner.name`, which `library` promises to nobody; UserError where it is gone."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise changed(library, f"{kind} has no `{name}`") from None


@contextmanager
def replaced(owner: object, name: str, value: Any, library: str) -> Iterator[None]:
    """`owner.name` of `library` is `value` within the block; UserError where there is no such name."""
    before = require(owner, name, library)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
