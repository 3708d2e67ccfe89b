"""What the parts of a rank's start are spent on, into the file `profile`: modules imported, functions called.

`python -m tests.bench.start --functions` lets ranks import this before anything else. Profiling slows down
the measured code.
"""

import _frozen_importlib  # where the import statement finds its functions
import cProfile
import io
import pstats
import time
from types import ModuleType
from typing import Any, cast

from trainer.parallel.ranks.progress import Progress

LEAST_S = 0.1
FUNCTIONS = 40

_modules: list[tuple[str, int, str, float]] = []
_functions: dict[str, cProfile.Profile] = {}
_depth = 0
_part = "imports"


def _load(spec: Any) -> ModuleType:
    """Import one module; its line is before those of what it imports."""
    global _depth
    at, began = len(_modules), time.thread_time()
    _modules.append(("", 0, "", 0.0))
    _depth += 1
    try:
        module: ModuleType = _plain_load(spec)
        return module
    finally:
        _depth -= 1
        _modules[at] = (_part, _depth, spec.name, time.thread_time() - began)


def _change(progress: Progress, phases: tuple[str, ...]) -> None:
    global _part
    if _part in _functions:
        _functions[_part].disable()
    _plain_change(progress, phases)
    _part = "/".join(phases) or "other"
    _functions.setdefault(_part, cProfile.Profile()).enable()


def _end(progress: Progress) -> dict[str, float] | None:
    parts = _plain_end(progress)
    if parts is None:
        return None
    if _part in _functions:
        _functions[_part].disable()
    with open("profile", "w") as file:
        print(*parts.items(), "", "imported (processor seconds)", sep="\n", file=file)
        for part, depth, name, seconds in _modules:
            if seconds >= LEAST_S:
                print(f"{seconds:6.2f}  {part:<24}{'  ' * depth}{name}", file=file)
        for part, profile in _functions.items():
            text = io.StringIO()
            stats: Any = pstats.Stats(profile, stream=text)
            if stats.total_tt >= LEAST_S:
                stats.sort_stats("cumulative").print_stats(FUNCTIONS)
                print(f"\n== {part}", text.getvalue(), file=file)
    return parts


_imports, _progress = cast(Any, _frozen_importlib), cast(Any, Progress)
_plain_load, _plain_change, _plain_end = _imports._load_unlocked, Progress._set_phases, Progress.take_startup_times
_imports._load_unlocked, _progress._set_phases, _progress.take_startup_times = _load, _change, _end
