"""Replace the `zerolora` process by the program of a subcommand that needs torch."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def become_module(module: str, words: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module words`, which inherits its signals, terminal and exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until launcher/module.py unblocks it
    os.execv(sys.executable, [sys.executable, "-m", "launcher.module", module, *words])
