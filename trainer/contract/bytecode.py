"""Bytecode of the libraries that every rank imports: compile it once per environment, on all cores.

Without bytecode, as in a fresh container or on a node with an unpacked environment, a rank compiles 3,000 modules one
after the other, which takes longer than everything else before its first step. `python -m trainer.contract.bytecode`
compiles them now, for images.
"""

import dis
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType

from trainer.contract.launcher_process import LauncherWatch, tie_children_to_this_process

PROBES = ("torch.nn.modules.module", "transformers.modeling_utils", "deepspeed.runtime.engine")
ROOTS = (*PROBES, "transformers.modeling_layers", "transformers.models.auto.modeling_auto", "deepspeed", "peft")
OWN = ("trainer.train", "trainer.entry.prestart")
LARGE = {"accelerate", "bitsandbytes", "datasets", "huggingface_hub", "mpmath", "numpy", "pyarrow", "sympy"}
WANTED = {name.partition(".")[0] for name in (*ROOTS, *OWN)} | {"launcher", "ops"} | LARGE
"""Packages that are compiled, and Python's own library: what training imports of others is small."""
MODELS, USED_MODELS = "transformers.models.", "transformers.models.auto"
MAX_WORKERS, BEHIND_RANKS = 16, 10
IN_BACKGROUND: list["subprocess.Popen[bytes]"] = []


def missing_bytecode() -> list[str]:
    """Return which of the large libraries have no bytecode where this process looks for it."""
    return [
        name.partition(".")[0]
        for name in PROBES
        if (spec := _find(name)) and spec.origin and not os.path.exists(cache_from_source(spec.origin))
    ]


def cache_folder() -> Path:
    """Return the folder for bytecode that cannot be kept next to the libraries."""
    return Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser() / "bytecode"


def use_bytecode(*, compiles: bool) -> None:
    """If libraries have no bytecode, use that of the cache folder, and compile in the background what it lacks.

    Next to the libraries it is written only if they belong to this user and PYTHONDONTWRITEBYTECODE is not set. Of the
    processes of a host only one should `compiles`.
    """
    if not missing_bytecode():
        return
    spec = _find("torch")
    writable = spec is not None and spec.origin is not None and os.access(os.path.dirname(spec.origin), os.W_OK)
    if sys.pycache_prefix is None and (sys.dont_write_bytecode or not writable):
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache_folder())
    if compiles and missing_bytecode():
        command = [sys.executable, "-m", "trainer.contract.bytecode"]
        null = subprocess.DEVNULL
        IN_BACKGROUND.append(subprocess.Popen(command, stdin=null, stdout=null, stderr=null))


def compile_imports(workers: int) -> int:
    """Compile what ranks import, found by following imports from `ROOTS` and `OWN`; return the number of modules."""
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

    sys.dont_write_bytecode = False
    tie_children_to_this_process()
    seen: set[str] = set()
    with ProcessPoolExecutor(workers, initializer=end_with_launcher) as pool:

        def submit(names: Iterator[str]) -> Iterator["Future[list[str]]"]:
            for name in names:
                if name in seen or not _is_wanted(name):
                    continue
                seen.add(name)
                if (spec := _find(name)) is not None and isinstance(spec.loader, SourceFileLoader):
                    yield pool.submit(_compile, name, spec.loader.path)

        running, done = set(submit(_with_parents([*ROOTS, *OWN]))), 0
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done += 1
                running |= set(submit(_with_parents(future.result())))
    return done


def end_with_launcher() -> None:
    """End this process when the one that started it has ended."""
    LauncherWatch(os.environ, is_rank=False).start()


def _is_wanted(name: str) -> bool:
    top = name.partition(".")[0]
    return (top in WANTED or top in sys.stdlib_module_names) and (
        not name.startswith(MODELS) or name.startswith(USED_MODELS)
    )


def _with_parents(names: list[str]) -> Iterator[str]:
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


@cache
def _find(name: str) -> ModuleSpec | None:
    """Find a module without importing its parents."""
    parent = name.rpartition(".")[0]
    if not parent:
        return PathFinder.find_spec(name)
    found = _find(parent)
    where = found.submodule_search_locations if found is not None else None
    return PathFinder.find_spec(name, where) if where else None


def _compile(name: str, path: str) -> list[str]:
    """Compile a module unless its bytecode is up to date; return the names that it may import."""
    try:
        code = SourceFileLoader(name, path).get_code(name)
    except (SyntaxError, OSError, ValueError):  # such as a template, or a file for another version of Python
        return []
    package = name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]
    return [] if code is None else list(_imports(code, package, nested=name.startswith("trainer.")))


def _imports(code: CodeType, package: str, *, nested: bool) -> Iterator[str]:
    """Yield what a module imports when it is executed, and if `nested` also when its functions are called."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            parent = package.split(".")[: len(package.split(".")) + 1 - level.argval] if level.argval else []
            base = ".".join([*parent, *filter(None, [step.argval])])
            yield base
            yield from (f"{base}.{name}" for name in names.argval or ())
    for constant in code.co_consts if nested else ():
        if isinstance(constant, CodeType):
            yield from _imports(constant, package, nested=True)


if __name__ == "__main__":
    os.nice(BEHIND_RANKS)
    end_with_launcher()
    cores = len(os.sched_getaffinity(0)) - int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    print(f"compiled {compile_imports(max(1, min(cores, MAX_WORKERS))):,} modules")
