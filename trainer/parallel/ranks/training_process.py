"""Set up a training process before torch is imported: allocator, signal handlers, parent watch and import hook."""

import logging
import os
import signal
import sys

from trainer.contract.bytecode import redirect_bytecode
from trainer.contract.exit_codes import get_signal_exit_code
from trainer.contract.home import CHECKOUT
from trainer.contract.launcher_process import LauncherWatch
from trainer.contract.standard_streams import open_closed_descriptors
from trainer.parallel.ranks.lean_imports import hook_imports

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""New and old names of torch's allocator settings; a value set by the user is kept."""

# Torch reads this when it is imported. Expandable segments avoid gaps between activations that would be too small for
# the largest tensor of the next step.
if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


LAUNCHER_WATCH = LauncherWatch(os.environ, is_rank=True)


def set_up_process() -> None:
    """Set up the process before torch is imported: exits, signals and the import path.

    The process exits immediately when its parent exits and, until `StopRequest` handles signals, on SIGTERM, SIGINT and
    SIGUSR1. Unneeded imports are skipped (lean_imports.py), and the working directory is removed from the import path.
    """
    open_closed_descriptors()
    if not sys.flags.safe_path and str(CHECKOUT) in sys.path[1:]:
        del sys.path[0]  # the working directory (`torchrun -m`), or the script's folder
    os.environ["PYTHONSAFEPATH"] = "1"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # There is nothing to save yet, and an exception during an import would look like a bug in the imported module.
        signal.signal(number, lambda received, _: os._exit(get_signal_exit_code(received)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked by a launcher until here
    LAUNCHER_WATCH.start()
    redirect_bytecode()
    # On a CPU with bf16 instructions, bitsandbytes recommends a package that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    hook_imports()
