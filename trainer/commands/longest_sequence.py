"""`zerolora estimate CONFIG --max-length auto`: the longest sequence that fits a GPU, and several that share it."""

from dataclasses import replace

from trainer.config import RunConfig, UserError
from trainer.memory.planner import Planner, apply_changes
from trainer.patches.packed_attention import check_shareable

SHORTEST, LONGEST = 1024, 2**26
STEP, PRECISION = 256, 64
"""The result is a multiple of 256, and at most the larger of 256 and 1/64 below the longest that fits."""


def find_longest(planner: Planner, config: RunConfig, memory: int, host: int | None) -> dict[int, int]:
    """Return the longest sequence by the number of GPUs that share it: one, and all; 0 if none fits.

    `host` is the host memory of each rank, or None. Other settings and `auto` apply as configured, with one row.
    """
    longest = {}
    for size in dict.fromkeys((1, config.parallel.sequence, planner.machine.world_size)):
        changes = {"parallel.sequence": size, "training.batch_size": 1, "training.global_batch_size": None}
        shared = apply_changes(config, changes)
        try:
            if size > 1:
                check_shareable(size, planner.shapes.model)
            longest[size] = _find(planner, shared, memory, host)
        except UserError:
            if size == config.parallel.sequence:
                raise
    return longest


def _find(planner: Planner, config: RunConfig, memory: int, host: int | None) -> int:
    fits, too_long = 0, SHORTEST
    while too_long <= LONGEST and _fits(planner, config, too_long, memory, host):
        fits, too_long = too_long, 2 * too_long
    while fits and too_long - fits > max(STEP, fits // PRECISION):
        middle = (fits + too_long) // 2 // STEP * STEP
        if _fits(planner, config, middle, memory, host):
            fits = middle
        else:
            too_long = middle
    return fits


def _fits(planner: Planner, config: RunConfig, length: int, memory: int, host: int | None) -> bool:
    planner = replace(planner, lengths=replace(planner.lengths, longest=length, targets=length))
    resolved = planner.resolve(apply_changes(config, {"dataset.max_length": length}), memory)
    found = planner.estimate(resolved)
    return found.needed <= memory and (host is None or found.host <= host)


def longest_lines(longest: dict[int, int], of_model: int | None) -> list[str]:
    """Return the lines to print, with a warning beyond the length that the model was made for."""
    lines = [
        f"longest sequence with parallel.sequence={size}: {length:,} tokens" if length else
        f"longest sequence with parallel.sequence={size}: not even {SHORTEST:,} tokens fit"
        for size, length in longest.items()
    ]  # fmt: skip
    if of_model is not None and max(longest.values()) > of_model:
        lines.append(f"the model was made for {of_model:,} tokens; beyond these, set model.rope_scaling")
    return lines
