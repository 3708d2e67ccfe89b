"""`zerolora estimate CONFIG --max-length auto`: find the longest sequence that fits on one or several GPUs."""

from contextlib import suppress
from dataclasses import replace

from trainer.config import RunConfig, UserError
from trainer.memory.planner import Planner, apply_changes
from trainer.memory.step_time import predict_step
from trainer.patches.packed_attention import check_sequence_parallel_support

SHORTEST, LONGEST = 1024, 2**26
STEP, PRECISION = 256, 64
"""Precision of the search: multiples of 256, less than max(256, result / 64) below the longest that fits."""


def find_longest_sequences(planner: Planner, config: RunConfig, memory: int) -> dict[int, int]:
    """Return the longest sequence that fits, keyed by the number of GPUs that share each sequence.

    Tries 1, the configured number and all GPUs; 0 means that no sequence fits. Numbers that cannot be used are
    omitted, except the configured one, which raises UserError. The micro-batch is one row; all other settings,
    including `auto`, apply as configured.
    """
    longest = {}
    for size in dict.fromkeys((1, config.parallel.sequence, planner.machine.world_size)):
        try:
            if size > 1:
                check_sequence_parallel_support(size, planner.shapes.model)
            longest[size] = _search_longest_length(planner, _set_sequence_parallel_size(config, size), memory)
        except UserError:
            if size == config.parallel.sequence:
                raise
    return longest


def predict_seconds(
    planner: Planner, config: RunConfig, memory: int, longest: dict[int, int], gpu_name: str, network: float
) -> dict[int, float]:
    """Return the seconds per step for each of the longest sequences, omitting those that cannot be predicted."""
    seconds = {}
    for size, length in longest.items():
        if length:
            with suppress(UserError):
                resized, resolved = _resolve_length(planner, _set_sequence_parallel_size(config, size), length, memory)
                seconds[size] = predict_step(resized, resolved, gpu_name, network)[0].total
    return seconds


def _set_sequence_parallel_size(config: RunConfig, size: int) -> RunConfig:
    changes = {"parallel.sequence": size, "training.batch_size": 1, "training.global_batch_size": None}
    return apply_changes(config, changes)


def _resolve_length(planner: Planner, config: RunConfig, length: int, memory: int) -> tuple[Planner, RunConfig]:
    planner = replace(planner, lengths=replace(planner.lengths, longest=length, targets=length))
    return planner, planner.resolve(apply_changes(config, {"dataset.max_length": length}), memory)


def _search_longest_length(planner: Planner, config: RunConfig, memory: int) -> int:
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
    planner, resolved = _resolve_length(planner, config, length, memory)
    estimate = planner.estimate(resolved)
    room = planner.machine.host_memory
    return estimate.needed <= memory and (room is None or estimate.host <= room)


def format_longest_sequences(
    longest: dict[int, int], seconds: dict[int, float], gpu_name: str, context: int | None
) -> list[str]:
    steps = {size: f"; {value:,.1f} s per step on {gpu_name}" for size, value in seconds.items()}
    lines = [
        f"longest sequence with parallel.sequence={size}: {length:,} tokens{steps.get(size, '')}" if length else
        f"longest sequence with parallel.sequence={size}: not even {SHORTEST:,} tokens fit"
        for size, length in longest.items()
    ]  # fmt: skip
    if context is not None and max(longest.values()) > context:
        lines.append(f"the model's context is {context:,} tokens; for longer sequences, set model.rope_scaling")
    return lines
