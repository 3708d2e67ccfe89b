"""Installed versions of the libraries that decide a run's numbers."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "diffusers")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None for one that is not installed, such as a mere checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers, as far as they are installed."""
    return {package: found for package in PACKAGES if (found := installed_version(package)) is not None}
