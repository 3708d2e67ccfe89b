"""What a machine needs to train, and what of it is there; found without importing torch."""

import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from trainer.contract.home import HOME

PROJECT = HOME / "pyproject.toml"
GIB = 2**30
FREE_GIB = 10.0
SMI_TIMEOUT_S = 60.0
# Faster kernels for the Mamba layers of Granite 4.0 H; transformers has its own where they are missing.
MAMBA = ("mamba-ssm", "causal-conv1d")


def check_requirements(output_dir: str, model: str) -> int:
    """Print a line for everything that is needed or helps; 0 if all that is needed is there, else 1."""
    missing = 0
    machine = [_python(), *package_findings(), *gpu_findings(), _nvcc()]
    for needed, name, found in [*machine, _disk(Path(output_dir)), _model(model)]:
        word = "ok" if not found.startswith("missing") else "MISSING" if needed else "absent"
        missing += word == "MISSING"
        print(f"{word:8} {name:22} {found.removeprefix('missing').lstrip(': ')}".rstrip())
    print(f"{missing} needed and missing" if missing else "everything that is needed is there")
    return 1 if missing else 0


Finding = tuple[bool, str, str]
"""Whether it is needed, its name, and what was found, which begins with "missing" if nothing was."""


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return True, "python", version if sys.version_info >= (3, 11) else f"missing: this is {version}, 3.11 is needed"


def package_findings() -> list[Finding]:
    """The dependencies in pyproject.toml, each with its range of versions; the kernels for a GPU help."""
    from packaging.requirements import Requirement

    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wanted = [(True, text) for text in project["dependencies"]]
    wanted += [(False, text) for text in [*project["optional-dependencies"]["gpu"], *MAMBA]]
    findings: list[Finding] = []
    for needed, text in wanted:
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            findings.append((needed, requirement.name, f"missing: pip install '{text}'"))
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        found = version if fits else f"missing: {version} is installed; pip install '{text}'"
        findings.append((needed, requirement.name, found))
    return findings


def gpu_findings() -> list[Finding]:
    """Every NVIDIA GPU with its memory."""
    if shutil.which("nvidia-smi") is None:
        return [(True, "NVIDIA GPU", "missing: no nvidia-smi; install the driver (on a CPU training works, slowly)")]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [(True, "NVIDIA GPU", f"missing: nvidia-smi does not answer ({error})")]
    if listing.returncode or not listing.stdout.strip():
        words = (listing.stdout + listing.stderr).strip().splitlines() or ["no GPU"]
        return [(True, "NVIDIA GPU", f"missing: nvidia-smi: {words[0]}")]
    findings: list[Finding] = []
    for number, line in enumerate(listing.stdout.strip().splitlines()):
        name, total, free, driver = (word.strip() for word in line.split(","))
        findings.append((True, f"GPU {number}", f"{name}, {free} of {total} free, driver {driver}"))
    return findings


def _nvcc() -> Finding:
    compiler = shutil.which("nvcc") or next(
        (str(path) for path in [Path("/usr/local/cuda/bin/nvcc")] if path.is_file()), None
    )
    if compiler is None:
        return False, "nvcc", "missing: the fused operators cannot be built; plain torch takes their place"
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()
    release = next((line.rpartition("release ")[2] for line in shown if "release " in line), "")
    return False, "nvcc", f"{release} at {compiler}".strip()


def _disk(folder: Path) -> Finding:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free / GIB
    text = f"{free:.1f} GiB free at {existing}"
    return True, "disk", text if free >= FREE_GIB else f"missing: {text}, {FREE_GIB:g} are needed"


def _model(model: str) -> Finding:
    folder = Path(model)
    if (folder / "config.json").is_file():
        return True, "model", str(folder)
    if folder.exists() or model.startswith(("/", ".")):
        return True, "model", f"missing: {folder} holds no config.json"
    return False, "model", f"{model}, from the Hugging Face hub or its cache"
