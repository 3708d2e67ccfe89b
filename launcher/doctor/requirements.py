"""Check a machine's requirements for training, without importing torch."""

import importlib.util
import re
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
# The oldest GPUs that torch's builds and the operators support, and the memory for a 1B model in 4 bits (decimal GB, as
# GPUs are sold).
LEAST_CAPABILITY = (7, 0)
LEAST_GPU_MIB = 8e9 / 2**20
# For Granite 4.0 H and Falcon H1; without both transformers computes these layers in plain torch.
MAMBA = ("mamba-ssm", "causal-conv1d")
WITHOUT_MAMBA = "without it Granite's Mamba layers run in plain torch, far below the guide's tokens/s"
# Used only by `model.attn_implementation: flash_attention_2`.
FLASH = "flash-attn"


def check_requirements(output_dir: str, model: str) -> int:
    """Print a line for each requirement and option; return 0 if all requirements are met, else 1."""
    missing = 0
    machine = [_check_python(), *find_packages(), *find_gpus(), find_cuda(), _find_flash_attention(), _find_nvcc()]
    for needed, name, found in [*machine, _check_disk(Path(output_dir)), _check_model(model)]:
        word = "ok" if not found.startswith("missing") else "MISSING" if needed else "absent"
        missing += word == "MISSING"
        print(f"{word:8} {name:22} {found.removeprefix('missing').lstrip(': ')}".rstrip())
    print(f"requirements that are missing: {missing}" if missing else "all requirements are met")
    return 1 if missing else 0


Finding = tuple[bool, str, str]
"""Whether it is required, its name, and what was found, which begins with "missing" if nothing was."""


def _check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return True, "python", version if sys.version_info >= (3, 11) else f"missing: this is {version}, 3.11 is needed"


def find_packages() -> list[Finding]:
    """Check the dependencies in pyproject.toml against the installed versions; kernels for GPUs are optional."""
    from packaging.requirements import Requirement

    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wanted = [(True, text) for text in project["dependencies"]]
    extras = project["optional-dependencies"]
    wanted += [(False, text) for name in ("gpu", "mamba") for text in extras.get(name, ())]
    findings: list[Finding] = []
    for needed, text in wanted:
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            why = f"; {WITHOUT_MAMBA}" if requirement.name in MAMBA else ""
            findings.append((needed, requirement.name, f"missing: pip install '{text}'{why}"))
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        found = version if fits else f"missing: {version} is installed; pip install '{text}'"
        findings.append((needed, requirement.name, found))
    return findings


def find_gpus() -> list[Finding]:
    """Check every NVIDIA GPU, which must have 8 GB of memory and compute capability 7.0."""
    if shutil.which("nvidia-smi") is None:
        return [(True, "NVIDIA GPU", "missing: no nvidia-smi; install the driver (on a CPU training works, slowly)")]
    fields = "name,memory.total,memory.free,driver_version,compute_cap"
    try:
        listing = _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader")
    except (OSError, subprocess.TimeoutExpired) as error:
        return [(True, "NVIDIA GPU", f"missing: nvidia-smi does not answer ({error})")]
    if listing.returncode or not listing.stdout.strip():
        words = (listing.stdout + listing.stderr).strip().splitlines() or ["no GPU"]
        return [(True, "NVIDIA GPU", f"missing: nvidia-smi: {words[0]}")]
    findings: list[Finding] = []
    for number, line in enumerate(listing.stdout.strip().splitlines()):
        name, total, free, driver, capability = (word.strip() for word in line.split(","))
        found = f"{name}, {free} of {total} free, compute capability {capability}, driver {driver}"
        findings.append((True, f"GPU {number}", f"{_why_too_small(total, capability)}{found}"))
    return findings


def _why_too_small(total: str, capability: str) -> str:
    """Return what a GPU lacks, as the prefix of its finding; empty if it suffices or its numbers are unknown."""
    numbers = re.findall(r"\d+", capability)
    if len(numbers) == len(LEAST_CAPABILITY) and tuple(map(int, numbers)) < LEAST_CAPABILITY:
        return "missing: compute capability 7.0 or newer is needed: "
    if (size := re.match(r"(\d+) MiB", total)) and int(size.group(1)) < LEAST_GPU_MIB:
        return "missing: 8 GB of memory are needed: "
    return ""


def find_cuda() -> Finding:
    """Check that the driver supports the CUDA version that torch was built with."""
    built = _torch_cuda_version()
    if built is None:
        return True, "CUDA", "missing: this torch is built without it; install one for CUDA (pytorch.org/get-started)"
    try:
        shown = re.search(r"CUDA Version: *(\d+)\.(\d+)", _nvidia_smi().stdout)
    except (OSError, subprocess.TimeoutExpired):
        shown = None
    if shown is None:
        return True, "CUDA", f"{built} in torch"
    driver = f"{shown.group(1)}.{shown.group(2)}"
    if int(shown.group(1)) < int(built.partition(".")[0]):
        return True, "CUDA", f"missing: torch has {built} and the driver knows {driver} at most; update the driver"
    return True, "CUDA", f"{built} in torch, {driver} in the driver"


def _torch_cuda_version() -> str | None:
    """Return the CUDA version in torch/version.py, read as text because importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found else None
    path = Path(folders[0], "version.py") if folders else None
    text = path.read_text(encoding="utf-8") if path and path.is_file() else ""
    built = re.search(r"^cuda(?::[^=]*)? = '([\d.]+)'", text, re.MULTILINE)
    return built.group(1) if built else None


def _nvidia_smi(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S)


def _find_flash_attention() -> Finding:
    try:
        return False, FLASH, metadata.version(FLASH)
    except metadata.PackageNotFoundError:
        use = "only model.attn_implementation: flash_attention_2 uses it; torch has flash attention of its own"
        return False, FLASH, f"missing: {use}"


def _find_nvcc() -> Finding:
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler is None:
        return False, "nvcc", "missing: the fused operators cannot be built; plain torch takes their place"
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()
    release = next((line.rpartition("release ")[2] for line in shown if "release " in line), "")
    return False, "nvcc", f"{release} at {compiler}".strip()


def _check_disk(folder: Path) -> Finding:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free / GIB
    text = f"{free:.1f} GiB free at {existing}"
    return True, "disk", text if free >= FREE_GIB else f"missing: {text}, {FREE_GIB:g} are needed"


def _check_model(model: str) -> Finding:
    folder = Path(model)
    if (folder / "config.json").is_file():
        return True, "model", str(folder)
    if folder.exists() or model.startswith(("/", ".")):
        return True, "model", f"missing: {folder} holds no config.json"
    return False, "model", f"{model}, from the Hugging Face hub or its cache"
