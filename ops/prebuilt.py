"""Builds of the CUDA operators in folders: in this package, in folders that users share, and in torch's cache.

`Build` is the key. `zerolora ops build --arch 9.0 --into DIR` makes a shared one; with ZEROLORA_OPS=DIR[:DIR...] in the
environment a run takes the build that fits it instead of compiling, even without nvcc.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

VARIABLE = "ZEROLORA_OPS"
RECORD = "build.json"
IN_PACKAGE = Path(__file__).resolve().parent / "built"


def cache_folder() -> Path:
    """Return the folder in which a run puts what it compiles."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


@dataclass(frozen=True)
class Build:
    """The versions that a build was made from and for."""

    sources: str
    """Digest of ops/csrc."""
    torch: str
    cuda: str
    """CUDA version torch was built with."""
    python: str
    """Version and machine, "3.11-x86_64"."""
    toolkit: str
    """Version of nvcc."""
    architectures: tuple[str, ...]
    """nvcc's names, "90a"."""

    @property
    def name(self) -> str:
        """Name of its folder, unique to these versions."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        return f"zerolora_lora-{'-'.join(self.architectures)}-{digest}"

    def library_in(self, folder: Path) -> Path | None:
        """Return its library in a shared folder, or None if it is not built there."""
        found = folder / self.name / "zerolora_lora.so"
        return found if found.is_file() and read(folder / self.name) == self else None

    def place(self, library: Path, folder: Path) -> Path:
        """Put a library into a folder atomically, readable for everybody; return its path there."""
        with temporary_folder(folder) as room:
            shutil.copyfile(library, room / library.name)
            (room / library.name).chmod(0o755)
            (room / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            (room / RECORD).chmod(0o644)
            room.chmod(0o755)
            shutil.rmtree(folder / self.name, ignore_errors=True)
            room.rename(folder / self.name)
        return folder / self.name / library.name


def read(folder: Path) -> Build | None:
    """Return the build in a folder, or None if there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return Build(**record | {"architectures": tuple(record["architectures"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def find(sources: str, versions: tuple[str, str, str], cards: Collection[str]) -> Path | None:
    """Return the library for these sources, versions of torch, CUDA and Python, and all cards, or None.

    It is the first that is found in the package, in the folders of ZEROLORA_OPS, and in the cache.
    """
    shared = map(Path, filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))
    for folder in (IN_PACKAGE, *shared, cache_folder()):
        for record in sorted(folder.glob(f"*/{RECORD}")):
            build = read(record.parent)
            if build is None or (build.sources, build.torch, build.cuda, build.python) != (sources, *versions):
                continue
            if set(cards) <= set(build.architectures) and (library := build.library_in(folder)) is not None:
                return library
    return None


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside `folder`; it is deleted afterwards unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".zerolora_lora-", dir=folder))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a build; other processes wait and then find the result. The end of the process releases it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process, which builds the operators ({path})", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
