"""Process groups: how long their collectives wait."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
from datetime import timedelta
import torch
import torch.distributed as dist
from trainer.parallel.ranks.group import Ranks, set_process_group_timeouts, form_process_group

form_process_group(Ranks(0, 1, 0), timeout_minutes=3)
dist.new_group(backend="gloo")
set_process_group_timeouts(77)
groups = list(dist.distributed_c10d._world.pg_map)
assert len(groups) >= 2
for group in groups:
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=77)
"""


def test_every_group_waits_as_long_as_the_first() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
