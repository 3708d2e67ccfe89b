"""Exit codes of the launcher and the ranks (docs/reference/exit-codes.md), and the signals that stop a run."""

import signal
from collections.abc import Sequence

EXIT_OK, EXIT_FAILED = 0, 1
EXIT_USAGE = 2
"""Exit code for user errors; `UserError.exit_code` repeats it, because trainer.config does not import this package."""
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL from sysexits.h: the run was saved and should be restarted."""
EXIT_RESTART = 77
"""Exit code of a rank that has written a restart note (trainer/contract/restart_record.py)."""

EXIT_DELAY_S = 3.0
"""Delay before a rank that prints no message exits, because mpirun and torchrun stop all ranks once one exits."""

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run after a save; the launcher forwards them to the ranks."""
# Exit codes of ranks that were signaled to stop, and have saved or had nothing to save.
STOP_CODES = {128 + signal.SIGINT, 128 + signal.SIGTERM, EXIT_PREEMPTED}
# Status of a process signaled before it installed its handlers, as reported by its parent, DeepSpeed and shells.
_UNHANDLED_SIGNAL_STATUSES = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1}
_UNHANDLED_SIGNAL_STATUSES |= {256 - signal.SIGINT, 256 - signal.SIGTERM, 256 - signal.SIGUSR1, 128 + signal.SIGUSR1}


def get_signal_exit_code(signal_number: int) -> int:
    """Return 75 after SIGUSR1, which schedulers send before preemption, else 128 + signal, as in a shell."""
    return EXIT_PREEMPTED if signal_number == signal.SIGUSR1 else 128 + signal_number


def is_stop_status(code: int) -> bool:
    return code in STOP_CODES or code in _UNHANDLED_SIGNAL_STATUSES


def to_exit_code(status: int) -> int:
    """Convert a return code from `subprocess` to a shell's exit code: 128 + N for signal N."""
    return status if status >= 0 else 128 - status


def choose_stop_code(signals: Sequence[int], *, immediate: bool = False) -> int:
    """Return 75 if SIGUSR1 is among the signals, else 128 + the first signal, or the last one if `immediate` is set."""
    return EXIT_PREEMPTED if signal.SIGUSR1 in signals else 128 + signals[-1 if immediate else 0]
