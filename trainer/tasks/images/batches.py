"""Micro-batches of pictures: the same global batch, noise and times on any number of ranks.

What is drawn for a picture (noise, time, mirror image, dropped caption) depends on the seed, the epoch and its place in
the epoch's order alone, so that a resumed run and one on other ranks draw the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.batches import GlobalBatches
from trainer.tasks.images.data import Entry, ImageSamples
from trainer.tasks.images.families import Conditions

EVALUATION_TIMES = 4
SIZES = "sizes"
"""SDXL's conditioning by size and crop, which 16 bits would round."""
_EVALUATION, _PRIOR, _TRAINING = 1, 2, 3


@dataclass(frozen=True)
class Group:
    """Pictures of one size, as tensors on the host, fp32."""

    latents: Tensor
    """[B, C, H, W]."""
    noise: Tensor
    times: Tensor
    """Between 0 and 1 [B]: the position in the scheduler's range of times."""
    conditions: Conditions
    captions: tuple[str, ...]
    weights: Tensor
    """Of each picture's loss [B]; 0 for padding."""


@dataclass(frozen=True)
class ImageBatch:
    """What one rank computes in one micro-step: most often one group."""

    groups: tuple[Group, ...]
    tokens: int
    """Pictures."""
    target_count: int
    """Number of pictures that the loss is divided by; pictures of the class do not count."""


@dataclass(frozen=True)
class Drawing:
    """What is random about how a picture is shown."""

    draw_time: Callable[[torch.Generator], float]
    flip: bool
    caption_dropout: float
    prior_weight: float


@dataclass(frozen=True)
class _Row:
    """One picture as it is shown once."""

    entry: Entry
    caption: int
    latents: Tensor
    noise: Tensor
    time: float
    weight: float
    samples: ImageSamples


