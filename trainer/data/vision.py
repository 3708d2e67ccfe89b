"""Images of conversations: the tokens that stand for them in a text, and the inputs of a batch.

A model's own processor (transformers) makes both. Its image tokens carry no loss.
"""

import io
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from trainer.config import UserError
from trainer.contract.known_versions import require
from trainer.data.image_features import GRID, FeatureFiles
from trainer.data.image_parts import decode_image, is_animated, read_stored
from trainer.data.samples import Sample, split_documents

FIRST_FRAME = "an image with several frames, of which only the first is used"
"""Name in warnings."""
Edit = tuple[int, int, str]
Span = tuple[int, int, float]
Inputs = dict[str, Any]
TYPE_NAMES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of models that have 1 for image tokens."""


class ImageReader:
    """The processor of a model of text and images, without that of videos; can be pickled for workers."""

    def __init__(self, processor_class: Any, image_processor: Any, tokenizer: Any, settings: dict[str, Any]) -> None:
        self._made_from = processor_class, image_processor, tokenizer, settings
        self._processor = _build_processor(*self._made_from)
        self._images = image_processor
        self.token: str = self._processor.image_token
        self.token_ids: list[int] = [each for each in self._processor.image_token_ids if each is not None]

    def __reduce__(self) -> Any:
        return ImageReader, self._made_from

    def set_size(self, name: str, pixels: int) -> bool:
        """Set `min_pixels` or `max_pixels`; return whether the processor has bounds, not a fixed size."""
        bound = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}[name]
        size = dict(self._images.size)
        if not (size.get(bound) and hasattr(self._images, "merge_size")):
            return False
        self._images.size = type(self._images.size)(**size | {bound: pixels})
        return True

    @property
    def key(self) -> str:
        """A hash that is equal for processors that produce the same tokens."""
        settings = f"{type(self._processor).__qualname__}{self._images.to_json_string()}{self._made_from[3]}"
        return xxhash.xxh3_128_hexdigest(settings.encode())

    def edits(self, text: str, stored: Sequence[bytes], where: str) -> tuple[list[Edit], bool]:
        """Return for each image its position in a rendered text and its tokens; and whether one is animated.

        Raises UserError for an image that cannot be read, and a text with more or fewer places than images.
        """
        starts = [at for at in range(len(text)) if text.startswith(self.token, at)] if self.token in text else []
        if len(starts) != len(stored):
            raise UserError(
                f"{where}: the text has {self.token} {len(starts)} times for {len(stored)} images; is it written in a "
                "turn, or does the chat template leave images out? Remove it, or set dataset.chat_template"
            )
        data = [self._read(each, f"{where}, image {number}") for number, each in enumerate(stored, start=1)]
        images = [decode_image(each, name) for each, name in data]
        texts = self._process(images, where)[1] if images else []
        edits = [(at, at + len(self.token), each) for at, each in zip(starts, texts, strict=True)]
        return edits, any(is_animated(each) for each, _ in data)

    def inputs(self, stored: Sequence[bytes]) -> dict[str, Any]:
        """Return the model's inputs of images, in order, without its tokens."""
        images = [decode_image(*self._read(each, "an image of the data")) for each in stored]
        unused = {*self._processor.unused_input_names, "num_patches"}
        return {name: value for name, value in self._process(images, "a batch")[0].items() if name not in unused}

    def types(self, ids: torch.Tensor) -> torch.Tensor:
        """Return 1 for image tokens, else 0."""
        return torch.isin(ids, torch.tensor(self.token_ids)).long()

    def empty_document(self) -> Sample:
        """Return a document of a small image of noise, without targets."""
        from PIL import Image

        file = io.BytesIO()
        Image.frombytes("RGB", (32, 32), random.Random(0).randbytes(3 * 32 * 32)).save(file, "PNG")
        text = self.edits(self.token, [file.getvalue()], "an image of noise")[0][0][2]
        ids = self._made_from[2](text, add_special_tokens=False)["input_ids"]
        return Sample(ids, [False] * len(ids), [len(ids)], images=((file.getvalue(),),))

    def _read(self, stored: bytes, where: str) -> tuple[bytes, str]:
        data, file = read_stored(stored)
        return data, f"{where} ({file})" if file else where

    def _process(self, images: list[Any], where: str) -> tuple[Any, list[str]]:
        """Return the model's inputs for images, with what the texts depend on, and the text of each."""
        settings = {**getattr(self._processor, "images_kwargs", {}), "return_tensors": "pt"}
        process = require(self._processor, "_process_images", "transformers")
        try:
            found: tuple[Any, list[str]] = process(images, **settings)
            return found
        except ValueError as error:  # such as an extreme ratio of the sides
            raise UserError(f"{where}: the model's processor refuses an image ({error}); remove it") from None


def _build_processor(processor_class: Any, image_processor: Any, tokenizer: Any, settings: dict[str, Any]) -> Any:
    """Return a processor without its parts for videos and sound, which need packages that training does not."""

    def accept(self: Any, name: str, part: Any) -> None:
        pass

    own = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": accept})
    parts = dict.fromkeys(processor_class.get_attributes())
    parts |= {"image_processor": image_processor, "tokenizer": tokenizer}
    return own(**parts, **settings)


