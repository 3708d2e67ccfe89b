"""`python -m launcher.supervision.run_until_launcher_exits COMMAND...`: run COMMAND; stop it when `zerolora` exits.

COMMAND is srun, mpirun or pdsh, which would outlive a killed `zerolora`; on SIGTERM, it stops its ranks.
"""

import os
import signal
import subprocess
import sys
import time

from trainer.contract.exit_codes import FORWARDED_SIGNALS, to_exit_code
from trainer.contract.launcher_process import LauncherWatch, kill_children_and_exit

POLL_S = 0.1
TIMEOUT_S = 8.0


def main(argv: list[str]) -> int:
    """Run the command, forward signals, and return its exit code (128 + N after signal N)."""
    received: list[int] = []
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    child = subprocess.Popen(argv)
    watch = LauncherWatch(os.environ, is_rank=False)
    while child.poll() is None and watch.describe_lost_launcher() is None:
        while received:
            child.send_signal(received.pop(0))
        time.sleep(POLL_S)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(TIMEOUT_S)
        finally:
            kill_children_and_exit()
    return to_exit_code(child.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
