"""Micro-batches of images: the same global batches, noise and timesteps on any number of ranks.

All random choices for an image (noise, timestep, flip, dropped caption) depend only on the seed, the epoch and the
image's position in the epoch, so they are the same in a resumed run or on a different number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config import ImageSection
from trainer.data.batches import GlobalBatches
from trainer.tasks.images.data import ImageEntry, ImageSamples
from trainer.tasks.images.families import Conditions

EVALUATION_TIMESTEPS = 4
SIZES = "sizes"
"""Name of SDXL's size and crop conditioning, kept in fp32 because 16-bit types would round it."""
_EVALUATION, _PRIOR, _TRAINING = 1, 2, 3


@dataclass(frozen=True)
class SizeGroup:
    """Images of one size, as tensors on the host."""

    latents: Tensor
    """Latents [B, C, H, W]."""
    noise: Tensor
    timesteps: Tensor
    """Timesteps [B] in [0, 1], as fractions of the scheduler's range."""
    conditions: Conditions
    weights: Tensor
    """Loss weights [B]; 0 for padding."""


@dataclass(frozen=True)
class ImageBatch:
    groups: tuple[SizeGroup, ...]
    tokens: int
    """Number of images."""
    target_count: int
    """Number of images by which the loss is divided, excluding class images."""

    @property
    def target_weight(self) -> float:
        return self.target_count


@dataclass(frozen=True)
class _Row:
    entry: ImageEntry
    caption: int
    latents: Tensor
    noise: Tensor
    time: float
    weight: float
    samples: ImageSamples


class ImageBatches(GlobalBatches):
    """Provides this rank's part of every global batch of images.

    A global batch has images of one size if possible; an epoch's remaining images form mixed batches.
    """

    def __init__(
        self, samples: ImageSamples, draw_timestep: Callable[[torch.Generator], float], image: ImageSection, *,
        prior: ImageSamples | None, batch_size: int, accumulation: int, rank: int, world_size: int, seed: int,
        shuffle: bool,
    ) -> None:  # fmt: skip
        super().__init__(batch_size=batch_size, accumulation=accumulation, rank=rank, world_size=world_size)
        self.samples, self.prior = samples, prior
        self._draw_time, self._image, self._seed, self._shuffle = draw_timestep, image, seed, shuffle
        self._order: tuple[int, int, NDArray[np.int64]] | None = None

    @property
    def samples_per_epoch(self) -> int:
        return len(self.samples)

    def build_step_batches(self, epoch: int, offset: int) -> tuple[list[ImageBatch], int]:
        selected = self.get_order(epoch)[offset : offset + self.global_batch_size]
        positions = np.arange(offset, offset + len(selected))
        batches = []
        for part in self.list_rank_slices():
            group_count = self._count_size_groups(selected, positions, part.start - self.rank * self.batch_size)
            batches.append(self._build_batch(epoch, selected[part], positions[part], group_count))
        return batches, len(selected)

    def _count_size_groups(self, selected: NDArray[np.int64], positions: NDArray[np.int64], first: int) -> int:
        """Return the largest number of size groups on any rank in the micro-step that begins at `first`."""
        counts = []
        for start in range(first, first + self.batch_size * self.world_size, self.batch_size):
            part = slice(start, start + self.batch_size)
            entries = [self.samples[int(index)] for index in selected[part]]
            if self.prior is not None:
                entries += [self.prior[int(position) % len(self.prior)] for position in positions[part]]
            counts.append(len({(entry.width, entry.height) for entry in entries}))
        return max(counts)

    def get_order(self, epoch: int) -> NDArray[np.int64]:
        size = self.global_batch_size
        if self._order is None or self._order[:2] != (epoch, size):
            order = draw_order(self.samples, epoch, group_size=size, seed=self._seed, shuffle=self._shuffle)
            self._order = epoch, size, order
        return self._order[2]

    def _build_batch(
        self, epoch: int, indices: NDArray[np.int64], positions: NDArray[np.int64], group_count: int
    ) -> ImageBatch:
        rows = [
            self._build_row(self.samples, int(index), epoch, int(position), _TRAINING, 1.0)
            for index, position in zip(indices, positions, strict=True)
        ]
        count = len(rows)
        if self.prior is not None:
            weight = self._image.prior_weight
            rows += [
                self._build_row(self.prior, int(position) % len(self.prior), epoch, int(position), _PRIOR, weight)
                for position in positions
            ]
        if not rows:  # since every rank must run the same number of micro-steps
            rows = [self._build_row(self.samples, 0, epoch, 0, _TRAINING, 0.0)]
        return collate_images(rows, count, group_count)

    def _build_row(
        self, samples: ImageSamples, index: int, epoch: int, position: int, kind: int, weight: float
    ) -> _Row:
        image, entry = self._image, samples[index]
        generator = build_seeded_generator(self._seed, epoch, position, kind)
        mirrored, dropped = torch.rand(2, generator=generator).tolist()
        mean, std = samples.store.load_latents(entry.index, flipped=image.flip and mirrored < 0.5)
        time = self._draw_time(generator)
        latents = mean + std * torch.randn(mean.shape, generator=generator)
        noise = torch.randn(mean.shape, generator=generator)
        caption = samples.store.captions.index("") if dropped < image.caption_dropout else entry.caption
        return _Row(entry, caption, latents, noise, time, weight, samples)


