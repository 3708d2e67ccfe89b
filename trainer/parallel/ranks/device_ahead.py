"""Slow work of the device's libraries, in threads alongside the imports and the joining of ranks.

Creating the CUDA context takes the driver a second on a machine with several GPUs; torch then finds it. Errors are
ignored here: they occur again, and are reported, when torch or Triton does the same.
"""

import ctypes
import os
import threading
from collections.abc import Mapping

from trainer.contract.rendezvous import read_place


def create_cuda_context_early(environment: Mapping[str, str] = os.environ) -> threading.Thread | None:
    """Create the CUDA context in a thread; None on a machine without NVIDIA's driver, or for ranks on the CPU."""
    if environment.get("DS_ACCELERATOR") == "cpu":
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        local_rank = read_place(environment)[3]
    except (OSError, ValueError):
        return None
    thread = threading.Thread(target=_make_context, args=(driver, local_rank), name="device", daemon=True)
    thread.start()
    return thread


def hash_triton_ahead() -> threading.Thread:
    """Start to hash Triton's library of a few hundred MB; the hash is part of the name of every compiled kernel.

    It takes 0.4 s without holding the GIL, and is cached for the first kernel of the first step.
    """
    thread = threading.Thread(target=_hash_triton, name="triton", daemon=True)
    thread.start()
    return thread


def _hash_triton() -> None:
    try:
        # Already imported (lean_imports): importing it in two threads at once could deadlock.
        from triton.runtime.cache import triton_key

        triton_key()
    except (ImportError, OSError):  # not installed, or reported by the first kernel
        return


def _make_context(driver: ctypes.CDLL, local_rank: int) -> None:
    """Create the context that torch uses, on the GPU that group.py chooses; the driver returns 0 for success."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    if driver.cuDeviceGet(ctypes.byref(device), 0 if count.value == 1 else local_rank):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
