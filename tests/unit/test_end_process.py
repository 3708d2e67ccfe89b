"""A rank's last moments: everything Python does at its end is done, and what its libraries' destructors say is not."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import atexit, logging, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from trainer.parallel.ranks.group import exit_process

pool = ThreadPoolExecutor(2)  # left open, as libraries leave theirs
pool.submit(print, "submitted").result()
slow = pool.submit(lambda: (time.sleep(0.3), print("finished")))
threading.Thread(target=lambda: (time.sleep(0.2), print("joined"))).start()
atexit.register(print, "at exit")
sys.stdout.write("last words")  # no line end: still in the buffer
exit_process(7)
"""

UNDER_MPI = """
import sys
sys.modules["mpi4py.MPI"] = sys
from trainer.parallel.ranks.group import exit_process

try:
    exit_process(3)
except SystemExit as error:
    print("left", error.code)
"""


def test_threads_are_joined_and_exit_functions_run() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 7, ran.stderr
    for expected in ("submitted", "joined", "finished", "at exit", "last words"):
        assert expected in ran.stdout


def test_mpi_is_left_to_python() -> None:
    """mpi4py finalises MPI when the interpreter ends; mpirun takes a rank that does not for a failure."""
    ran = subprocess.run([sys.executable, "-c", UNDER_MPI], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines()[-1] == "left 3", ran.stderr
