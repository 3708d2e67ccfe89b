"""Utilization, power and memory (all processes) of this rank's GPU, from NVML (nvidia-ml-py).

A query can take several milliseconds, so a thread polls and the training loop reads the latest values.
"""

import threading
from typing import Any, Self

EVERY_S = 2.0


class GpuMetrics:
    """The newest reading of one GPU, refreshed by a thread until `close`."""

    def __init__(self, nvml: Any, handle: Any, every_s: float = EVERY_S) -> None:
        self._nvml, self._handle, self._every_s = nvml, handle, every_s
        self._closed = threading.Event()
        self._values: dict[str, float] = self._read()
        self._thread = threading.Thread(target=self._watch, name="gpu-metrics", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls) -> Self | None:
        """Monitor torch's current GPU; return None without a GPU, NVIDIA driver or nvidia-ml-py."""
        import torch  # readers of metrics.jsonl import this module and need no torch

        if not torch.cuda.is_available():
            return None
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            # By UUID, not by index: CUDA_VISIBLE_DEVICES renumbers torch's GPUs, but not NVML's.
            identity = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}"))
        except pynvml.NVMLError:
            return None  # a MIG slice, or a container without the driver's library

    def values(self) -> dict[str, float]:
        """Return gpu/utilization (percent of time), gpu/power_watts, gpu/memory_gib, as far as the GPU reports them."""
        return dict(self._values)

    def close(self) -> None:
        """Stop the thread; may be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _watch(self) -> None:
        while not self._closed.wait(self._every_s):
            self._values = self._read()

    def _read(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        values: dict[str, float] = {}
        for name, read in (
            ("gpu/utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("gpu/power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            ("gpu/memory_gib", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30),
        ):
            try:
                values[name] = float(read())
            except nvml.NVMLError:
                continue  # some GPUs and virtual machines report no power or no utilization
        return values
