"""Load the processors of image-text models, build their inputs, and cache image features."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from trainer.config import DatasetSection, ModelSection, UserError
from trainer.contract.rendezvous import get_host_name
from trainer.data.image_features import GRID, FeatureFiles, TowerOutput
from trainer.data.image_parts import encode_image
from trainer.data.samples import Samples
from trainer.data.vision import TOKEN_TYPE_ARGUMENTS, ImageInputs, ImageReader, PromptImages
from trainer.model.base import load_model_config
from trainer.model.model_source import build_load_error
from trainer.model.published_shapes import is_random
from trainer.model.targets import find_non_text_modules
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.parallel.ranks.group import gather_objects

REPORT_INTERVAL = 100

SUPPORTED_MODEL_TYPES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3",
    "internvl", "llama4", "smolvlm", "idefics3", "lfm2_vl", "llava", "glm4v", "glm46v", "paddleocr_vl",
)  # fmt: skip
"""Supported model types; tests compare their losses with transformers and PEFT."""
TORCHVISION_ONLY = ("llama4", "lfm2_vl")
"""Model types for which transformers needs torchvision to read images."""


def load_image_reader(
    base_model: str, section: ModelSection, dataset: DatasetSection, tokenizer: Any, model_config: Any = None
) -> ImageReader | None:
    """Load the processor of a vision-language model; return None to train on text alone.

    Returns None if the model is not supported, or if torchvision or preprocessor_config.json is missing. Raises
    UserError if the processor cannot be built, or if `dataset.min_pixels` or `dataset.max_pixels` is invalid for it.
    """
    reader = _load_reader(base_model, section, tokenizer, model_config)
    sizes = {"min_pixels": dataset.min_pixels, "max_pixels": dataset.max_pixels}
    for name, value in sizes.items():
        if value is not None and (reader is None or not reader.set_pixel_limit(name, value)):
            raise UserError(f"dataset.{name}={value}: has no effect on images of {base_model}; remove the setting")
    if (sizes["min_pixels"] or 0) > (sizes["max_pixels"] or sys.maxsize):
        raise UserError(
            "dataset.min_pixels={min_pixels}: exceeds dataset.max_pixels={max_pixels}; lower min_pixels".format(**sizes)
        )
    return reader


def _load_reader(base_model: str, section: ModelSection, tokenizer: Any, model_config: Any) -> ImageReader | None:
    from transformers import AutoImageProcessor

    model_config = model_config or load_model_config(base_model, section)
    kind, revision = model_config.model_type, section.revision or "main"
    is_missing = kind in TORCHVISION_ONLY and find_spec("torchvision") is None
    if is_random(base_model) or kind not in SUPPORTED_MODEL_TYPES or is_missing:
        return None
    try:
        images = AutoImageProcessor.from_pretrained(base_model, revision=revision)
        processor_class, settings = _find_processor_class(base_model, revision, model_config)
        parts = processor_class.get_attributes()
    except (OSError, ImportError):
        # Without preprocessor_config.json, or torchvision if the processor needs it, train on text alone.
        return None
    except Exception as error:  # invalid values raise many types of errors
        raise build_load_error("base_model", base_model, error) from None
    accepted = set(inspect.signature(processor_class.__init__).parameters) - {*parts, "self", "kwargs", "chat_template"}
    options = {name: value for name, value in settings.items() if name in accepted}
    try:
        return ImageReader(processor_class, images, tokenizer, options, model_config.image_token_id)
    except (AttributeError, TypeError, ValueError) as error:
        fix = "use the model's own tokenizer files"
        raise UserError(f"base_model={base_model}: its image processor cannot be built ({error}); {fix}") from None


def _find_processor_class(base_model: str, revision: str, model_config: Any) -> tuple[Any, dict[str, Any]]:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    processor_class = PROCESSOR_MAPPING[type(model_config)]
    try:
        settings, _ = processor_class.get_processor_dict(base_model, revision=revision)
    except OSError:  # older models have no processor_config.json
        return processor_class, {}
    # Pixtral has the model type of LLaVA, and only this file names its processor.
    name = settings.get("processor_class")
    return (name and processor_class_from_name(name)) or processor_class, settings


def read_prompt_images(reader: ImageReader | None, files: Sequence[str]) -> PromptImages | None:
    """Load the images given with `--image`; return None if the model has no `reader`.

    Raises UserError if an image is missing, or if images are given without a reader.
    """
    if reader is None:
        if files:
            fix = "use a model listed in docs/reference/vision-models.md, and install the package named there"
            raise UserError(f"--image={files[0]}: this model does not accept images here; {fix}")
        return None
    return PromptImages(reader, tuple(encode_image(file, None, f"--image={file}") for file in files))


def has_trained_image_modules(model: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not hasattr(model, "get_base_model"):
        return True
    inner = model.get_base_model()
    parts = [part for path in find_non_text_modules(inner) for part in inner.get_submodule(path).modules()]
    return any(isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper) for part in parts)


def build_image_inputs(reader: ImageReader, model: Any, *, add_dummy_images: bool) -> ImageInputs:
    inner = find_base_model(model)
    rope = next((module.get_rope_index for module in inner.modules() if hasattr(module, "get_rope_index")), None)
    accepted = inspect.signature(inner.forward).parameters
    name = next((name for name in TOKEN_TYPE_ARGUMENTS if name in accepted), None)
    text = inner.config.get_text_config()
    is_gemma_4 = text.model_type.startswith("gemma4")
    if rope is not None or (is_gemma_4 and text.use_bidirectional_attention != "vision"):
        name = None
    window = getattr(text, "sliding_window", None) or sys.maxsize
    empty = reader.build_dummy() if add_dummy_images else None
    return ImageInputs(reader, inner.dtype, name, window, not is_gemma_4, rope, empty)


@torch.no_grad()
def cache_features(
    inputs: ImageInputs, model: Any, samples: Samples, folder: Path, device: torch.device, log: Callable[[str], None]
) -> ImageInputs:
    """Cache the features of all images in `folder`, and return `inputs` that read the cached features.

    This is a collective call. The ranks on a host divide the missing images. All ranks run the vision tower the same
    number of times, because it may be sharded. The name of the cache folder is a hash of the image settings and of the
    tower's output for a noise image, which identifies its weights. Raises UserError if the adapter trains the tower.
    """
    inner = find_base_model(model)
    if has_trained_image_modules(model):
        raise UserError("vision.cache=true: the adapter at lora.adapter_path trains the vision tower; set cache: false")
    accepted = inspect.signature(inner.get_image_features).parameters

    def compute(image: bytes) -> tuple[TowerOutput, torch.Tensor | None]:
        arguments = inputs.reader.build_inputs([image], inputs.dtype)
        moved = {name: value.to(device) for name, value in arguments.items() if name in accepted}
        output = inner.get_image_features(**moved, return_dict=True)
        return TowerOutput.from_model(output), arguments.get(GRID)

    [[noise]] = inputs.reader.build_dummy().images
    state = next(iter(compute(noise)[0].list_tensors().values()))
    digest = xxhash.xxh3_128_hexdigest(state.float().cpu().numpy().tobytes() + inputs.reader.settings_digest.encode())
    files = FeatureFiles(folder / "features" / gather_objects(digest)[0])
    hosts = gather_objects(get_host_name())
    rank = dist.get_rank() if dist.is_initialized() else 0
    host_ranks = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    rank_images = (
        image for chunk in samples.iterate_image_chunks() for image in chunk[host_ranks.index(rank) :: len(host_ranks)]
    )
    missing = {path: image for image in rank_images if not (path := files.get_path(image)).exists()}
    rounds = max(gather_objects(len(missing)))
    paths = list(missing)
    for number in range(rounds):
        output, grid = compute(missing[paths[number]] if number < len(paths) else noise)
        if number < len(paths):
            files.write(paths[number], output, grid)
        if (number + 1) % REPORT_INTERVAL == 0:
            log(f"image features: {number + 1:,} of {rounds:,} computed by each rank")
    computed = sum(gather_objects(len(missing)))
    log(f"image features: {computed:,} computed and saved in {files.folder}")
    return replace(inputs, features=files, dummy=None)
