"""Images in conversations: their tokens in the rendered text, and the model inputs for a batch.

The model's processor (transformers) computes both. Image tokens are excluded from the loss.
"""

import io
import random
import re
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from trainer.config import UserError
from trainer.contract.known_versions import patch_attribute, require
from trainer.data.image_features import GRID, FeatureFiles
from trainer.data.image_parts import decode_image, is_animated, read_stored_image
from trainer.data.samples import Sample, split_documents

FIRST_FRAME = "an image with several frames; only the first is used"
"""Text for warnings."""
Edit = tuple[int, int, str]
WeightedSpan = tuple[int, int, float]
Inputs = dict[str, Any]
TOKEN_TYPE_ARGUMENTS = ("token_type_ids", "mm_token_type_ids")
"""Model arguments that are 1 at image tokens."""


class ImageReader:
    """Wraps a vision-language model's processor, without its video part; can be pickled for workers."""

    def __init__(
        self, processor_class: Any, image_processor: Any, tokenizer: Any, settings: dict[str, Any], token_id: int
    ) -> None:
        """Build the processor. `token_id` is the token that the model replaces with image features."""
        self._arguments = processor_class, image_processor, tokenizer, settings, token_id
        self._processor = _build_processor(processor_class, image_processor, tokenizer, settings)
        self._images = image_processor
        self.token: str = self._processor.image_token
        ids = {*self._processor.image_token_ids, token_id}
        self.token_ids = sorted(token for token in ids if token is not None)

    def __reduce__(self) -> Any:
        return ImageReader, self._arguments

    def set_pixel_limit(self, name: str, pixels: int) -> bool:
        """Set `min_pixels` or `max_pixels`. Return False if the processor has a fixed size instead of bounds."""
        bound = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}[name]
        size = dict(self._images.size)
        if not (size.get(bound) and hasattr(self._images, "merge_size")):
            return False
        self._images.size = type(self._images.size)(**size | {bound: pixels})
        return True

    @property
    def settings_digest(self) -> str:
        """A hash that is equal for processors that produce the same tokens."""
        settings = f"{type(self._processor).__qualname__}{self._images.to_json_string()}{self._arguments[3]}"
        return xxhash.xxh3_128_hexdigest(settings.encode())

    def build_edits(self, text: str, stored: Sequence[bytes], origin: str) -> tuple[list[Edit], bool]:
        """Return the replacement for each image placeholder in a text, and whether any image is animated.

        Raises UserError if an image cannot be read, or if the text has more or fewer placeholders than images.
        """
        starts = [match.start() for match in re.finditer(re.escape(self.token), text)]
        if len(starts) != len(stored):
            raise UserError(
                f"{origin}: the text contains {self.token} {len(starts)} times, but there are {len(stored)} images; "
                "remove this token from the turns, or set dataset.chat_template to a template that writes images"
            )
        data = [self._read(image, f"{origin}, image {number}") for number, image in enumerate(stored, start=1)]
        images = [decode_image(content, name) for content, name in data]
        texts = self._process_images(images, origin)[1] if images else []
        edits = [(start, start + len(self.token), new) for start, new in zip(starts, texts, strict=True)]
        return edits, any(is_animated(content) for content, _ in data)

    def build_inputs(self, stored: Sequence[bytes], dtype: torch.dtype) -> dict[str, Any]:
        images = [decode_image(*self._read(image, "an image in the dataset")) for image in stored]
        inputs, _ = self._process_images(images, "a batch")
        if inputs["pixel_values"].dtype == torch.bfloat16:  # Llama 4's pixels, which its tower does not convert
            inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        unused = {*self._processor.unused_input_names, "num_patches"}
        return {name: value for name, value in inputs.items() if name not in unused}

    def mark_image_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Return an int64 tensor that is 1 at image tokens, otherwise 0."""
        return torch.isin(ids, torch.tensor(self.token_ids)).long()

    def build_dummy(self) -> Sample:
        """Build a document without targets from a small noise image."""
        from PIL import Image

        file = io.BytesIO()
        Image.frombytes("RGB", (32, 32), random.Random(0).randbytes(3 * 32 * 32)).save(file, "PNG")
        text = self.build_edits(self.token, [file.getvalue()], "a noise image")[0][0][2]
        ids = self._arguments[2](text, add_special_tokens=False)["input_ids"]
        return Sample(ids, [False] * len(ids), [len(ids)], images=((file.getvalue(),),))

    def _read(self, stored: bytes, origin: str) -> tuple[bytes, str]:
        data, file = read_stored_image(stored)
        return data, f"{origin} ({file})" if file else origin

    def _process_images(self, images: list[Any], origin: str) -> tuple[Any, list[str]]:
        """Return the processor's output for images, and the text that replaces each placeholder."""
        settings = {**getattr(self._processor, "images_kwargs", {}), "return_tensors": "pt"}
        if hasattr(self._processor, "use_image_special_tokens"):  # an argument of LFM2-VL's method
            settings["use_image_special_tokens"] = self._processor.use_image_special_tokens
        process = require(self._processor, "_process_images", "transformers")
        try:
            inputs, texts = process(images, **settings)
        except ValueError as error:  # for example an extreme aspect ratio
            raise UserError(f"{origin}: the model's processor rejects an image ({error}); remove the image") from None
        return inputs, texts


