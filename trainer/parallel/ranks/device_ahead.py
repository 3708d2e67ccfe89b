"""Slow work of the device's libraries, in threads beside the imports and the joining.

This rank's CUDA context takes the driver a second on a machine with several cards, and torch finds it there. What goes
wrong here is met again, and told, where torch or Triton does the same.
"""

import ctypes
import os
import threading
from collections.abc import Mapping

from trainer.contract.rank_variables import read_place


def make_context_ahead(environment: Mapping[str, str] = os.environ) -> threading.Thread | None:
    """Start that in a thread; None on a machine without NVIDIA's driver, or for ranks on the CPU."""
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
    """Start to read Triton's library of some hundred MB: its hash is in the names of all kernels that are compiled.

    It takes 0.4 s, in which Python's lock is free, and is kept for the first kernel of the first step.
    """
    thread = threading.Thread(target=_hash_triton, name="triton", daemon=True)
    thread.start()
    return thread


def _hash_triton() -> None:
    try:
        # Imported whole by now (lean_imports): to import it in two threads at once could end in a deadlock of modules.
        from triton.runtime.cache import triton_key

        triton_key()
    except (ImportError, OSError):  # not there, or the first kernel says so
        return


def _make_context(driver: ctypes.CDLL, local_rank: int) -> None:
    """Make the context that torch uses, on the card that group.py chooses; the driver returns 0 for success."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    if driver.cuDeviceGet(ctypes.byref(device), 0 if count.value == 1 else local_rank):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
