"""Deterministic best-fit packing of several documents into one sequence."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return the indices of the documents of each pack; no pack has more than `capacity` tokens.

    Best-fit decreasing: the longest document first, into the fullest pack that still has room (at most 11/9 of the
    least possible number of packs, plus 4: Johnson et al. 1974, "Worst-case performance bounds for simple
    one-dimensional packing algorithms"). Equal inputs give equal packs. Documents within a pack keep the order of the
    input, and so do packs by their first document.
    Raises ValueError if a document is longer than `capacity`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"document of {int(sizes.max())} tokens, capacity {capacity}")
    packs: list[list[int]] = []
    # waiting[room] are the packs with exactly that much room; bit `room` of `rooms` is set if there are any. Finding
    # the least sufficient room takes one shift and one bit trick, so the total is linear in the number of documents.
    waiting: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        sufficient = rooms >> size
        if sufficient:
            room = size + (sufficient & -sufficient).bit_length() - 1
            pack = waiting[room].pop()
            if not waiting[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(document)
        waiting[room - size].append(pack)
        rooms |= 1 << (room - size)
    return sorted((sorted(pack) for pack in packs), key=lambda pack: pack[0])
