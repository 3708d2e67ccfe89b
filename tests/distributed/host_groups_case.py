"""Runs of four ranks on two hosts: the base sharded over all of them, over each host, and over pairs across hosts.

python -m tests.distributed.host_groups_case FOLDER      FOLDER/bytes-RANK.json: received weights, by case
Each rank calls its host `node0` or `node1`, as SLURM does. Ranks 0 and 2 are on node0.
"""

import json
import os
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.distributed.matrix import run_case
from tests.rank_program import join
from trainer.parallel.engine.layer_gather import unit
from trainer.parallel.ranks.group import exit_process, leave_process_group
from trainer.parallel.ranks.signals import StopRequest

COMMON = {"zero.stage": 3, "training.max_steps": 4, "training.save_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "all": {"zero.shard_within": "all"},
    "host": {"zero.shard_within": "host"},
    "auto": {},
    "pairs": {"zero.shard_within": 2},
    "nf4": {"zero.shard_within": "host", "adapter": "qlora"},
    "nf4-all": {"zero.shard_within": "all", "adapter": "qlora"},
    "resumed": {
        "zero.shard_within": "host", "output_dir": "OUT/all", "training.max_steps": 6,
        "training.resume_from_checkpoint": "latest",
    },
    "resumed-all": {
        "zero.shard_within": "all", "output_dir": "OUT/auto", "training.max_steps": 6,
        "training.resume_from_checkpoint": "latest",
    },
    "uneven": {
        "zero.shard_within": "host", "output_dir": "OUT/pairs", "training.max_steps": 6,
        "training.resume_from_checkpoint": "latest",
    },
}  # fmt: skip


def host_of(rank: int, case: str = "") -> str:
    """In `uneven` rank 3 is alone on a host, as after an elastic restart without some of its GPUs."""
    return f"node{rank // 3 if case == 'uneven' else rank % 2}"


def main() -> int:
    folder, ranks = join(timeout_minutes=5)
    received, case = {"near": 0, "far": 0}, ""
    gather = unit._all_gather

    def counted(whole: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> Any:
        for rank in range(ranks.world_size) if group is None else dist.get_process_group_ranks(group):
            if rank != ranks.rank:
                received["near" if host_of(rank, case) == host_of(ranks.rank, case) else "far"] += shard.nbytes
        return gather(whole, shard, group)

    unit._all_gather = counted
    found, stop = {}, StopRequest()
    for name, changes in CASES.items():
        received |= {"near": 0, "far": 0}
        case, os.environ["SLURMD_NODENAME"] = name, host_of(ranks.rank, name)
        overrides = COMMON | {
            key: value.replace("OUT", str(folder)) if isinstance(value, str) else value
            for key, value in changes.items()
        }
        run_case(folder, {"name": name, "overrides": overrides}, ranks, stop)
        found[name] = dict(received)
    (folder / f"bytes-{ranks.rank}.json").write_text(json.dumps(found))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main())
