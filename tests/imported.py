"""What tests of `zerolora import` share."""

import json
from typing import Any

from launcher.importing.translation import Translation


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Return `{"lora.r": 8}` as `{"lora": {"r": 8}}`; a name that leads through something else is left out."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            inner = node.setdefault(section, {})
            node = inner if isinstance(inner, dict) else {}
        node[last] = value
    return tree


def as_tree(translation: Translation) -> dict[str, Any]:
    """Return the settings of a translation as a file has them."""
    tree: dict[str, Any] = json.loads(json.dumps(nest({name: s.value for name, s in translation.settings.items()})))
    return tree
