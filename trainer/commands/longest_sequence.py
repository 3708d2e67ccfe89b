"""`zerolora estimate CONFIG --max-length auto`: the longest sequence that fits a GPU, and several that share it."""

from contextlib import suppress
from dataclasses import replace

from trainer.config import RunConfig, UserError
from trainer.memory.planner import Planner, apply_changes
from trainer.memory.step_time import predict_step
from trainer.patches.packed_attention import check_shareable

SHORTEST, LONGEST = 1024, 2**26
STEP, PRECISION = 256, 64
"""The result is a multiple of 256, and at most the larger of 256 and 1/64 below the longest that fits."""


def find_longest(planner: Planner, config: RunConfig, memory: int) -> dict[int, int]:
    """Return the longest sequence by the number of GPUs that share it: one, and all; 0 if none fits.

    Host memory is that of `planner.machine`. Other settings and `auto` apply as configured, with one row.
    """
    longest = {}
    for size in dict.fromkeys((1, config.parallel.sequence, planner.machine.world_size)):
        changes = {"parallel.sequence": size, "training.batch_size": 1, "training.global_batch_size": None}
        shared = apply_changes(config, changes)
        try:
            if size > 1:
                check_shareable(size, planner.shapes.model)
            longest[size] = _find(planner, shared, memory)
        except UserError:
            if size == config.parallel.sequence:
                raise
    return longest


def predict_seconds(
    planner: Planner, config: RunConfig, memory: int, longest: dict[int, int], card: str, network: float
) -> dict[int, float]:
    """Return the seconds of a step of each of the longest sequences, where they can be predicted."""
    found = {}
    for size, length in longest.items():
        if length:
            changes = {"parallel.sequence": size, "training.batch_size": 1, "training.global_batch_size": None}
            of_length = _with_length(planner, length)
            changes["dataset.max_length"] = length
            with suppress(UserError):
                resolved = of_length.resolve(apply_changes(config, changes), memory)
                found[size] = predict_step(of_length, resolved, card, network)[0].total
    return found


def _with_length(planner: Planner, length: int) -> Planner:
    return replace(planner, lengths=replace(planner.lengths, longest=length, targets=length))


def _find(planner: Planner, config: RunConfig, memory: int) -> int:
    fits, too_long = 0, SHORTEST
    while too_long <= LONGEST and _fits(planner, config, too_long, memory):
        fits, too_long = too_long, 2 * too_long
    while fits and too_long - fits > max(STEP, fits // PRECISION):
        middle = (fits + too_long) // 2 // STEP * STEP
        if _fits(planner, config, middle, memory):
            fits = middle
        else:
            too_long = middle
    return fits


def _fits(planner: Planner, config: RunConfig, length: int, memory: int) -> bool:
    planner = _with_length(planner, length)
    resolved = planner.resolve(apply_changes(config, {"dataset.max_length": length}), memory)
    found = planner.estimate(resolved)
    room = planner.machine.host_room
    return found.needed <= memory and (room is None or found.host <= room)


def longest_lines(longest: dict[int, int], seconds: dict[int, float], card: str, of_model: int | None) -> list[str]:
    """Return the lines to print, with a warning beyond the length that the model was made for."""
    steps = {size: f"; a step on {card} {value:,.1f} s" for size, value in seconds.items()}
    lines = [
        f"longest sequence with parallel.sequence={size}: {length:,} tokens{steps.get(size, '')}" if length else
        f"longest sequence with parallel.sequence={size}: not even {SHORTEST:,} tokens fit"
        for size, length in longest.items()
    ]  # fmt: skip
    if of_model is not None and max(longest.values()) > of_model:
        lines.append(f"the model was made for {of_model:,} tokens; beyond these, set model.rope_scaling")
    return lines