def _build_processor(processor_class: Any, image_processor: Any, tokenizer: Any, settings: dict[str, Any]) -> Any:
    """Build a processor without its video and audio parts, which need packages that training does not need."""
    skip_check = {"check_argument_for_proper_class": lambda self, name, part: None}
    parts = dict.fromkeys(processor_class.get_attributes())
    parts |= {"image_processor": image_processor, "tokenizer": tokenizer}
    module = sys.modules[processor_class.__module__]
    own_class = type(processor_class.__name__, (processor_class,), skip_check)
    # SmolVLM's processor requires num2words, but only uses it for videos.
    has_all = getattr(module, "num2words", True) is not None
    with nullcontext() if has_all else patch_attribute(module, "num2words", str, "transformers"):
        return own_class(**parts, **settings)


def apply_edits(text: str, spans: Sequence[WeightedSpan], edits: Sequence[Edit]) -> tuple[str, list[WeightedSpan]]:
    pieces, remaining, last, shift = list[str](), list[WeightedSpan](), 0, 0
    for start, end, new in [*edits, (len(text), len(text), "")]:
        pieces += [text[last:start], new]
        for first, stop, weight in spans:
            low, high = max(first, last), min(stop, start)
            if low < high:
                remaining.append((low + shift, high + shift, weight))
        shift += len(new) - (end - start)
        last = end
    return "".join(pieces), sorted(remaining)


@dataclass(frozen=True)
class PromptImages:
    """A prompt's images, in order (see `encode_image`)."""

    reader: ImageReader
    stored: tuple[bytes, ...]

    def insert(self, text: str) -> str:
        """Replace placeholders in a rendered prompt with image tokens. Raises UserError if an image cannot be read."""
        return apply_edits(text, [], self.reader.build_edits(text, self.stored, "the prompt")[0])[0]

    def build_inputs(self, ids: torch.Tensor, arguments: Container[str], dtype: torch.dtype) -> Inputs:
        if not self.stored:
            return {}
        types = {name: self.reader.mark_image_tokens(ids) for name in TOKEN_TYPE_ARGUMENTS if name in arguments}
        return self.reader.build_inputs(self.stored, dtype) | types


@dataclass(frozen=True)
class ImageInputs:
    reader: ImageReader
    dtype: torch.dtype
    """The model's dtype."""
    type_name: str | None
    """Model argument that is 1 at image tokens; None if it is not needed."""
    window: int
    """Sliding-window size in tokens, for models with `type_name`."""
    in_all_layers: bool
    """Whether the tokens of an image attend to each other in all layers, not only in those with sliding attention."""
    rope: Callable[..., Any] | None
    """The model's `get_rope_index`, for 3D positions."""
    dummy: Sample | None = None
    """A document with a noise image for batches without images, if every rank must run the vision tower."""
    features: FeatureFiles | None = None
    """Cached outputs of the vision tower."""

    def build_inputs(self, ids: torch.Tensor, position_ids: torch.Tensor | None, rows: Sequence[Sample]) -> Inputs:
        stored = [image for row in rows for document in row.images for image in document]
        if not stored:
            return {}
        if self.features is None:
            inputs = self.reader.build_inputs(stored, self.dtype)
            grids = inputs.get(GRID)
        else:
            output, grids = self.features.read(stored)
            inputs = {"mm_encoder_outputs": {"image": output}}
        if self.type_name is not None and position_ids is not None:
            inputs["attention_mask"] = self._build_masks(self.reader.mark_image_tokens(ids), position_ids)
        elif self.type_name is not None:
            inputs[self.type_name] = self.reader.mark_image_tokens(ids)
        if self.rope is not None:
            assert grids is not None
            positions = self._compute_positions(ids, position_ids, rows, grids)
            # transformers finds a pack's documents from the text positions, which are an additional first row.
            inputs["position_ids"] = positions if position_ids is None else torch.cat([position_ids[None], positions])
        return inputs

    def _build_masks(self, types: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return masks [B, 1, L, L] for packs, by layer type: causal in a document, bidirectional in an image.

        They replace the masks of transformers (5.23.0), which misplaces images of later documents in sliding windows.
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

    def _compute_positions(
        self, batch_ids: torch.Tensor, text_positions: torch.Tensor | None, rows: Sequence[Sample], grids: torch.Tensor
    ) -> torch.Tensor:
        """Return positions [3, B, L] that start at 0 in each document; a flat batch has all `rows` in one row."""
        assert self.rope is not None
        if text_positions is None:
            text_positions = torch.arange(batch_ids.shape[1]).expand_as(batch_ids)
        positions, at, seen = text_positions.repeat(3, 1, 1), 0, 0
        is_flat = len(rows) > len(batch_ids)
        for number, row in enumerate(rows):
            at = at if is_flat else 0
            for document in split_documents(row):
                count, end = len(document.images[0]) if document.images else 0, at + len(document.input_ids)
                if count:
                    ids = torch.tensor([document.input_ids])
                    grid = grids[seen : seen + count]
                    types = self.reader.mark_image_tokens(ids)
                    rope_positions = self.rope(ids, mm_token_type_ids=types, image_grid_thw=grid)[0]
                    positions[:, 0 if is_flat else number, at:end] = rope_positions[:, 0]
                at, seen = end, seen + count
        return positions
