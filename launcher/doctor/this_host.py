"""Machine checks for `zerolora doctor` that do not need torch: packages, driver, disk, memory, build locks, port."""

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from launcher.supervision.build_locks import find_locks, get_extensions_folder
from trainer.config import RunConfig
from trainer.config.errors import format_count
from trainer.contract.bytecode import find_missing_bytecode
from trainer.contract.home import ZEROLORA_HOME
from trainer.contract.json_records import CheckResult, CheckState
from trainer.contract.known_versions import describe_untested, get_installed_version
from trainer.contract.rendezvous import describe_port_problem, get_host_name

PYPROJECT_FILE = ZEROLORA_HOME / "pyproject.toml"
GIB = 2**30
SMI_TIMEOUT_S = 60.0
# Lowest compute capability that torch's builds and the operators support.
MIN_CAPABILITY = (7, 0)
# A 4-bit 1B model needs a GPU sold as 8 GB (decimal).
MIN_GPU_MIB = 8e9 / 2**20
# Kernels for Granite 4.0 H and Falcon H1; unless both are installed, transformers uses plain torch for Mamba layers.
MAMBA = ("mamba-ssm", "causal-conv1d")
MIN_FREE_GIB = 1.0
"""Free disk space below which `zerolora train` refuses to start."""
RECOMMENDED_GIB = 10.0
NCCL_SHM_GIB = 1.0
"""Space in /dev/shm that NCCL needs to connect the GPUs of a host; Docker's default is 64 MiB."""
PROCESS_GIB = 2.0
"""Host memory of a rank that has loaded torch, CUDA and DeepSpeed, but no model."""
TEST_FILE_BYTES = 2**20


def check_packages() -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    state: CheckState = "OK" if sys.version_info >= (3, 11) else "FAIL"
    yield CheckResult("python", state, f"{version} at {sys.executable}", "install 3.11" * (state == "FAIL"))
    failed = list(_check_dependencies())
    yield from failed or [CheckResult("packages", "OK", "every dependency has a version known to work")]
    missing = [name for name in MAMBA if importlib.util.find_spec(name.replace("-", "_")) is None]
    slow = "only models with Mamba layers use them; they run about three times slower without"
    description = f"optional {' and '.join(missing)} not installed; {slow}" if missing else "installed"
    yield CheckResult("Mamba kernels", "OK", description)
    for untested in describe_untested():
        fix = f"install the version of {untested.split()[0]} in constraints.txt, or monitor the first run"
        yield CheckResult("known versions", "WARN", untested, fix)


def check_bytecode() -> CheckResult:
    """Check that the large libraries are compiled to bytecode, which makes ranks start faster."""
    if missing := find_missing_bytecode():
        problem = f"missing for {', '.join(missing)}: the first run on this machine compiles 3,000 modules"
        return CheckResult(
            "bytecode", "WARN", problem, "run `python -m compileall -q -j 0` on site-packages, as the user who owns it"
        )
    return CheckResult("bytecode", "OK", "compiled")