def replace_spans(text: str, spans: Sequence[Span], edits: Sequence[Edit]) -> tuple[str, list[Span]]:
    """Return a text after replacements in order, and its spans without the replaced places."""
    pieces, kept, last, shift = list[str](), list[Span](), 0, 0
    bounds = [*edits, (len(text), len(text), "")]
    for start, end, new in bounds:
        pieces += [text[last:start], new]
        for first, stop, weight in spans:
            low, high = max(first, last), min(stop, start)
            if low < high:
                kept.append((low + shift, high + shift, weight))
        shift += len(new) - (end - start)
        last = end
    return "".join(pieces), sorted(kept)


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt, in order (see `store_image`)."""

    reader: ImageReader
    stored: tuple[bytes, ...]

    def insert(self, text: str) -> str:
        """Return a rendered prompt with the tokens of the images. Raises UserError if one cannot be read."""
        return replace_spans(text, [], self.reader.edits(text, self.stored, "the prompt")[0])[0]

    def inputs(self, ids: torch.Tensor, taken: Container[str]) -> Inputs:
        """Return the model's inputs for a prompt's token ids, without these; `taken` has the model's arguments."""
        if not self.stored:
            return {}
        types = {name: self.reader.types(ids) for name in TYPE_NAMES if name in taken}
        return self.reader.inputs(self.stored) | types


@dataclass(frozen=True)
class ImageInputs:
    """Builder of the image inputs of micro-batches for one model."""

    reader: ImageReader
    type_name: str | None
    """Argument of the model that has 1 for image tokens."""
    window: int
    """Width of its sliding attention in tokens, if it has `type_name`."""
    in_all_layers: bool
    """Whether the tokens of an image see each other in all layers, not only in those of sliding attention."""
    rope: Callable[..., Any] | None
    """The model's `get_rope_index`, for positions in three dimensions."""
    empty: Sample | None = None
    """A document with an empty image for batches without images, if every rank must run the image tower."""
    features: FeatureFiles | None = None
    """What the tower has computed before training, in its place."""

    def fill(self, rows: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows of a batch, with `empty` if they have no image."""
        return rows if self.empty is None or any(row.images for row in rows) else [*rows, self.empty]

    def build(self, batch_ids: torch.Tensor, position_ids: torch.Tensor | None, rows: Sequence[Sample]) -> Inputs:
        """Return the inputs for the images of rows with the token ids and positions of a micro-batch."""
        stored = [image for row in rows for document in row.images for image in document]
        if not stored:
            return {}
        if self.features is None:
            found = self.reader.inputs(stored)
            grids = found.get(GRID)
        else:
            output, grids = self.features.read(stored)
            found = {"mm_encoder_outputs": {"image": output}}
        if self.type_name is not None and position_ids is not None:
            found["attention_mask"] = self._masks(self.reader.types(batch_ids), position_ids)
        elif self.type_name is not None:
            found[self.type_name] = self.reader.types(batch_ids)
        if self.rope is not None:
            assert grids is not None
            positions = self._positions(batch_ids, position_ids, rows, grids)
            # transformers finds the documents of a pack by a fourth row.
            found["position_ids"] = positions if position_ids is None else torch.cat([position_ids[None], positions])
        return found

    def _masks(self, types: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return masks [B, 1, L, L] of packs, by layer type: causal in a document, in both directions in an image.

        In layers with a sliding window, transformers (5.23.0) finds the images of later documents at wrong places.
        """
        document, is_image = (positions == 0).cumsum(-1), types.bool()
        begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
        image = torch.where(is_image, begins.cumsum(-1), 0)
        index = torch.arange(types.shape[1])
        back = index[:, None] - index
        together = (image[:, :, None] == image[:, None]) & is_image[:, :, None]
        same = document[:, :, None] == document[:, None]
        both, causal = same & (together | (back >= 0)), same & (back >= 0)
        full = both if self.in_all_layers else causal
        return {"full_attention": full[:, None], "sliding_attention": (both & (back < self.window))[:, None]}

    def _positions(
        self, batch_ids: torch.Tensor, plain: torch.Tensor | None, rows: Sequence[Sample], grids: torch.Tensor
    ) -> torch.Tensor:
        """Return positions [3, B, L] from 0 in each document; flat batches have all rows in one."""
        assert self.rope is not None
        usual = torch.arange(batch_ids.shape[1]).expand_as(batch_ids) if plain is None else plain
        positions, at, seen = usual.repeat(3, 1, 1), 0, 0
        is_flat = len(rows) > len(batch_ids)
        for number, row in enumerate(rows):
            at = at if is_flat else 0
            for document in split_documents(row):
                count, end = len(document.images[0]) if document.images else 0, at + len(document.input_ids)
                if count:
                    ids = torch.tensor([document.input_ids])
                    grid = grids[seen : seen + count]
                    found = self.rope(ids, mm_token_type_ids=self.reader.types(ids), image_grid_thw=grid)[0]
                    positions[:, 0 if is_flat else number, at:end] = found[:, 0]
                at, seen = end, seen + count
        return positions
