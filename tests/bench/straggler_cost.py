"""What naming a slow rank costs a step: `torchrun --nproc_per_node 2 -m tests.bench.straggler_cost [--micro-steps N]`.

Microseconds a step of one micro-step, of the watch alone, comparisons of every window included; by NCCL where each rank
has a GPU, with times from its clock, else by gloo. Rank 0 prints the median of nine windows.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.stragglers import WINDOW_STEPS, StragglerWatch

WINDOWS = 9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-steps", type=int, default=1)
    arguments = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    watch = StragglerWatch(Ranks(rank, world, rank), device, log=lambda line: None)
    found = []
    for window in range(WINDOWS + 1):
        dist.barrier()
        began = time.perf_counter()
        for step in range(1, WINDOW_STEPS + 1):
            for _ in range(arguments.micro_steps):
                with watch.time_own_work(on_device=False):
                    pass
                with watch.time_own_work():
                    pass
            watch.compare(window * WINDOW_STEPS + step)
        found.append((time.perf_counter() - began) / WINDOW_STEPS)
    if rank == 0:
        print(f"{device.type}, {world} ranks: {statistics.median(found[1:]) * 1e6:.1f} us a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
