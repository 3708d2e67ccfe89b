"""The `zerolora` process becomes the program of a subcommand that needs torch."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def become_module(module: str, words: Sequence[str]) -> NoReturn:
    """Run `python -m module words` in this process's place: exit code, signals and terminal are right without help."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until launcher/module.py is there
    os.execv(sys.executable, [sys.executable, "-m", "launcher.module", module, *words])
