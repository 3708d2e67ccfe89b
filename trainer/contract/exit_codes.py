"""The exit codes of launcher and ranks, explained in docs/reference/exit-codes.md."""

import signal

EXIT_OK, EXIT_FAILED = 0, 1
EXIT_USAGE = 2
"""A mistake of the user; equal to `UserError.exit_code`, because trainer.config does not import this package."""
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: the run is saved and should be restarted."""
EXIT_RESTART = 77
"""Exit code of a rank that has written a restart note (trainer/contract/restart_record.py)."""

REPORT_DELAY_S = 3.0
"""Delay before a rank without a message exits, because mpirun and torchrun stop all ranks with the first."""


def exit_code_after(number: int) -> int:
    """Return 75 after SIGUSR1, which schedulers send before preemption, else 128 + signal, as in a shell."""
    return EXIT_PREEMPTED if number == signal.SIGUSR1 else 128 + number
