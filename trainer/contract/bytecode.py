"""Cache missing bytecode of large libraries, so that ranks need not compile 3,000 modules on startup."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

LIBRARIES = ("torch", "transformers", "deepspeed")


def find_missing_bytecode() -> list[str]:
    """Return the large libraries that have no bytecode where Python looks for it."""
    return [name for name in LIBRARIES if (file := _find_file(name)) and not os.path.exists(cache_from_source(file))]


def redirect_bytecode() -> None:
    """Cache bytecode in zerolora's cache folder if it is missing and Python cannot write it next to the libraries.

    Python cannot write it if the libraries belong to another user, or if PYTHONDONTWRITEBYTECODE is set, as in
    containers.
    """
    if sys.pycache_prefix is not None or not find_missing_bytecode():
        return
    writable = all(os.access(os.path.dirname(file), os.W_OK) for name in LIBRARIES if (file := _find_file(name)))
    if sys.dont_write_bytecode or not writable:
        cache = Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser()
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache / "bytecode")
        sys.dont_write_bytecode = False


def _find_file(name: str) -> str | None:
    spec = PathFinder.find_spec(name)
    return spec.origin if spec else None
