"""Register of the library code that zerolora replaces; trainer/patches/register.py prints it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Installer = TypeVar("Installer", bound=Callable[..., Any])


@dataclass(frozen=True)
class Replacement:
    """A function, forward, hook or value of a library that is replaced, or a fault that is worked around."""

    replaces: str
    library: str
    """Package name, as in trainer/contract/known_versions.py."""
    read_in: str
    """Version of the source in which the reason was found."""
    reason: str
    active: str
    """When the replacement is in force."""
    test: str
    """Tests that fail without the replacement, or when the library no longer needs it."""
    upstream: str
    installed_by: str
    """`module: name` of the decorated function or class."""


REPLACEMENTS: list[Replacement] = []


def replaces(
    what: str, *, library: str, read_in: str, why: str, active: str, test: str, upstream: str = "no issue known"
) -> Callable[[Installer], Installer]:
    """Register the decorated function or class as the one that installs a replacement; see `Replacement`."""

    def register(installer: Installer) -> Installer:
        place = f"{installer.__module__}: {installer.__qualname__}"
        REPLACEMENTS.append(Replacement(what, library, read_in, why, active, test, upstream, place))
        return installer

    return register
