"""A rank of trainer.train that names its host as if each GPU were one, or each of ZEROLORA_TEST_HOSTS equal parts."""

import os

from trainer.parallel.ranks.group import exit_process
from trainer.train import main

if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    hosts = int(os.environ.get("ZEROLORA_TEST_HOSTS", ranks))
    os.environ["SLURMD_NODENAME"] = f"node{int(os.environ['RANK']) * hosts // ranks}"
    exit_process(main())
