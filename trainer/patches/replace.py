"""Replace attributes on the modules of a model and in their modeling files, and undo it.

The original is stored on the owner, so it shares the owner's lifetime and is copied when PEFT copies a module.
"""

import sys
from typing import Any

from torch import nn

_BEFORE = "_zerolora_before"
_ABSENT = Ellipsis  # an attribute that the owner itself did not have; also in a deep copy of the owner


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, a Python module or an engine; `undo` restores those of a model."""
    own = vars(owner)
    own.setdefault(_BEFORE, []).append((name, own.get(name, _ABSENT)))
    setattr(owner, name, value)


def undo(model: nn.Module) -> int:
    """Undo all replacements on a model in reverse order; return their number.

    Replacements in a modeling file are undone for all models of this process.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    count = 0
    for owner in (*model.modules(), *files):
        notes: list[tuple[str, Any]] = vars(owner).pop(_BEFORE, [])
        count += len(notes)
        for name, before in reversed(notes):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
    return count
