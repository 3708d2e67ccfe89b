"""Groups of ranks that each hold one copy of a frozen base (zero.shard_within), so that hosts exchange no weights."""

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist

from trainer.config import UserError

Within = Literal["auto", "host", "all"] | int


def list_groups(within: Within, hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each group; `hosts` is the host of each rank, and `auto` means one group of all ranks.

    Raises UserError if the ranks cannot be divided into groups of `within`.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    if within == "host":
        return list(by_host.values())
    ordered = [rank for ranks in by_host.values() for rank in ranks]
    if not isinstance(within, int):
        return [ordered]
    if len(ordered) % within:
        raise UserError(
            f"zero.shard_within={within}: {len(ordered)} ranks cannot be divided into groups of {within}. Use host, "
            "all or a divisor of the number of ranks"
        )
    return [ordered[start : start + within] for start in range(0, len(ordered), within)]


def form_group(within: Within, hosts: Sequence[str]) -> dist.ProcessGroup | None:
    """Create the process groups, on every rank, and return that of this rank; None if all ranks are one group."""
    groups = list_groups(within, hosts)
    if len(groups) == 1:
        return None
    formed = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in formed if dist.get_rank() in ranks)
