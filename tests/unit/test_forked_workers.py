"""Forked workers end when a pool asks them to, whatever handlers the process has and however early it asks."""

import subprocess
import sys

import pytest

from trainer.data import forked_workers

# The signal comes before the child has run anything of its own: among the hooks of its fork.
PROGRAM = """
import importlib.util, os, signal, sys, time

def early():
    if {asked}:
        os.kill(os.getpid(), signal.SIGTERM)

os.register_at_fork(after_in_child=early)
spec = importlib.util.spec_from_file_location("forked_workers", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
noted = []
signal.signal(signal.SIGTERM, lambda *_: noted.append(1))
with module.ended_by_sigterm():
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.01)
    if not {asked}:
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
    until = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        sys.exit("the worker did not end")
assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGTERM, ended
os.kill(os.getpid(), signal.SIGTERM)
assert noted == [1], "the process itself keeps its handler"
"""


@pytest.mark.parametrize("asked", [True, False], ids=["before its first instruction", "later"])
def test_a_worker_ends(asked: bool) -> None:
    program = PROGRAM.format(asked=asked)
    ran = subprocess.run([sys.executable, "-c", program, forked_workers.__file__], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
