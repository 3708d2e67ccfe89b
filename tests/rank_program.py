"""How a program begins that DeepSpeed's launcher starts as several ranks of a test."""

import argparse
from pathlib import Path

from trainer.parallel.ranks.group import Ranks, form_process_group


def join(timeout_minutes: float) -> tuple[Path, Ranks]:
    """Return the only path on the command line (next to the launcher's --local_rank), and this rank, joined."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("path", type=Path)
    path: Path = parser.parse_args().path
    ranks = Ranks.from_environment()
    form_process_group(ranks, timeout_minutes)
    return path, ranks
