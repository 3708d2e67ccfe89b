"""Cache encoded images and captions, keyed by their content and the settings.

Images are stored as VAE latents, captions as the outputs of the text encoders (conditions). The VAE
encodes an image as a mean and a standard deviation, from which training draws a new sample each time.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from trainer.config import RunConfig, SourceSection
from trainer.config.errors import format_count
from trainer.data.built_folder import digest_json, load_or_build
from trainer.data.grouping import count_held_out, repeat_by_weight
from trainer.tasks.images.encoding import IMAGES_PER_FILE, describe_truncated_captions, encode_images
from trainer.tasks.images.families import Conditions
from trainer.tasks.images.pipeline import Pipeline
from trainer.tasks.images.sizes import ResizeAndCrop, fit_to_bucket, list_bucket_sizes
from trainer.tasks.images.source_images import SourceImage, read_images

CACHE_FORMAT = 4


@dataclass(frozen=True)
class ImageStats:
    records: int
    captions: int
    held_out: int
    priors: int
    sizes: Counter[str]
    notes: tuple[str, ...] = ()
    prompt_text: None = None
    skipped: dict[str, int] = field(default_factory=dict)
    """Always empty for images."""
    target_tokens: ClassVar[int] = 0

    def format_summary(self) -> list[str]:
        sizes = ", ".join(f"{count} of {size}" for size, count in self.sizes.most_common(6))
        held_out = f", {self.held_out} held out" if self.held_out else ""
        priors = f", {self.priors} class images" if self.priors else ""
        images, captions = format_count(self.records, "image"), format_count(self.captions, "caption")
        return [*self.notes, f"train: {images}{held_out}{priors}, {captions}; {sizes}"]


@dataclass(frozen=True)
class ImageEntry:
    name: str
    """The image's origin, for messages."""
    index: int
    caption: int
    width: int
    height: int
    original: tuple[int, int]
    """Width and height before resizing."""
    crop: tuple[int, int]
    """Left and top edges of the crop."""


@dataclass(frozen=True)
class ImageSamples:
    """The images of a split in a complete cache folder; an image may occur several times."""

    store: "EncodedImages"
    entries: list[ImageEntry]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> ImageEntry:
        return self.entries[index]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Width and height of each image, [N, 2]."""
        return np.array([(entry.width, entry.height) for entry in self.entries], dtype=np.int64).reshape(-1, 2)


@dataclass
class EncodedImages:
    folder: Path
    captions: list[str]
    _open: dict[str, Any] = field(default_factory=dict)

    def load_latents(self, index: int, *, flipped: bool) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation [C, H, W] of an image's latent, fp32."""
        name = f"{index}.flipped" if flipped else str(index)
        file = self._open_file(f"latents-{index // IMAGES_PER_FILE:04d}.safetensors")
        return file.get_tensor(f"{name}.mean").float(), file.get_tensor(f"{name}.std").float()

    def load_conditions(self, caption: int) -> Conditions:
        file = self._open_file(f"captions-{caption // IMAGES_PER_FILE:04d}.safetensors")
        names = [name for name in file.keys() if name.startswith(f"{caption}.")]
        return {name.partition(".")[2]: file.get_tensor(name) for name in names}

    def _open_file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(str(self.folder / name), framework="pt")
        return self._open[name]


@dataclass(frozen=True)
class PreparedImages:
    train: ImageSamples
    evaluation: ImageSamples | None
    prior: ImageSamples | None
    stats: ImageStats
    fingerprint: str
    origin: dict[str, str]


@dataclass(frozen=True)
class _Plan:
    images: list[SourceImage]
    parts: dict[str, list[int]]
    """Image indices, in order, for each part: train, evaluation and prior."""
    resizes: list[ResizeAndCrop]
    captions: list[str]
    skipped: list[str]
    """A message for each kind of skipped file."""


