"""The effect of a signal on a rank: its exit code, what is remembered, and which of several signals wins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# Sends itself the signals named on the command line; "train" and "agree" are the loop's begin and end.
PROGRAM = """
import os, signal, sys
from trainer.parallel.ranks.signals import StopRequest
stop = StopRequest()
stop.write_exit_code = lambda code: print("ends with", code, flush=True)
for word in sys.argv[1:]:
    if word == "train":
        stop.training = True
    elif word == "agree":
        stop.agree_on_signal()
    else:
        os.kill(os.getpid(), getattr(signal, word))
print("alive", bool(stop))
sys.exit(stop.exit_code if stop else 0)
"""


@pytest.mark.parametrize(
    ("words", "code", "alive"),
    [
        ("SIGUSR1", 75, False),
        ("SIGTERM", 143, False),
        ("SIGINT", 130, False),
        ("train SIGUSR1", 75, True),
        ("train SIGTERM", 143, True),
        ("train SIGUSR1 SIGTERM", 75, True),
        ("train SIGUSR1 SIGINT", 130, True),
        ("train SIGINT SIGINT", 130, False),
        ("train SIGTERM SIGTERM", 143, True),
        ("train SIGUSR1 agree SIGTERM SIGINT", 75, True),
        ("train agree", 0, True),
        ("train agree SIGUSR1", 75, False),
    ],
)
def test_signals(words: str, code: int, alive: bool) -> None:
    """Without a save to wait for it ends at once; after the ranks have agreed on a stop nothing changes that."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()],
        cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("alive" in done.stdout) == alive
    assert (f"ends with {code}" in done.stdout) != alive


RANK = """
import os, signal, sys
import torch.distributed as dist
from trainer.parallel.ranks.signals import StopRequest
dist.init_process_group("gloo")
stop = StopRequest()
stop.training = True
word = sys.argv[1 + dist.get_rank()]
if word != "none":
    os.kill(os.getpid(), getattr(signal, word))
stop.agree_on_signal()
# One write: two ranks share the pipe.
sys.stdout.write(f"rank {dist.get_rank()}: {stop.exit_code if stop else 0}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("words", "code"), [("none SIGUSR1", 75), ("SIGUSR1 SIGTERM", 75)])
def test_ranks_agree(words: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "rank.py"), *words.split()],
        cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [f"rank 0: {code}", f"rank 1: {code}"], done.stderr
    assert done.returncode == 0
