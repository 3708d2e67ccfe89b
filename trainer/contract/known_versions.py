"""Warn about library versions with which the private APIs used here are untested.

Private APIs may change within the version ranges in pyproject.toml. A run with untested versions warns
once. A missing private API is an error (`require`), so no feature is disabled silently. `replaces` marks
code that replaces library code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from trainer.config.errors import UserError

Replacement = TypeVar("Replacement", bound=Callable[..., Any])
PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "diffusers")
"""Libraries that affect a run's results."""


TESTED_VERSIONS = {
    "torch": ("2.11.0", "2.13.0"),
    "deepspeed": ("0.19.8",),
    "transformers": ("5.17.0", "5.23.0"),
    "peft": ("0.21.2",),
    "bitsandbytes": ("0.50.2",),
    "diffusers": ("0.42.1",),
    "datasets": ("5.2.0",),
    "torchao": ("0.18.0",),
    "lm_eval": ("0.4.13",),
    "compressed-tensors": ("0.20.0",),
}
"""Tested versions of each library from which we use private APIs, newest last."""


def get_release(library: str) -> str | None:
    """Return the installed version without its build suffix (2.13.0 for 2.13.0+cpu); None if it is not installed."""
    release = get_installed_version(library)
    return release and release.partition("+")[0]


def describe_untested() -> list[str]:
    """Describe each library with an untested version, such as `transformers 5.24.0 (tested: 5.17.0, 5.23.0)`."""
    return [
        f"{library} {release} (tested: {', '.join(tested)})"
        for library, tested in TESTED_VERSIONS.items()
        if (release := get_release(library)) is not None and release not in tested
    ]


def build_version_warning() -> str | None:
    lines = describe_untested()
    return f"not tested with {'; '.join(lines)}; install the versions in constraints.txt" if lines else None


def build_api_error(library: str, problem: str) -> UserError:
    release, tested = get_release(library), TESTED_VERSIONS[library][-1]
    fix = f"install {library}=={tested}, the tested version"
    if release == tested:  # caused by this model or setting
        fix = "report this with the configuration of the run"
    return UserError(f"{library} {release}: {problem}, but zerolora needs it; {fix}")


def require(owner: object, name: str, library: str) -> Any:
    """Return the private `owner.name` of `library`. Raises UserError if that name does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise build_api_error(library, f"{kind} has no `{name}`") from None


def replaces(replaced: str) -> Callable[[Replacement], Replacement]:
    """Mark a replacement for the library code `replaced`. trainer/patches/replacements.yaml gives the reason."""
    return lambda installer: installer


@contextmanager
def patch_attribute(owner: object, name: str, value: Any, library: str) -> Iterator[None]:
    """Set `owner.name` of `library` to `value` within the block. Raises UserError if that name does not exist."""
    before = require(owner, name, library)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def patch_objects(*changes: tuple[object, str, Any]) -> Iterator[None]:
    """Set attributes (owner, name, value) of objects within the block, shadowing methods and parameters."""
    before = [vars(owner).get(name) for owner, name, _ in changes]
    for owner, name, value in changes:
        vars(owner)[name] = value
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            if value is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value


def get_installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run's results."""
    return {package: release for package in PACKAGES if (release := get_installed_version(package)) is not None}
