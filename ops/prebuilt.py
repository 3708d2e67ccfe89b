"""Builds of the CUDA operators in a folder that users share, and which of them fits: the key is in `Build`.

`zerolora ops build --arch 9.0 --into DIR` makes one; with ZEROLORA_OPS=DIR[:DIR...] in the environment a run takes the
build that fits it instead of compiling, also where there is no nvcc. What fits none is compiled as ever.
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

VARIABLE = "ZEROLORA_OPS"
RECORD = "build.json"


@dataclass(frozen=True)
class Build:
    """What a build is made of and for."""

    sources: str
    """Digest of ops/csrc."""
    torch: str
    cuda: str
    """That torch is built with."""
    python: str
    """Version and machine, "3.11-x86_64"."""
    toolkit: str
    """Version of nvcc."""
    architectures: tuple[str, ...]
    """nvcc's names, "90a"."""

    @property
    def name(self) -> str:
        """Of its folder; another one for whatever differs."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        return f"zerolora_lora-{'-'.join(self.architectures)}-{digest}"

    def library_in(self, folder: Path) -> Path | None:
        """Its library in a shared folder; None if the build is not there."""
        found = folder / self.name / "zerolora_lora.so"
        return found if found.is_file() and read(folder / self.name) == self else None

    def place(self, library: Path, folder: Path) -> None:
        """Put a library into a shared folder, for everybody to read: whole or not at all."""
        with room_in(folder) as room:
            shutil.copyfile(library, room / "zerolora_lora.so")
            (room / "zerolora_lora.so").chmod(0o755)
            (room / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            (room / RECORD).chmod(0o644)
            room.chmod(0o755)
            shutil.rmtree(folder / self.name, ignore_errors=True)
            room.rename(folder / self.name)


def read(folder: Path) -> Build | None:
    """What the build in a folder is; None if there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return Build(**record | {"architectures": tuple(record["architectures"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def find(sources: str, versions: tuple[str, str, str], cards: Collection[str]) -> Path | None:
    """The library for these sources, versions of torch, CUDA and Python, and all architectures; None if there is none.

    Of several that of the newest toolkit.
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
def room_in(folder: Path) -> Iterator[Path]:
    """A folder on the same file system, which is gone afterwards unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
