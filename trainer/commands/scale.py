"""How strongly a finished adapter is to count (trainer/model/adapter_scale.py), which held-out text can choose.

An adapter that was trained too long says too much with the same words: a part of its update is often better than all
of it (docs/lab/scu.md has measurements).
"""

import argparse
import math

import numpy as np
from numpy.typing import NDArray

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""What `auto` chooses from."""
AUTO = "auto"


def best_scale(losses_FD: NDArray[np.float64]) -> int:
    """The row with the lowest sum: F factors, D documents."""
    return int(np.argmin(losses_FD.sum(1)))


def chosen_on_the_other_half(losses_FD: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each document's loss in the row that is best on the half that it is not in: a choice that has not seen it."""
    chosen = np.empty(losses_FD.shape[1])
    for half in (0, 1):
        chosen[half::2] = losses_FD[best_scale(losses_FD[:, 1 - half :: 2]), half::2]
    return chosen


def scale_of(text: str) -> float | str:
    """An option's value: `auto`, or a factor."""
    if text == AUTO:
        return AUTO
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 10.0:
        raise argparse.ArgumentTypeError(f"{text}: auto, or a factor above 0, such as 0.5 (10 at most)")
    return value
