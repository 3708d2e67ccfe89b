"""Models of text and images: which are trained on images, their processors, and the inputs that they take."""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from trainer.config import DatasetSection, ModelSection, UserError
from trainer.data.image_parts import store_image
from trainer.data.vision import TYPE_NAMES, ImageInputs, ImageReader, PromptImages
from trainer.model.base import load_model_config
from trainer.model.model_source import unreadable_error
from trainer.model.published_shapes import is_random

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Model types with losses that tests compare with those of transformers and PEFT."""


def load_image_reader(
    base_model: str, section: ModelSection, dataset: DatasetSection, tokenizer: Any, model_config: Any = None
) -> ImageReader | None:
    """Return the processor of a model that is trained on images, else None. Raises UserError if it cannot be loaded."""
    reader = _load_reader(base_model, section, tokenizer, model_config)
    sizes = {"min_pixels": dataset.min_pixels, "max_pixels": dataset.max_pixels}
    for name, value in sizes.items():
        if value is not None and (reader is None or not reader.set_size(name, value)):
            raise UserError(f"dataset.{name}={value}: has no effect on images of {base_model}; remove it")
    if (sizes["min_pixels"] or 0) > (sizes["max_pixels"] or sys.maxsize):
        raise UserError(
            "dataset.min_pixels={min_pixels}: above dataset.max_pixels={max_pixels}; lower it".format(**sizes)
        )
    return reader


def _load_reader(base_model: str, section: ModelSection, tokenizer: Any, model_config: Any) -> ImageReader | None:
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    model_config = model_config or load_model_config(base_model, section)
    if is_random(base_model) or model_config.model_type not in FAMILIES:
        return None
    known, revision = PROCESSOR_MAPPING[type(model_config)], section.revision or "main"
    try:
        images = AutoImageProcessor.from_pretrained(base_model, revision=revision)
    except OSError:  # a copy of the weights without preprocessor_config.json, for text alone
        return None
    except Exception as error:  # invalid values raise any exception
        raise unreadable_error("base_model", base_model, error) from None
    try:
        settings, _ = known.get_processor_dict(base_model, revision=revision)
    except OSError:  # older models have no processor_config.json
        settings = {}
    parts = known.get_attributes()
    taken = [name for name in inspect.signature(known.__init__).parameters if name not in (*parts, "self", "kwargs")]
    kept = {name: value for name, value in settings.items() if name in taken and name != "chat_template"}
    try:
        return ImageReader(known, images, tokenizer, kept)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"base_model={base_model}: its processor of images cannot be built ({error}); use the tokenizer files of "
            "the model itself"
        ) from None


def read_prompt_images(reader: ImageReader | None, files: Sequence[str]) -> PromptImages | None:
    """Return the images of `--image` for the `reader` of the model, if it has one.

    Raises UserError for images that a model does not read, or that are missing.
    """
    if reader is None:
        if files:
            problem = f"this model is not trained on images; use a model of {', '.join(FAMILIES)}"
            raise UserError(f"--image={files[0]}: {problem}")
        return None
    return PromptImages(reader, tuple(store_image(file, None, f"--image={file}") for file in files))


def image_inputs(reader: ImageReader, model: Any, *, every_rank: bool) -> ImageInputs:
    """Return the builder of a loaded model's image inputs; with `every_rank` each batch has an image."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    rope = next((module.get_rope_index for module in inner.modules() if hasattr(module, "get_rope_index")), None)
    taken = inspect.signature(inner.forward).parameters
    name = next((name for name in TYPE_NAMES if name in taken), None)
    window = getattr(inner.config.get_text_config(), "sliding_window", None) or sys.maxsize
    empty = reader.empty_document() if every_rank else None
    return ImageInputs(reader, name if rope is None else None, window, rope, empty)
