"""The scale of a finished adapter (trainer/model/adapter_scale.py), which can be chosen on held-out text.

For an adapter that was trained too long, a fraction of its update is often better than all of it (docs/lab/scu.md).
"""

import argparse
import math

import numpy as np
from numpy.typing import NDArray

SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Candidates of `auto`."""
AUTO = "auto"


def best_scale(losses_FD: NDArray[np.float64]) -> int:
    """Return the row with the lowest sum, of losses by factor F and document D."""
    return int(np.argmin(losses_FD.sum(1)))


def cross_validated_losses(losses_FD: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each document's loss at the scale that is best on the half of the documents without it."""
    chosen = np.empty(losses_FD.shape[1])
    for half in (0, 1):
        chosen[half::2] = losses_FD[best_scale(losses_FD[:, 1 - half :: 2]), half::2]
    return chosen


def parse_scale(text: str) -> float | str:
    """Parse the value of --scale: `auto`, or a factor."""
    if text == AUTO:
        return AUTO
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 10.0:
        raise argparse.ArgumentTypeError(f"{text}: must be auto, or a factor above 0 and at most 10, such as 0.5")
    return value
