"""A rank of a real run that writes down what the SCU's check between ranks sees; see test_scu_ranks.py.

torchrun -m tests.gpu.scu_rank FOLDER SPOIL CONFIG [key=value ...]    SPOIL: from this step on rank 1's lambda is off
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import trainer.train
from trainer.parallel.ranks.group import exit_process
from trainer.scu.controller import ScuController


def record(folder: Path, spoil: int) -> None:
    """Before every check a line `step lambda` per rank, lambda to the bit; the check itself is the product's."""
    check = ScuController._check_ranks_agree

    def checked(self: ScuController, step: int) -> None:
        from torch import distributed

        rank = distributed.get_rank()
        if rank == 1 and step >= spoil:
            self.state = replace(self.state, lambda_=math.nextafter(self.state.lambda_, math.inf))
        with (folder / f"rank-{rank}.txt").open("a") as file:
            file.write(f"{step} {self.state.lambda_.hex()} {distributed.get_backend()}\n")
        check(self, step)

    ScuController._check_ranks_agree = checked  # type: ignore[method-assign]


if __name__ == "__main__":
    record(Path(sys.argv[1]), int(sys.argv[2]))
    exit_process(trainer.train.main(sys.argv[3:]))
