"""Find and install builds of the CUDA operators: in this package, in shared folders, and in torch's cache.

`BuildIdentity` identifies a build. `zerolora ops build --arch 9.0 --into DIR` creates a shared one. If
ZEROLORA_OPS=DIR[:DIR...] is set, a run uses a matching build from there instead of compiling, even without nvcc.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

OPS_PATH_VARIABLE = "ZEROLORA_OPS"
RECORD = "build.json"
PACKAGE_BUILDS_FOLDER = Path(__file__).resolve().parent / "built"


def get_cache_folder() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


@dataclass(frozen=True)
class BuildIdentity:
    sources: str
    """Digest of ops/csrc."""
    torch: str
    cuda: str
    """CUDA version that torch was built with."""
    python: str
    """Version and machine type, such as "3.11-x86_64"."""
    toolkit: str
    """Version of nvcc."""
    architectures: tuple[str, ...]
    """nvcc's names, such as "90a"."""

    @property
    def name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        return f"zerolora_lora-{'-'.join(self.architectures)}-{digest}"

    def find_library(self, folder: Path) -> Path | None:
        library = folder / self.name / "zerolora_lora.so"
        return library if library.is_file() and read_record(folder / self.name) == self else None

    def install(self, library: Path, folder: Path) -> Path:
        """Copy a library into a shared folder atomically, readable by all users, and return its new path."""
        with create_temporary_folder(folder) as name:
            staging = Path(name)
            shutil.copyfile(library, staging / library.name)
            (staging / library.name).chmod(0o755)
            (staging / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            (staging / RECORD).chmod(0o644)
            staging.chmod(0o755)
            shutil.rmtree(folder / self.name, ignore_errors=True)
            staging.rename(folder / self.name)
        return folder / self.name / library.name


def read_record(folder: Path) -> BuildIdentity | None:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return BuildIdentity(**record | {"architectures": tuple(record["architectures"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def find_build(sources: str, versions: tuple[str, str, str], architectures: Collection[str]) -> Path | None:
    """Return the path of a library for these sources, versions (torch, CUDA, Python) and architectures, or None.

    Searches the package, then the folders in ZEROLORA_OPS, then the cache.
    """
    shared = map(Path, filter(None, os.environ.get(OPS_PATH_VARIABLE, "").split(os.pathsep)))
    for folder in (PACKAGE_BUILDS_FOLDER, *shared, get_cache_folder()):
        for record in sorted(folder.glob(f"*/{RECORD}")):
            build = read_record(record.parent)
            if build is None or (build.sources, build.torch, build.cuda, build.python) != (sources, *versions):
                continue
            if set(architectures) <= set(build.architectures) and (library := build.find_library(folder)) is not None:
                return library
    return None


def create_temporary_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder inside `folder`, deleted when its context exits unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".zerolora_lora-", dir=folder, ignore_cleanup_errors=True)


def acquire_build_lock(path: Path) -> AbstractContextManager[object]:
    """Acquire a build's lock, waiting if necessary; it is released when the context or the process exits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process to build the operators ({path})", flush=True)
        return lock.acquire()