class ImageBatches(GlobalBatches):
    """This rank's part of every global batch of pictures.

    A global batch is of one size as far as the epoch's pictures allow it; what is left over of each size comes
    together in mixed ones.
    """

    def __init__(
        self,
        samples: ImageSamples,
        drawing: Drawing,
        *,
        prior: ImageSamples | None,
        batch_size: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        super().__init__(batch_size=batch_size, accumulation=accumulation, rank=rank, world_size=world_size)
        self.samples, self.prior = samples, prior
        self._drawing, self._seed, self._shuffle = drawing, seed, shuffle
        self._order: tuple[int, int, NDArray[np.int64]] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Pictures, over all ranks."""
        return len(self.samples)

    def step(self, epoch: int, offset: int) -> tuple[list[ImageBatch], int]:
        """This rank's micro-batches of the step `offset` pictures into the epoch, and how many all ranks take."""
        taken = self.order(epoch)[offset : offset + self.global_batch_size]
        places = np.arange(offset, offset + len(taken))
        parts = self.parts()
        passes = [self._passes(taken, places, part.start - self.rank * self.batch_size) for part in parts]
        made = [self._batch(epoch, taken[part], places[part], most) for part, most in zip(parts, passes, strict=True)]
        return made, len(taken)

    def _passes(self, taken: NDArray[np.int64], places: NDArray[np.int64], first: int) -> int:
        """Groups of the rank that has most of them in the micro-step that begins at `first`."""
        found = []
        for start in range(first, first + self.batch_size * self.world_size, self.batch_size):
            part = slice(start, start + self.batch_size)
            entries = [self.samples[int(index)] for index in taken[part]]
            if self.prior is not None:
                entries += [self.prior[int(place) % len(self.prior)] for place in places[part]]
            found.append(len({(entry.width, entry.height) for entry in entries}))
        return max(found)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The epoch's permutation of the pictures."""
        size = self.global_batch_size
        if self._order is None or self._order[:2] != (epoch, size):
            order = order_of(self.samples, epoch, together=size, seed=self._seed, shuffle=self._shuffle)
            self._order = epoch, size, order
        return self._order[2]

    def _batch(self, epoch: int, indices: NDArray[np.int64], places: NDArray[np.int64], passes: int) -> ImageBatch:
        rows = [
            self._row(self.samples, int(index), epoch, int(place), _TRAINING, 1.0)
            for index, place in zip(indices, places, strict=True)
        ]
        count = len(rows)
        if self.prior is not None:
            weight = self._drawing.prior_weight
            rows += [
                self._row(self.prior, int(place) % len(self.prior), epoch, int(place), _PRIOR, weight)
                for place in places
            ]
        if not rows:  # every rank runs the same number of micro-steps
            rows = [self._row(self.samples, 0, epoch, 0, _TRAINING, 0.0)]
        return collate(rows, count, passes)

    def _row(self, samples: ImageSamples, index: int, epoch: int, place: int, kind: int, weight: float) -> _Row:
        drawing, entry = self._drawing, samples[index]
        generator = generator_of(self._seed, epoch, place, kind)
        mirrored, dropped = torch.rand(2, generator=generator).tolist()
        mean, std = samples.store.latents(entry.number, flipped=drawing.flip and mirrored < 0.5)
        time = drawing.draw_time(generator)
        latents = mean + std * torch.randn(mean.shape, generator=generator)
        noise = torch.randn(mean.shape, generator=generator)
        caption = samples.store.number_of("") if dropped < drawing.caption_dropout else entry.caption
        return _Row(entry, caption, latents, noise, time, weight, samples)


def image_evaluation(samples: ImageSamples, *, batch_size: int, rank: int, world_size: int) -> Iterator[ImageBatch]:
    """Every held-out picture at fixed times with fixed noise, whatever the run's seed; every rank yields as many."""
    count = len(samples) * EVALUATION_TIMES
    for start in range(0, count, batch_size * world_size):
        firsts = range(start, start + batch_size * world_size, batch_size)
        parts = [range(first, min(first + batch_size, count)) for first in firsts]
        entries = [[samples[at // EVALUATION_TIMES] for at in part] for part in parts]
        passes = max(len({(entry.width, entry.height) for entry in part}) for part in entries)
        rows = [_evaluation_row(samples, at, 1.0) for at in parts[rank]] or [_evaluation_row(samples, 0, 0.0)]
        yield collate(rows, len(parts[rank]), passes)


def _evaluation_row(samples: ImageSamples, at: int, weight: float) -> _Row:
    index, time = divmod(at, EVALUATION_TIMES)
    entry = samples[index]
    mean, _ = samples.store.latents(entry.number, flipped=False)
    noise = torch.randn(mean.shape, generator=generator_of(0, index, time, _EVALUATION))
    return _Row(entry, entry.caption, mean, noise, (time + 0.5) / EVALUATION_TIMES, weight, samples)


def generator_of(*numbers: int) -> torch.Generator:
    """A generator that these numbers alone decide."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed % 2**63)


def order_of(samples: ImageSamples, epoch: int, *, together: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """The permutation of the pictures in an epoch whose global batches are of `together` pictures."""
    draw = np.random.default_rng([seed, epoch])
    order = draw.permutation(len(samples)) if shuffle else np.arange(len(samples))
    return by_size(order, samples.sizes, together, draw if shuffle else None)


def by_size(
    order: NDArray[np.int64], sizes: NDArray[np.int64], together: int, draw: np.random.Generator | None
) -> NDArray[np.int64]:
    """The order rearranged so that runs of `together` pictures have one size, with what is left over at the end."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index in order.tolist():
        groups.setdefault((int(sizes[index, 0]), int(sizes[index, 1])), []).append(index)
    if len(groups) == 1:
        return order
    whole, rest = [], []
    for members in groups.values():
        end = len(members) // together * together
        whole += [members[start : start + together] for start in range(0, end, together)]
        rest += members[end:]
    if draw is not None:
        whole = [whole[at] for at in draw.permutation(len(whole))]
    return np.array([index for part in whole for index in part] + rest, dtype=np.int64)


def collate(rows: Sequence[_Row], count: int, passes: int) -> ImageBatch:
    """Rows by size, as tensors; `count` is what the loss is divided by.

    There are at least `passes` groups, the last ones without weight: at stage 3 all ranks bring weights together in
    every forward pass, so that a rank with fewer of them would leave the others waiting.
    """
    groups: dict[tuple[int, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.latents.shape), []).append(row)
    made = [_group(members) for members in groups.values()]
    made += [replace(made[0], weights=torch.zeros_like(made[0].weights))] * (passes - len(made))
    return ImageBatch(tuple(made), tokens=sum(row.weight > 0 for row in rows), target_count=count)


def _group(rows: Sequence[_Row]) -> Group:
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row.samples.store.conditions(row.caption) | {SIZES: sizes_of(row.entry)})
    return Group(
        torch.stack([row.latents for row in rows]),
        torch.stack([row.noise for row in rows]),
        torch.tensor([row.time for row in rows], dtype=torch.float64),
        {name: torch.stack([each[name] for each in found]) for name in found[0]},
        tuple(row.samples.store.captions[row.caption] for row in rows),
        torch.tensor([row.weight for row in rows]),
    )


def sizes_of(entry: Entry) -> Tensor:
    """SDXL's conditioning: height and width before, top and left of the crop, height and width of what is seen."""
    (width, height), (left, top) = entry.original, entry.crop
    return torch.tensor([height, width, top, left, entry.height, entry.width], dtype=torch.float32)
