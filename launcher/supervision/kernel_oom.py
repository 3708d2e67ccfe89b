"""The kernel's counters of processes killed for lack of memory."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")


def oom_kills(cgroups: Path = CGROUPS, vmstat: Path = VMSTAT) -> int | None:
    """Return how many processes the out-of-memory killer has ended on this host; None if no counter is readable.

    The sum of the host's counter and those of this process's cgroups: a container may see only its own.
    """
    found = _counters(vmstat)
    for folder in _memory_cgroups(cgroups):
        # cgroups v2, then v1; only in v2 does a counter include the groups below.
        found += _counters(folder / "memory.events") + _counters(folder / "memory.oom_control")
    return sum(found) if found else None


def _counters(file: Path) -> list[int]:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return []
    return [int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill"]


def _memory_cgroups(root: Path) -> list[Path]:
    folders = [root, root / "memory"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "memory" if controllers else root
            own = base / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder != base]
    return folders
