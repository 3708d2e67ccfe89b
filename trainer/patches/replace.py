"""Replace attributes on the modules of a model and in their modeling files, and undo replacements.

The original is stored on the owner, so it shares the owner's lifetime and is copied when PEFT copies a module.
"""

import sys
from typing import Any

from torch import nn

_ORIGINALS = "_zerolora_originals"
_ABSENT = Ellipsis  # marks attributes inherited from the class; unlike object(), a deep copy keeps its identity


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a model's module, a Python module or an engine; `undo` restores a model's attributes."""
    attributes = vars(owner)
    attributes.setdefault(_ORIGINALS, []).append((name, attributes.get(name, _ABSENT)))
    setattr(owner, name, value)


def undo(model: nn.Module) -> int:
    """Undo all replacements on a model in reverse order; return their number.

    Replacements in a modeling file are undone for all models of this process.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    count = 0
    for owner in (*model.modules(), *files):
        originals: list[tuple[str, Any]] = vars(owner).pop(_ORIGINALS, [])
        count += len(originals)
        for name, original in reversed(originals):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
    return count
