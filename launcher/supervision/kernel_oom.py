"""What the kernel has counted of processes it killed for memory."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")


def oom_kills(cgroups: Path = CGROUPS, vmstat: Path = VMSTAT) -> int | None:
    """Processes that the out-of-memory killer has ended on this host; None where the kernel does not tell.

    The sum of the host's counter and of those of this process's cgroups: either moves when it strikes (a container may
    see only its own).
    """
    found = _counters(vmstat)
    for folder in _memory_cgroups(cgroups):
        # Version 2 of cgroups, then version 1; a counter includes those of the groups below it in version 2 only.
        found += _counters(folder / "memory.events") + _counters(folder / "memory.oom_control")
    return sum(found) if found else None


def _counters(file: Path) -> list[int]:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return []
    return [int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill"]


def _memory_cgroups(root: Path) -> list[Path]:
    """The folders of this process's memory cgroup and of those above it."""
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
