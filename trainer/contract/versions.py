"""Installed versions of the libraries that affect a run's results."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "diffusers")


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed, such as a mere checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run's results."""
    return {package: found for package in PACKAGES if (found := installed_version(package)) is not None}
