"""Handle Ctrl-C, SIGTERM and a scheduler's SIGUSR1: all ranks agree on the signal, save, and stop."""

import os
import signal
from collections.abc import Callable
from types import FrameType

from trainer.contract.exit_codes import get_signal_exit_code

# If ranks received different signals, the last in this list wins: schedulers send SIGTERM some time after SIGUSR1.
SIGNAL_PRIORITY = (0, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Records a signal until the training loop can act on it.

    Before training, when there is nothing to save, a signal terminates the process immediately, as does a second Ctrl-C
    at any time. Schedulers send SIGUSR1 before they terminate a job (`sbatch --signal=B:USR1@120`).
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._process = os.getpid()
        self.training = False
        self.saved = False
        self.write_exit_code: Callable[[int], None] = lambda exit_code: None
        """Callback that receives the exit code before the process exits immediately."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle_signal)

    def __bool__(self) -> bool:
        return self.signal_number != 0

    @property
    def exit_code(self) -> int:
        """Exit code: 75 after SIGUSR1, otherwise 128 + the signal's number, as in a shell."""
        return get_signal_exit_code(self.signal_number)

    def agree_on_signal(self) -> None:
        """Agree on the most urgent signal of any rank; a collective call after the training loop and last checkpoint.

        A signal may reach only one rank, or the ranks at different times. Without agreement some ranks would exit while
        others wait for them in the last evaluation. If no rank received a signal, a later signal terminates the rank
        that receives it immediately.
        """
        import torch
        import torch.distributed as dist

        self.training = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
            urgency = torch.tensor([SIGNAL_PRIORITY.index(self.signal_number)], device=device)
            dist.all_reduce(urgency, dist.ReduceOp.MAX)
            self.signal_number = int(SIGNAL_PRIORITY[int(urgency)])
        self.saved = bool(self)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            os._exit(128 + number)  # a worker that a library forked and now terminates
        if self.saved:
            return  # the run is ending; the launcher terminates the last ranks after the first has exited
        is_repeated = self.signal_number == number == signal.SIGINT
        if self.signal_number != signal.SIGUSR1 or number == signal.SIGINT:
            self.signal_number = number
        if is_repeated or not self.training:
            try:
                self.write_exit_code(self.exit_code)
            finally:
                os._exit(self.exit_code)
