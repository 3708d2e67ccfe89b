"""Scaling of the finished update to the target of `scu.measure: kl`, measured on held-out text.

    W + c s B A with the largest c <= 1 for which K(c) <= target

The controller sees K on the reference texts that it trains on, a few per step. On other texts K may be higher, and no
lambda reduces it if the learning rate is too high for the target. Scaling does; K grows with c, so bisection finds c.
"""

from collections.abc import Callable
from dataclasses import dataclass

MIN_TEXTS, MOST_GROUPS, NEIGHBOURS = 64, 8, 8


@dataclass(frozen=True)
class Fit:
    """The factor of the update, and K on held-out texts of the whole and of the scaled update."""

    factor: float
    kl_bits_before: float
    kl_bits: float
    texts: int

    def line(self, target: float) -> str:
        """Return a line for the console."""
        found = f"scu.scale_to_target: on {self.texts} held-out reference texts K is {self.kl_bits_before:.4f} bits"
        if self.kl_bits_before <= target:
            return f"{found}, within the target of {target:g}"
        if self.factor == 1.0:
            return f"{found}, above the target of {target:g} at every scale: the update is not scaled"
        scaled = f"the update is scaled by {self.factor:.3f}, which reduces it to {self.kl_bits:.4f}"
        return f"{found}, above the target of {target:g}: {scaled}"


def choose_held_out(count: int) -> set[int]:
    """Choose 1/8 of the positions of `count` texts, at most 64; none if there are fewer than 64 texts."""
    # Groups of neighbours, so that pieces of one document are rarely on both sides.
    groups = min(count // MIN_TEXTS, MOST_GROUPS)
    begins = [(2 * group + 1) * count // (2 * groups) - NEIGHBOURS // 2 for group in range(groups)]
    return {begin + place for begin in begins for place in range(NEIGHBOURS)}


def fit(kl_bits: Callable[[float], float], target: float, texts: int) -> Fit:
    """Find the largest c, in steps of 1/256, with `kl_bits(c)` within the target; 1 if there is none."""
    low, high, found = 0.0, 1.0, {1.0: kl_bits(1.0)}
    while found[1.0] > target and high - low > 1 / 256:
        middle = (low + high) / 2
        found[middle] = kl_bits(middle)
        low, high = (middle, high) if found[middle] <= target else (low, middle)
    return Fit(low or 1.0, found[1.0], found[low or 1.0], texts)