def iterate_evaluation_images(
    samples: ImageSamples, *, batch_size: int, rank: int, world_size: int
) -> Iterator[ImageBatch]:
    """Yield this rank's batches of held-out images, with fixed timesteps and noise.

    All ranks yield the same number of batches; a rank without images left yields an image with zero weight.
    """
    count = len(samples) * EVALUATION_TIMESTEPS
    for start in range(0, count, batch_size * world_size):
        firsts = range(start, start + batch_size * world_size, batch_size)
        parts = [range(first, min(first + batch_size, count)) for first in firsts]
        entries = [[samples[at // EVALUATION_TIMESTEPS] for at in part] for part in parts]
        group_count = max(len({(entry.width, entry.height) for entry in part}) for part in entries)
        rows = [_build_evaluation_row(samples, at, 1.0) for at in parts[rank]]
        rows = rows or [_build_evaluation_row(samples, 0, 0.0)]
        yield collate_images(rows, len(parts[rank]), group_count)


def _build_evaluation_row(samples: ImageSamples, position: int, weight: float) -> _Row:
    index, time = divmod(position, EVALUATION_TIMESTEPS)
    entry = samples[index]
    mean, _ = samples.store.load_latents(entry.index, flipped=False)
    noise = torch.randn(mean.shape, generator=build_seeded_generator(0, index, time, _EVALUATION))
    return _Row(entry, entry.caption, mean, noise, (time + 0.5) / EVALUATION_TIMESTEPS, weight, samples)


def build_seeded_generator(*numbers: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed % 2**63)


def draw_order(samples: ImageSamples, epoch: int, *, group_size: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(samples)) if shuffle else np.arange(len(samples))
    return group_by_size(order, samples.sizes, group_size, rng if shuffle else None)


def group_by_size(
    order: NDArray[np.int64], sizes: NDArray[np.int64], group_size: int, rng: np.random.Generator | None
) -> NDArray[np.int64]:
    """Reorder images into runs of `group_size` images with the same size; the remaining images come last."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index in order.tolist():
        groups.setdefault((int(sizes[index, 0]), int(sizes[index, 1])), []).append(index)
    if len(groups) == 1:
        return order
    runs, remaining = [], []
    for members in groups.values():
        end = len(members) // group_size * group_size
        runs += [members[start : start + group_size] for start in range(0, end, group_size)]
        remaining += members[end:]
    if rng is not None:
        runs = [runs[at] for at in rng.permutation(len(runs))]
    return np.array([index for run in runs for index in run] + remaining, dtype=np.int64)


def collate_images(rows: Sequence[_Row], count: int, group_count: int) -> ImageBatch:
    """Group rows by size and stack them; the loss is divided by `count`.

    Groups with zero weight are added until there are `group_count` groups: at stage 3, all ranks take part in the
    all-gathers of every forward pass, so a rank with fewer passes would block the other ranks.
    """
    groups: dict[tuple[int, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.latents.shape), []).append(row)
    stacked = [_stack(members) for members in groups.values()]
    stacked += [replace(stacked[0], weights=torch.zeros_like(stacked[0].weights))] * (group_count - len(stacked))
    return ImageBatch(tuple(stacked), tokens=sum(row.weight > 0 for row in rows), target_count=count)


def _stack(rows: Sequence[_Row]) -> SizeGroup:
    stored = [row.samples.store.load_conditions(row.caption) for row in rows]
    conditions = [each | {SIZES: build_size_conditions(row.entry)} for each, row in zip(stored, rows, strict=True)]
    return SizeGroup(
        torch.stack([row.latents for row in rows]),
        torch.stack([row.noise for row in rows]),
        torch.tensor([row.time for row in rows], dtype=torch.float64),
        {name: torch.stack([condition[name] for condition in conditions]) for name in conditions[0]},
        torch.tensor([row.weight for row in rows]),
    )


def build_size_conditions(entry: ImageEntry) -> Tensor:
    """Return SDXL's conditioning: original height and width, top and left of the crop, target height and width."""
    (width, height), (left, top) = entry.original, entry.crop
    return torch.tensor([height, width, top, left, entry.height, entry.width], dtype=torch.float32)
