"""Set up a training process before torch is imported: its allocator, its signals, its parent."""

import logging
import os
import signal
import sys
from types import FrameType

from trainer.contract.bytecode import redirect_bytecode
from trainer.contract.exit_codes import exit_code_after
from trainer.contract.home import CHECKOUT
from trainer.contract.launcher_process import LauncherWatch
from trainer.contract.standard_streams import open_closed_descriptors
from trainer.parallel.ranks.lean_imports import hook_imports

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's new and old name for the variable; a value set by the user is kept."""

# Torch reads this when it is imported. Expandable segments leave no gaps between activations that are too small for
# the largest tensor of the next step.
if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _exit_immediately(number: int, frame: FrameType | None) -> None:
    # There is nothing to save yet, and an exception in the middle of an import would look like a bug in that module.
    os._exit(exit_code_after(number))


LAUNCHER_WATCH = LauncherWatch(os.environ, is_rank=True)


def begin() -> None:
    """Make the process exit immediately when its parent exits and, until `StopRequest` handles signals, on a signal.

    Later imports are lean (lean_imports.py) and never from the working directory.
    """
    open_closed_descriptors()
    if not sys.flags.safe_path and str(CHECKOUT) in sys.path[1:]:
        del sys.path[0]  # the working directory (`torchrun -m`), or the script's folder
    os.environ["PYTHONSAFEPATH"] = "1"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _exit_immediately)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked by a launcher until here
    LAUNCHER_WATCH.start()
    redirect_bytecode()
    # bitsandbytes, imported on a CPU with bf16 instructions, recommends a package that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    hook_imports()
