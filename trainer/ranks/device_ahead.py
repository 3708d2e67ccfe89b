"""This rank's CUDA context, made by the driver while Python imports.

It takes a second on a machine with several cards, and torch finds it there. Whatever goes wrong is found again by
torch, which says so.
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


def _make_context(driver: ctypes.CDLL, local_rank: int) -> None:
    """The context that torch uses, of the card that trainer/ranks/group.py chooses; 0 is the driver's success."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    if driver.cuDeviceGet(ctypes.byref(device), 0 if count.value == 1 else local_rank):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
