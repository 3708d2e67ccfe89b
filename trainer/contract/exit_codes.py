"""The exit codes of launcher and ranks; docs/reference/exit-codes.md says what users make of them."""

import signal

EXIT_OK, EXIT_FAILED = 0, 1
EXIT_USAGE = 2
"""A mistake of the user; `UserError.exit_code` is the same number, as settings are read without this package."""
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: the run is saved and asks to be started again."""
EXIT_RESTART = 77
"""Of a rank to its launcher: it has left a note (trainer/contract/restart_note.py)."""

TO_SPEAK_S = 3.0
"""How long a rank that says nothing waits before it ends: mpirun and torchrun end all ranks with the first."""


def exit_code_after(number: int) -> int:
    """75 after SIGUSR1, which schedulers send before they take the machine away, else 128 + signal, as in a shell."""
    return EXIT_PREEMPTED if number == signal.SIGUSR1 else 128 + number
