"""Signals that stop a run in an orderly way, and the exit codes of processes that received them."""

import signal
from collections.abc import Sequence

from trainer.contract.exit_codes import EXIT_PREEMPTED

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Exit codes of ranks that were signalled to stop, and have saved or had nothing to save yet.
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, EXIT_PREEMPTED}
# Status of a process signalled before it installed its handler, as its parent, DeepSpeed and shells report it.
_NOT_STARTED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1}
_NOT_STARTED |= {256 - signal.SIGINT, 256 - signal.SIGTERM, 256 - signal.SIGUSR1, 128 + signal.SIGUSR1}


def is_stopped_by_us(code: int) -> bool:
    """Return whether an exit code only means that the process was signalled to stop."""
    return code in STOPPED or code in _NOT_STARTED


def to_exit_code(status: int) -> int:
    """Convert a status of `subprocess` to the exit code of a shell: 128 + N for signal N."""
    return status if status >= 0 else 128 - status


def choose_stop_code(signals: Sequence[int], *, at_once: bool = False) -> int:
    """Return 75 if SIGUSR1 is among the signals, else 128 + the first, or `at_once` the last, which ended the run."""
    return EXIT_PREEMPTED if signal.SIGUSR1 in signals else 128 + signals[-1 if at_once else 0]
