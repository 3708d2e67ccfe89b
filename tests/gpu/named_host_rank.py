"""A rank of trainer.train that names its host after itself, as if each GPU were a machine of its own."""

import os

from trainer.parallel.ranks.group import end_process
from trainer.train import main

if __name__ == "__main__":
    os.environ["SLURMD_NODENAME"] = f"node{os.environ['RANK']}"
    end_process(main())
