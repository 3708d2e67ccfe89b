"""Child commands of `zerolora train` that use its terminal, such as the preparation of the data."""

import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from launcher.supervision.failure_report import describe_status
from launcher.supervision.processes import end_sessions
from launcher.supervision.stop_signals import PASSED_ON, to_exit_code
from launcher.supervision.terminal import say
from trainer.contract.exit_codes import exit_code_after
from trainer.contract.rank_variables import host_name

POLL_S = 0.05
PATIENCE_S = 10.0


def run_child(argv: Sequence[str], failed: str = "") -> int:
    """Run `python -m launcher.module ...` and return its exit code, 128 + N after signal N and 75 after SIGUSR1.

    Signals are forwarded; the child then has `PATIENCE_S`, or until a second signal. Prints `failed` if it was killed.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the child unblocks it once it can handle it
    child = subprocess.Popen(argv, start_new_session=True)
    came: list[tuple[int, float]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        came.append((number, time.monotonic()))

    before = {number: signal.signal(number, forward) for number in PASSED_ON}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        while (code := child.poll()) is None:
            if came and (len(came) > 1 or time.monotonic() - came[0][1] > PATIENCE_S):
                break
            time.sleep(POLL_S)
    finally:
        end_sessions([child.pid])
        code = child.wait()
        for passed_on, handler in before.items():
            signal.signal(passed_on, handler)
    if came:
        return exit_code_after(came[0][0])
    if code < 0 and failed:
        say(f"{failed}: process {child.pid} on {host_name()} {describe_status(code)}")
    return to_exit_code(code)
