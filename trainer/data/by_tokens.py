"""Micro-batches by tokens: steps of sequences of similar length, split evenly over micro-batches.

An epoch's order is cut into windows of global batches. Each window is sorted by length and its batches are shuffled, so
that a step's sequences come from one 32nd of the lengths. Within a step, micro-batches have about equally many padded
tokens: few long rows or many short ones. Everything follows from the seed, the epoch and the global batch.
"""

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
WINDOW = 32
"""Number of global batches sorted together."""


def like_lengths_together(order: Index, lengths: Index, global_batch: int, generator: np.random.Generator) -> Index:
    """Return an epoch's order with samples of similar lengths in each global batch; an incomplete batch stays last."""
    windows = []
    for start in range(0, len(order), WINDOW * global_batch):
        window = order[start : start + WINDOW * global_batch]
        whole = len(window) - len(window) % global_batch
        window = window[np.argsort(-lengths[window], kind="stable")]
        # The shortest remain for the incomplete last batch.
        batches = window[:whole].reshape(-1, global_batch)
        windows += [*generator.permutation(batches), window[whole:]]
    return np.concatenate(windows) if windows else order


def like_tokens(lengths: Index, count: int) -> list[Index]:
    """Return the positions of a step's samples for each of `count` micro-batches, with padded tokens balanced.

    No micro-batch has more padded tokens than with equally many rows each; some are empty if there are few samples.
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
    """Return the ends of micro-batches of at most `most` padded tokens, filled one after the other."""
    bounds, start = [], 0
    while start < len(descending):
        start = min(len(descending), start + max(1, most // int(descending[start])))
        bounds.append(start)
    return bounds
