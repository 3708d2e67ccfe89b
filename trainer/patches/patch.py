"""One entry of the list of what is replaced in libraries (trainer/patches/register.py)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One replaced function, forward, hook or value, or one fault of a library that is answered in another way."""

    replaces: str
    """What of the library, in words."""
    library: str
    """Its name among the packages, as in trainer/contract/known_versions.py."""
    read_in: str
    """The version in whose source the reason was read."""
    reason: str
    active: str
    """When it is in force."""
    installed_by: str
    """The function that puts it there, `path: name`."""
    undone: str
    """How what was there comes back, or with what it ends."""
    test: str
    """The test that fails when it is missing, or when the library no longer needs it."""
    places: tuple[str, ...] = ()
    """`path: attribute` of every assignment or registration on an object of the library."""
    upstream: str = "no issue known"
