"""Read the state of this process from another thread: its position, whether it makes progress, and free memory."""

import json
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from trainer.contract.heartbeat import BUILD_LOCK
from trainer.contract.home import CHECKOUT

GIB = 2**30
# Thresholds above the CPU time of waking threads, and the bytes that the watchdog reads and writes between checks.
MIN_CPU_FRACTION, MIN_CPU_S = 0.02, 2e-3
MIN_BYTES = 256 * 1024
MIN_PAGE_FAULTS = 64


def get_main_thread_frame() -> FrameType | None:
    """Return the innermost Python frame of the main thread, even during a call into C++."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def find_collective(frame: FrameType | None) -> str | None:
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/distributed/distributed_c10d.py"):
            return frame.f_code.co_name
        frame = frame.f_back
    return None


def find_location(frame: FrameType | None) -> str | None:
    """Return zerolora's innermost frame in a stack, such as "trainer/step.py:134 train_step".

    Returns BUILD_LOCK if the stack waits for the lock of an extension build, and None if it has no zerolora frame.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith("torch/utils/file_baton.py"):
            return BUILD_LOCK
        if Path(path).is_relative_to(CHECKOUT) and "site-packages" not in path:
            return f"{Path(path).relative_to(CHECKOUT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def read_recorded_collectives() -> tuple[str | None, int | None]:
    """Return the oldest unfinished collective and the number of collectives begun, from torch's flight recorder.

    A stack does not show which collective is running: with NCCL, the call returns long before the GPU has finished.
    Returns (None, None) if nothing was recorded (TORCH_FR_BUFFER_SIZE=0, or no process group yet).
    """
    distributed = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    for dump in (getattr(distributed, name, None) for name in names):
        if dump is None:
            continue
        trace: dict[str, Any] = json.loads(dump(True, True))  # include collectives, only active ones
        # Sum over all groups, because DeepSpeed reduces and gathers in its own group.
        begun = [int(status["last_enqueued_collective"]) for status in trace.get("pg_status", {}).values()]
        if any(count >= 0 for count in begun):
            active = [entry for entry in trace.get("entries", []) if not entry.get("retired")]
            oldest = str(active[0]["profiling_name"]).partition(":")[2] if active else None
            return oldest, sum(max(count, 0) for count in begun)
    return None, None


class ActivityDetector:
    """Detects whether this process and its children have computed, read or written since the last check.

    Such activity shows progress within long library calls (tokenizing, reading weights, writing a checkpoint). A
    process that waits for a lock, a network or a dead file server shows none.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._checked_at = time.monotonic()
        self._before = self._read_counters()

    def has_progressed(self) -> bool:
        now, counters = time.monotonic(), self._read_counters()
        cpu, moved_bytes, faults = (new - old for new, old in zip(counters, self._before, strict=True))
        elapsed, self._checked_at, self._before = now - self._checked_at, now, counters
        # When a child exits, its counts are lost and a sum can fall, which counts as progress too.
        computed = abs(cpu) > MIN_CPU_S + MIN_CPU_FRACTION * elapsed
        return computed or abs(moved_bytes) > MIN_BYTES or abs(faults) > MIN_PAGE_FAULTS

    def _read_counters(self) -> tuple[float, float, float]:
        usage, watching = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_THREAD)
        # Exclude the CPU time of the calling thread, which is the watchdog's.
        cpu = usage.ru_utime + usage.ru_stime - watching.ru_utime - watching.ru_stime
        moved_bytes, faults = 0.0, usage.ru_minflt + usage.ru_majflt - watching.ru_minflt - watching.ru_majflt
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error, OSError):  # the process has exited or cannot be read
                if process.pid != self._process.pid:
                    times = process.cpu_times()
                    cpu += times.user + times.system
                counts = process.io_counters()
                moved_bytes += counts.read_chars + counts.write_chars + counts.read_bytes + counts.write_bytes
        return cpu, moved_bytes, float(faults)


def read_free_host_memory() -> float:
    """Return the host memory available to this process in GiB, within its cgroup's memory limit."""
    free = [float(psutil.virtual_memory().available)]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")  # version 1 or 2
        limit, used = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        for folder in (root / path.lstrip("/"), root):
            with suppress(OSError, ValueError):  # no limit here, or "max"
                limit_bytes = float((folder / f"memory.{limit}").read_text())
                free.append(limit_bytes - float((folder / f"memory.{used}").read_text()))
    return max(min(free), 0.0) / GIB


def read_free_shared_memory() -> float:
    """Return how many GiB are free in /dev/shm, which NCCL and data loaders use; infinity if it does not exist."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return float("inf")
    return stats.f_bavail * stats.f_frsize / GIB
