"""Aspect-ratio buckets: sizes to which images are resized, with about `image.resolution`^2 pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from trainer.config import ImageSection, UserError

MAX_SIDE_RATIO = 2.0
"""Maximum ratio of a bucket's longer side to the resolution."""


@dataclass(frozen=True)
class ResizeAndCrop:
    """How an image is resized: scaled to cover the target size, then center-cropped."""

    width: int
    height: int
    scaled_size: tuple[int, int]
    crop_origin: tuple[int, int]
    """Left and top edges of the crop."""

    def apply(self, image: Image.Image) -> Image.Image:
        left, top = self.crop_origin
        scaled = image.resize(self.scaled_size, Image.Resampling.LANCZOS)
        return scaled.crop((left, top, left + self.width, top + self.height))


def list_bucket_sizes(image: ImageSection) -> list[tuple[int, int]]:
    """Return the (width, height) of each bucket: multiples of `bucket_step` with at most resolution^2 pixels."""
    side, step = image.resolution, image.bucket_step
    if not image.buckets:
        return [(side, side)]
    sizes = {(side, side)}
    for width in range(step, int(MAX_SIDE_RATIO * side) + 1, step):
        height = min(int(side * side / width) // step * step, int(MAX_SIDE_RATIO * side))
        if height >= step and min(width, height) * MAX_SIDE_RATIO >= side:
            sizes |= {(width, height)}
    return sorted(sizes)


def fit_to_bucket(width: int, height: int, sizes: Sequence[tuple[int, int]]) -> ResizeAndCrop:
    shape = math.log(width / height)
    to_width, to_height = min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - shape), -size[0] * size[1]))
    factor = max(to_width / width, to_height / height)
    scaled = max(to_width, round(width * factor)), max(to_height, round(height * factor))
    return ResizeAndCrop(to_width, to_height, scaled, ((scaled[0] - to_width) // 2, (scaled[1] - to_height) // 2))


def check_sizes(image: ImageSection, multiple: int) -> None:
    """Raise UserError if image.resolution (or bucket_step, with buckets) is not a multiple of `multiple` pixels."""
    settings = {"resolution": image.resolution} | ({"bucket_step": image.bucket_step} if image.buckets else {})
    for name, value in settings.items():
        if value % multiple:
            near = max(multiple, round(value / multiple) * multiple)
            raise UserError(f"image.{name}={value}: must be a multiple of {multiple} for this model; use {near}")
