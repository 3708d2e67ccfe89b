"""Scaling of the finished update to the target of `scu.measure: kl`, measured on held-out text.

    W + c s B A with the largest c <= 1 for which K(c) <= target

The controller sees K on the reference texts that it trains on, a few per step. On other texts K may be higher, and no
lambda reduces it if the learning rate is too high for the target. Scaling does; K grows with c, so bisection finds c.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Text = TypeVar("Text")
SHARE, MOST, NEIGHBOURS = 8, 64, 8
MIN_TEXTS = SHARE * NEIGHBOURS
BISECTIONS = 8


@dataclass(frozen=True)
class Fit:
    """The factor of the update, and what it does to K on held-out text."""

    factor: float
    kl_bits_before: float
    """K of the unscaled update."""
    kl_bits: float
    """K of the scaled update."""
    texts: int

    def line(self, target: float) -> str:
        """Return a line for the console."""
        found = f"scu: on {self.texts} held-out reference texts K is {self.kl_bits_before:.4f} bits"
        if self.kl_bits_before <= target:
            return f"{found}, within the target of {target:g}"
        if self.factor == 1.0:
            return f"{found}, above the target of {target:g}, and no scale brings it below: the update is not scaled"
        scaled = f"the update is scaled by {self.factor:.3f}, which reduces it to {self.kl_bits:.4f}"
        return f"{found}, above the target of {target:g}: {scaled} (scu.scale_to_target)"


def split_held_out(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Split texts into those to train on and an eighth (at most 64) for `fit`; none is held out of fewer than 64.

    Groups of eight neighbours are held out, so that pieces of one document are rarely on both sides.
    """
    groups = min(MOST, len(texts) // SHARE) // NEIGHBOURS
    begins = [(2 * group + 1) * len(texts) // (2 * groups) - NEIGHBOURS // 2 for group in range(groups)]
    kept = {place for begin in begins for place in range(begin, begin + NEIGHBOURS)}
    return [text for place, text in enumerate(texts) if place not in kept], [texts[place] for place in sorted(kept)]


def fit(kl_bits: Callable[[float], float], target: float, texts: int) -> Fit:
    """Find the largest c, in steps of 1/256, with `kl_bits(c)` within the target; 1 if there is none."""
    before = kl_bits(1.0)
    if before <= target:
        return Fit(1.0, before, before, texts)
    low, high, at_low = 0.0, 1.0, before
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = kl_bits(middle)
        if found <= target:
            low, at_low = middle, found
        else:
            high = middle
    return Fit(low or 1.0, before, at_low, texts)