def prepare_images(config: RunConfig, pipeline: Pipeline, log: Any = lambda line: None) -> PreparedImages:
    """Read and encode images and captions, or reuse the cache in dataset.cache_dir.

    Several processes may call this at once; one of them encodes. Raises UserError for invalid data.
    """
    plan = _build_plan(config)
    content = digest_json([[image.digest, image.caption] for image in plan.images])
    identity = {
        "format": CACHE_FORMAT,
        "content": content,
        "captions": plan.captions,
        "fits": [[resize.width, resize.height] for resize in plan.resizes],
        "flip": config.image.flip,
        "encoders": pipeline.encoders_digest,
    }
    folder = Path(config.dataset.cache_dir).expanduser() / f"images-{digest_json(identity)}"
    build = partial(encode_images, pipeline, plan.images, plan.resizes, plan.captions, flip=config.image.flip, log=log)
    store, note = load_or_build(folder, build, lambda path: EncodedImages(path, plan.captions))
    entries = [_build_entry(index, plan) for index in range(len(plan.images))]
    parts = {name: [entries[number] for number in numbers] for name, numbers in plan.parts.items()}
    sizes = Counter(f"{entry.width} x {entry.height}" for entry in parts["train"])
    held_out, prior = parts["evaluation"], parts["prior"]
    cut = describe_truncated_captions(pipeline, [image.caption for image in plan.images])
    warnings = [*plan.skipped, *_list_warnings(plan), *cut]
    notes = (*filter(None, [note]), *(f"warning: {warning}" for warning in warnings))
    captions = len({image.caption for image in plan.images})
    stats = ImageStats(len(parts["train"]), captions, len(held_out), len(prior), sizes, notes)
    return PreparedImages(
        ImageSamples(store, parts["train"]),
        ImageSamples(store, held_out) if held_out else None,
        ImageSamples(store, prior) if prior else None,
        stats,
        digest_json([identity, plan.parts]),
        {"content": content, "tokenizer": pipeline.encoders_digest},
    )


def _build_plan(config: RunConfig) -> _Plan:
    data, image = config.dataset, config.image
    sources = [(f"dataset.mix.{index}", source) for index, source in enumerate(data.mix)] or [("dataset", data)]
    images: list[SourceImage] = []
    skipped: list[str] = []
    parts: dict[str, list[int]] = {"evaluation": [], "prior": []}
    rng = np.random.default_rng([config.seed, 0x1AC])

    def read(source: SourceSection, label: str) -> list[int]:
        source_images, messages = read_images(source, label, image.caption)
        images.extend(source_images)
        skipped.extend(messages)
        return list(range(len(images) - len(source_images), len(images)))

    numbers_by_source = [np.array(read(source, label), dtype=np.int64) for label, source in sources]
    held_out = rng.permutation(len(images))[: count_held_out(data, len(images))]
    parts["evaluation"] = np.sort(held_out).tolist()
    train = [numbers[~np.isin(numbers, held_out)] for numbers in numbers_by_source]
    if data.mix:
        train = [
            repeat_by_weight(numbers, source.weight, rng, label)
            for numbers, (label, source) in zip(train, sources, strict=True)
        ]
    parts["train"] = np.concatenate(train).tolist()
    if data.evaluation is not None:
        parts["evaluation"] = read(data.evaluation, "dataset.evaluation")
    if image.prior is not None:
        parts["prior"] = read(image.prior, "image.prior")
    sizes = list_bucket_sizes(image)
    resizes = [fit_to_bucket(image.width, image.height, sizes) for image in images]
    texts = [image.caption for image in images] + list(config.logging.sample_prompts) + [""]
    return _Plan(images, parts, resizes, list(dict.fromkeys(texts)), skipped)


def _list_warnings(plan: _Plan) -> list[str]:
    total = len(plan.images)
    changes = Counter(chain.from_iterable(image.changes for image in plan.images))
    empty = sum(not image.caption for image in plan.images)
    enlarged = sum(resize.scaled_size[0] > image.width for image, resize in zip(plan.images, plan.resizes, strict=True))
    changes["have an empty caption; to drop captions randomly, set image.caption_dropout"] = empty
    changes["are smaller than their training size, so upscaling blurs them"] = enlarged
    return [f"{count:,} of {total:,} images {text}" for text, count in changes.items() if count]


def _build_entry(index: int, plan: _Plan) -> ImageEntry:
    image, resize = plan.images[index], plan.resizes[index]
    caption = plan.captions.index(image.caption)
    original = image.width, image.height
    return ImageEntry(image.name, index, caption, resize.width, resize.height, original, resize.crop_origin)
