"""Find and place builds of the CUDA operators in a folder that users share, and lock a build; `Build` is the key.

`zerolora ops build --arch 9.0 --into DIR` makes one; with ZEROLORA_OPS=DIR[:DIR...] in the environment a run takes the
build that fits it instead of compiling, even without nvcc. Without a fitting build it compiles as usual.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "ZEROLORA_OPS"
RECORD = "build.json"
LOCK_POLL_SECONDS = 0.2


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

    def place(self, library: Path, folder: Path) -> None:
        """Put a library into a shared folder atomically, readable for everybody."""
        with temporary_folder(folder) as room:
            shutil.copyfile(library, room / "zerolora_lora.so")
            (room / "zerolora_lora.so").chmod(0o755)
            (room / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            (room / RECORD).chmod(0o644)
            room.chmod(0o755)
            shutil.rmtree(folder / self.name, ignore_errors=True)
            room.rename(folder / self.name)


def read(folder: Path) -> Build | None:
    """Return the build in a folder, or None if there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return Build(**record | {"architectures": tuple(record["architectures"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def find(sources: str, versions: tuple[str, str, str], cards: Collection[str]) -> Path | None:
    """Return the library for these sources, versions of torch, CUDA and Python, and all cards, or None.

    Of several builds, the one with the newest toolkit.
    """
    fitting: list[tuple[list[int], Path]] = []
    for folder in map(Path, filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))):
        for record in folder.glob(f"*/{RECORD}"):
            build = read(record.parent)
            if build is None or (build.sources, build.torch, build.cuda, build.python) != (sources, *versions):
                continue
            if cards and set(cards) <= set(build.architectures) and build.library_in(folder) is not None:
                toolkit = [int(part) for part in build.toolkit.split(".")]
                fitting.append((toolkit, record.parent / "zerolora_lora.so"))
    return max(fitting)[1] if fitting else None


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside `folder`; it is deleted afterwards unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the build lock of this node; other processes wait and then find the result.

    It is an flock and ends with its process, so a killed build leaves a file but no lock. The file names the holder for
    those who wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        announced = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not announced:
                    file.seek(0)
                    holder = file.read().strip() or "?"
                    print(f"waiting for process {holder}, which builds the operators ({path})", flush=True)
                    announced = True
                time.sleep(LOCK_POLL_SECONDS)
        file.truncate(0)
        file.write(f"{os.getpid()}")
        file.flush()
        yield
        file.truncate(0)
