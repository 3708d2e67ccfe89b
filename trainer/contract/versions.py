"""Installed versions of the libraries that decide a run's numbers."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "diffusers")


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide a run's numbers."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
