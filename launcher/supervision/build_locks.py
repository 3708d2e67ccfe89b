"""Find and remove stale locks from torch's extension builds: a killed build leaves one that blocks all later builds.

torch creates the file `lock` in the extension's folder, keeps it open during the build, and then removes it. A lock
that no process has open is therefore stale, unless its folder is shared with other hosts.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.supervision.terminal import log

# A build closes its lock just before removing it.
MIN_AGE_S = 5.0
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "afs",
    "wekafs",
    "panfs",
)


@dataclass(frozen=True)
class BuildLock:
    """A lock file; `holder` is the PID of the process on this host that has it open, or None."""

    path: Path
    holder: int | None
    age_s: float


def get_extensions_folder() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


def find_locks(root: Path) -> list[BuildLock]:
    """Return all locks in torch's extensions folder, or in its subfolder for one Python and CUDA version."""
    paths = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}) if root.is_dir() else []
    by_target = {os.path.realpath(path): path for path in paths}
    holders: dict[Path, int] = {}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if by_target else ():
        with suppress(OSError):  # the process has exited, or belongs to another user
            if (target := os.readlink(descriptor)) in by_target:
                holders[by_target[target]] = int(descriptor.parts[2])
    locks = []
    for path in paths:
        with suppress(FileNotFoundError):  # the build has just ended
            locks.append(BuildLock(path, holders.get(path), time.time() - path.stat().st_mtime))
    return locks


def remove_stale_locks() -> None:
    """Remove the locks of killed builds, except on network file systems, and print a note for each."""
    root = get_extensions_folder()
    for lock in find_locks(root):
        if lock.holder is None and lock.age_s > MIN_AGE_S and not _is_on_network(root):
            lock.path.unlink(missing_ok=True)
            log(f"note: removed {lock.path}, a lock left by a killed build {lock.age_s / 60.0:.0f} minutes ago")


def _is_on_network(folder: Path) -> bool:
    real = os.path.realpath(folder)
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    above = [mount for mount in kinds if real == mount or real.startswith(mount.rstrip("/") + "/")]
    return kinds[max(above, key=len)].startswith(NETWORK_FILE_SYSTEMS) if above else False
