"""Replacements on the modules of a model and in the files of their classes, and their opposite.

What was there is noted where it was replaced, so that it ends with its owner and follows it when PEFT copies a module.
"""

import sys
from typing import Any

from torch import nn

_BEFORE = "_zerolora_before"


class _Absent:
    """Stands for: the owner had no such attribute of its own."""


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, a Python module or an engine; `undo` and `undo_on` put back what was there."""
    own = vars(owner)
    own.setdefault(_BEFORE, []).append((name, own.get(name, _Absent)))
    setattr(owner, name, value)


def undo(model: nn.Module) -> int:
    """Put everything back that was replaced on a model, last first; how much that was.

    What was replaced in a modeling file is put back for all models of this process.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    return sum(undo_on(owner) for owner in (*model.modules(), *files))


def undo_on(owner: Any) -> int:
    """The same for one owner alone."""
    notes: list[tuple[str, Any]] = vars(owner).pop(_BEFORE, [])
    for name, before in reversed(notes):
        if before is _Absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    return len(notes)
