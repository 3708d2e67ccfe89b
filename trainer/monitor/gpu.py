"""What the driver says of this rank's GPU: utilisation, power, memory of all its processes (NVML, nvidia-ml-py).

A thread asks every few seconds and the training loop reads the last answer: a query takes up to some milliseconds.
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
        """For torch's current GPU; None where there is no GPU, no NVIDIA driver, or no nvidia-ml-py."""
        import torch  # the readers of metrics.jsonl import this file and need no torch

        if not torch.cuda.is_available():
            return None
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            # By identity, not by number: CUDA_VISIBLE_DEVICES renumbers torch's GPUs and leaves NVML's as they are.
            identity = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}"))
        except pynvml.NVMLError:
            return None  # a slice of a GPU, or a container without the driver's library

    def values(self) -> dict[str, float]:
        """gpu/utilization (percent of the time), gpu/power_watts, gpu/memory_gib; what the card does not tell lacks."""
        return dict(self._values)

    def close(self) -> None:
        """End the thread; may be called twice."""
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
                continue  # some cards and virtual machines report no power or no utilisation
        return values
