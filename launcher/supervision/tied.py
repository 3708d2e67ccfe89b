"""`python -m launcher.supervision.tied COMMAND...`: srun, mpirun or pdsh, told to end when `zerolora` is gone.

They end their ranks on SIGTERM, or the connection closes, which ranks notice; by themselves they would go on.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from launcher.supervision.stop_signals import PASSED_ON, exit_code_of
from trainer.contract.exit_codes import EXIT_FAILED
from trainer.contract.launcher_process import LauncherWatch, end_with_children

POLL_S = 0.2
PATIENCE_S = 8.0


def main(argv: list[str]) -> int:
    """Run the command, pass signals on, and return its exit code (128 + signal if one ended it)."""
    came: list[int] = []
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: came.append(number))
    child = subprocess.Popen(argv)

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in PASSED_ON:
        signal.signal(number, forward)
    for earlier in came:
        child.send_signal(earlier)
    watch = LauncherWatch(os.environ, is_rank=False)
    while child.poll() is None and watch.what_is_gone() is None:
        time.sleep(POLL_S)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(PATIENCE_S)
        finally:
            end_with_children(EXIT_FAILED)
    return exit_code_of(child.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
