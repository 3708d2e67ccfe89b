"""Signals that end a run in order, and the exit codes of those that have heard them."""

import signal
from collections.abc import Sequence

from trainer.contract.exit_codes import EXIT_PREEMPTED

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# What ranks say that were told to stop, and have saved or had nothing to save yet.
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, EXIT_PREEMPTED}
# One that was ended before it set up its handler, as its parent learns it, or as DeepSpeed and shells say it.
_NOT_STARTED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1}
_NOT_STARTED |= {256 - signal.SIGINT, 256 - signal.SIGTERM, 256 - signal.SIGUSR1, 128 + signal.SIGUSR1}


def is_stopped_by_us(code: int) -> bool:
    """Whether an exit code says no more than that the process was told to stop."""
    return code in STOPPED or code in _NOT_STARTED


def exit_code_of(status: int) -> int:
    """A status as `subprocess` says it, as a shell would: 128 + signal."""
    return status if status >= 0 else 128 - status


def exit_code_of_stop(signals: Sequence[int], *, at_once: bool = False) -> int:
    """Of a run that heard these: 75 after SIGUSR1, else 128 + the first, or the last where that ended it at once."""
    return EXIT_PREEMPTED if signal.SIGUSR1 in signals else 128 + signals[-1 if at_once else 0]
