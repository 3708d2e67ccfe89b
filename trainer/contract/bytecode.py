"""Where Python keeps the bytecode of the libraries, without which every rank compiles 3,000 modules at its start."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

LIBRARIES = ("torch", "transformers", "deepspeed")


def missing_bytecode() -> list[str]:
    """Return which of the large libraries have no bytecode where this process looks for it."""
    return [name for name in LIBRARIES if (file := _file_of(name)) and not os.path.exists(cache_from_source(file))]


def use_own_folder() -> None:
    """Keep bytecode in zerolora's cache if it is missing and cannot be kept next to the libraries.

    That is so where they belong to another user, or PYTHONDONTWRITEBYTECODE is set, as in containers.
    """
    if sys.pycache_prefix is not None or not missing_bytecode():
        return
    writable = all(os.access(os.path.dirname(file), os.W_OK) for name in LIBRARIES if (file := _file_of(name)))
    if sys.dont_write_bytecode or not writable:
        cache = Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser()
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache / "bytecode")
        sys.dont_write_bytecode = False


def _file_of(name: str) -> str | None:
    spec = PathFinder.find_spec(name)
    return spec.origin if spec else None
