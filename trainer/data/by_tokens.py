"""Micro-batches by tokens: sequences of similar length go to one step, split evenly over its micro-batches.

An epoch's order is cut into windows of global batches, each window sorted by length and its batches shuffled, so that a
step's sequences are drawn from a 32nd of lengths and not all. Within a step micro-batches take as many rows as make
their padded tokens alike: few long ones or many short ones. It all follows from seed, epoch and the global batch.
"""

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
WINDOW = 32
"""Global batches that are sorted together."""


def like_lengths_together(order: Index, lengths: Index, global_batch: int, generator: np.random.Generator) -> Index:
    """An epoch's order in which every `global_batch` samples have similar lengths; an incomplete batch stays last."""
    windows = []
    for start in range(0, len(order), WINDOW * global_batch):
        window = order[start : start + WINDOW * global_batch]
        whole = len(window) - len(window) % global_batch
        window = window[np.argsort(-lengths[window], kind="stable")]
        # The shortest are left over where the last batch is not whole.
        batches = window[:whole].reshape(-1, global_batch)
        windows += [*generator.permutation(batches), window[whole:]]
    return np.concatenate(windows) if windows else order


def like_tokens(lengths: Index, count: int) -> list[Index]:
    """Positions of a step's samples for each of `count` micro-batches, whose rows x longest are as even as can be.

    No micro-batch holds more padded tokens than one of equally many rows would; some are empty where samples are few.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    low, high = int(descending[0]), int(descending[0]) * -(-len(order) // count)
    while low < high:
        middle = (low + high) // 2
        if len(_bounds(descending, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    bounds = _bounds(descending, low)
    bounds += [len(order)] * (count - len(bounds))
    return [order[start:end] for start, end in zip([0, *bounds[:-1]], bounds, strict=True)]


def _bounds(descending: Index, most: int) -> list[int]:
    """Where micro-batches of at most so many padded tokens end, filled one after the other."""
    bounds, start = [], 0
    while start < len(descending):
        start = min(len(descending), start + max(1, most // int(descending[start])))
        bounds.append(start)
    return bounds