def _check_dependencies() -> Iterator[CheckResult]:
    from packaging.requirements import Requirement

    for text in tomllib.loads(PYPROJECT_FILE.read_text(encoding="utf-8"))["project"]["dependencies"]:
        requirement = Requirement(text)
        version = get_installed_version(requirement.name)
        if version is None:
            yield CheckResult(requirement.name, "FAIL", "not installed", f"pip install '{text}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            yield CheckResult(requirement.name, "FAIL", f"{version} is installed", f"pip install '{text}'")


def check_driver() -> Iterator[CheckResult]:
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        yield CheckResult("driver", "OK", "not needed: DS_ACCELERATOR=cpu")
        return
    if shutil.which("nvidia-smi") is None:
        yield CheckResult(
            "driver", "WARN", "nvidia-smi not found; using the CPU", "to use a GPU, install the NVIDIA driver"
        )
        return
    fields = "name,memory.total,memory.free,driver_version,compute_cap"
    fix = "the driver and its kernel module must have the same version: reinstall the driver, and restart the host"
    try:
        listing = _run_nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader")
        driver_cuda = re.search(r"CUDA Version: *(\d+)\.(\d+)", _run_nvidia_smi().stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield CheckResult("driver", "FAIL", f"nvidia-smi does not respond ({error})", fix)
        return
    if listing.returncode or not listing.stdout.strip():
        words = (listing.stdout + listing.stderr).strip().splitlines() or ["no GPU"]
        yield CheckResult("driver", "FAIL", f"nvidia-smi: {words[0]}", fix)
    for number, line in enumerate(listing.stdout.strip().splitlines() if not listing.returncode else ()):
        name, total, free, driver, capability = (word.strip() for word in line.split(","))
        description = f"{name}, {free} of {total} free, compute capability {capability}, driver {driver}"
        if reason := _describe_gpu_limitation(total, capability):
            fix = "exclude it with CUDA_VISIBLE_DEVICES, or use another GPU"
            yield CheckResult(f"GPU {number}", "WARN", f"{reason}: {description}", fix)
        else:
            yield CheckResult(f"GPU {number}", "OK", description)
    if (torch_cuda := _read_torch_cuda_version()) is None:
        fix = "install a CUDA build of torch (pytorch.org/get-started)"
        yield CheckResult("CUDA", "FAIL", "this torch was built without CUDA", fix)
    elif driver_cuda is not None and int(driver_cuda.group(1)) < int(torch_cuda.partition(".")[0]):
        supported = f"{driver_cuda.group(1)}.{driver_cuda.group(2)}"
        problem = f"torch was built for CUDA {torch_cuda}, but the driver supports at most {supported}"
        yield CheckResult("CUDA", "FAIL", problem, "update the driver")


def _describe_gpu_limitation(total: str, capability: str) -> str:
    numbers = re.findall(r"\d+", capability)
    if len(numbers) == len(MIN_CAPABILITY) and tuple(map(int, numbers)) < MIN_CAPABILITY:
        return "compute capability 7.0 or newer is needed"
    if (size := re.match(r"(\d+) MiB", total)) and int(size.group(1)) < MIN_GPU_MIB:
        return "at least 8 GB of GPU memory is needed"
    return ""


def _read_torch_cuda_version() -> str | None:
    """Return the CUDA version in torch/version.py, read as text because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0], "version.py") if folders else None
    text = path.read_text(encoding="utf-8") if path and path.is_file() else ""
    match = re.search(r"^cuda(?::[^=]*)? = '([\d.]+)'", text, re.MULTILINE)
    return match.group(1) if match else None


def _run_nvidia_smi(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S)


def check_folders(config: RunConfig | None, needed_bytes: Mapping[str, int]) -> Iterator[CheckResult]:
    if config is not None:
        yield check_space("disk: output_dir", Path(config.output_dir), needed_bytes.get("disk", 0) / GIB)
        yield check_space("disk: dataset.cache_dir", Path(config.dataset.cache_dir).expanduser(), 0.0)
    yield check_space("disk: temporary files", Path(tempfile.gettempdir()), 0.0)
    yield check_space("disk: built operators", get_extensions_folder(), 0.0)


def check_space(name: str, folder: Path, needed_gib: float) -> CheckResult:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    description = f"{free:.1f} GiB free at {existing}" + (f", {needed_gib:.1f} GiB needed" if needed_gib else "")
    fix = "free some space, or use another folder"
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"\0" * TEST_FILE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = "the disk quota is exceeded" if error.errno == errno.EDQUOT else error.strerror
        return CheckResult(name, "FAIL", f"{description}, but a 1 MiB file cannot be written: {reason}", fix)
    if free < max(RECOMMENDED_GIB, needed_gib):
        return CheckResult(name, "FAIL" if free < max(MIN_FREE_GIB, needed_gib) else "WARN", description, fix)
    return CheckResult(name, "OK", description)


def check_memory(ranks: int, needed_bytes: Mapping[str, int], *, on_gpus: bool) -> Iterator[CheckResult]:
    failed_state: CheckState = "FAIL" if on_gpus and ranks > 1 else "WARN"  # NCCL needs /dev/shm, gloo does not
    free = psutil.virtual_memory().available / GIB
    per_rank = PROCESS_GIB + needed_bytes.get("host_per_rank", 0) / GIB
    needed, estimated = ranks * per_rank, "(estimate)" if needed_bytes else "without the model"
    description = f"{free:.1f} GiB free, {needed:.1f} GiB needed for {format_count(ranks, 'rank')} {estimated}"
    fix = "use fewer ranks per host, turn zero.offload_* off, or reduce dataset.workers"
    yield CheckResult("host memory", "OK" if free >= needed else "FAIL", description, "" if free >= needed else fix)
    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError:
        yield CheckResult("/dev/shm", failed_state, "missing", "mount a tmpfs at /dev/shm")
        return
    enough = shared.free / GIB >= NCCL_SHM_GIB
    description = f"{shared.free / GIB:.2f} of {shared.total / GIB:.2f} GiB free, {NCCL_SHM_GIB:g} GiB needed"
    fix = "remove files of earlier runs; start containers with --shm-size=8g"
    yield CheckResult("/dev/shm", "OK" if enough else failed_state, description, "" if enough else fix)


def check_build_locks() -> Iterator[CheckResult]:
    """Check for locks left by killed builds, which block every later build."""
    root = get_extensions_folder()
    locks = find_locks(root)
    for lock in locks:
        if lock.holder is not None:
            yield CheckResult("build lock", "OK", f"{lock.path}: process {lock.holder} is building; a run waits for it")
        else:
            description = f"{lock.path}: stale, {lock.age_s / 60.0:.0f} minutes old, not held by a process on this host"
            yield CheckResult("build lock", "FAIL", description, f"rm {lock.path}")
    if not locks:
        yield CheckResult("build locks", "OK", f"none in {root}")


def check_port(port: int | None) -> CheckResult:
    """Check that `port` is free on this host; None means that a free port will be chosen."""
    if port is None:
        return CheckResult("port", "OK", "a free one is chosen at startup; to choose it yourself, set --master-port")
    if reason := describe_port_problem(port):
        fix = "use another --master-port, or stop the process that listens on this one"
        return CheckResult("port", "FAIL", f"{port} on {get_host_name()} is already in use ({reason})", fix)
    return CheckResult("port", "OK", f"{port} is free on {get_host_name()}")
