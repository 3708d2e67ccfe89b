"""The decorator of code that replaces library code."""

from collections.abc import Callable
from typing import Any, TypeVar

Installer = TypeVar("Installer", bound=Callable[..., Any])


def replaces(what: str) -> Callable[[Installer], Installer]:
    """Mark a function or class that replaces `what` of a library; trainer/patches/replacements.yaml has the reason."""
    return lambda installer: installer
