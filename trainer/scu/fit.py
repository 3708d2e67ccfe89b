"""After training with `scu.measure: kl`: as much of the update as the target allows, on text that was kept apart.

    W + c s B A with the largest c <= 1 for which K(c) <= target

The controller sees K on the texts whose term it trains on, a few of them a step. On others it may be higher, and where
the learning rate is too high for the target no lambda brings it down. Scaling the finished update does, by the one
factor that a bisection finds: K grows with c.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Text = TypeVar("Text")
SHARE, MOST, NEIGHBOURS = 8, 64, 8
FEWEST = SHARE * NEIGHBOURS
HALVINGS = 8


@dataclass(frozen=True)
class Fit:
    """What was found."""

    factor: float
    kl_bits_before: float
    """K of the whole update on the text that was kept apart."""
    kl_bits: float
    """K of `factor` of it."""
    texts: int

    def line(self, target: float) -> str:
        """For the console."""
        found = f"scu: on {self.texts} reference texts kept apart K is {self.kl_bits_before:.4f} bits"
        if self.kl_bits_before <= target:
            return f"{found}, within the target of {target:g}"
        if self.factor == 1.0:
            return f"{found}, over the target of {target:g}, and no part of the update is within it: it stays as it is"
        scaled = f"the update is scaled by {self.factor:.3f}, which makes it {self.kl_bits:.4f}"
        return f"{found}, over the target of {target:g}: {scaled} (scu.scale_to_target)"


def keep_apart(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """The texts to train on, and an eighth of all, 64 at most, for `fit`; of fewer than 64 texts none is kept apart.

    Kept are neighbours, eight at a time: pieces of one document are then seldom on both sides.
    """
    groups = min(MOST, len(texts) // SHARE) // NEIGHBOURS
    begins = [(2 * group + 1) * len(texts) // (2 * groups) - NEIGHBOURS // 2 for group in range(groups)]
    kept = {place for begin in begins for place in range(begin, begin + NEIGHBOURS)}
    return [text for place, text in enumerate(texts) if place not in kept], [texts[place] for place in sorted(kept)]


def fit(kl_bits: Callable[[float], float], target: float, texts: int) -> Fit:
    """`kl_bits(c)` is K of c times the update; where none of c = 1/256 and more is within the target, c is 1."""
    before = kl_bits(1.0)
    if before <= target:
        return Fit(1.0, before, before, texts)
    low, high, at_low = 0.0, 1.0, before
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = kl_bits(middle)
        if found <= target:
            low, at_low = middle, found
        else:
            high = middle
    return Fit(low or 1.0, before, at_low, texts)
