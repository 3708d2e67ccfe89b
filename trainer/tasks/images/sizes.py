"""Aspect-ratio buckets: images are resized to the pixels of a square of `image.resolution`, in the nearest shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from trainer.config import ImageSection, UserError

LONGEST = 2.0
"""Maximum ratio of a bucket's side to the resolution."""


@dataclass(frozen=True)
class Fit:
    """How an image is resized: scaled to cover the size, then center-cropped."""

    width: int
    height: int
    scaled: tuple[int, int]
    crop: tuple[int, int]
    """Left and top of the crop."""

    def apply(self, image: Image.Image) -> Image.Image:
        left, top = self.crop
        scaled = image.resize(self.scaled, Image.Resampling.LANCZOS)
        return scaled.crop((left, top, left + self.width, top + self.height))


def bucket_sizes(image: ImageSection) -> list[tuple[int, int]]:
    """Return (width, height) of all buckets: multiples of `bucket_step` with at most as many pixels as the square."""
    side, step = image.resolution, image.bucket_step
    if not image.buckets:
        return [(side, side)]
    sizes = {(side, side)}
    for width in range(step, int(LONGEST * side) + 1, step):
        height = min(int(side * side / width) // step * step, int(LONGEST * side))
        if height >= step and min(width, height) * LONGEST >= side:
            sizes |= {(width, height)}
    return sorted(sizes)


def fit(width: int, height: int, sizes: Sequence[tuple[int, int]]) -> Fit:
    """Fit an image of `width` x `height` to the size with the nearest aspect ratio."""
    shape = math.log(width / height)
    to_width, to_height = min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - shape), -size[0] * size[1]))
    factor = max(to_width / width, to_height / height)
    scaled = max(to_width, round(width * factor)), max(to_height, round(height * factor))
    return Fit(to_width, to_height, scaled, ((scaled[0] - to_width) // 2, (scaled[1] - to_height) // 2))


def check_sizes(image: ImageSection, side: int) -> None:
    """Raise UserError for sizes that the VAE and the model cannot divide into latents."""
    settings = {"resolution": image.resolution} | ({"bucket_step": image.bucket_step} if image.buckets else {})
    for name, value in settings.items():
        if value % side:
            near = max(side, round(value / side) * side)
            raise UserError(
                f"image.{name}={value}: sides must be multiples of {side}, as this model's VAE halves them; use {near}"
            )
