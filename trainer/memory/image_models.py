"""Estimate the memory of image models by observing the activations of a model without weights.

The model runs forward and backward once on torch's meta device, counting live tensors except weights. Attention is
counted as flash attention, which keeps no scores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch

from trainer.config import LoraSection, RunConfig
from trainer.data.prepared import PreparedRun
from trainer.memory.activations import Activations
from trainer.memory.bytes import Estimate, estimate
from trainer.memory.decisions import Machine, decide_for_images
from trainer.memory.model_widths import read_weights
from trainer.memory.observed import Meter, substitute_attention
from trainer.memory.planner import Changes, DataSize, Planner
from trainer.memory.stored_weights import ModelShapes
from trainer.model.adapter import apply_empty_adapter
from trainer.patches.model_properties import ModelProperties
from trainer.tasks.images.model import ImageModel
from trainer.tasks.images.pipeline import Pipeline

CAPTION_TOKENS = {"sd": 77, "sdxl": 77, "sd3": 333, "flux": 512, "flux2": 512}
"""Number of tokens in an encoded caption, by model family."""
CaptionShapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class ImagePlanner(Planner):
    """Estimates the memory of image model configurations; an image counts as one token in `lengths`."""

    pipeline: Pipeline
    text: CaptionShapes
    """Shape of each tensor of an encoded caption, by name."""
    has_sequences: ClassVar[bool] = False
    decide = staticmethod(decide_for_images)

    @classmethod
    def from_run(cls, machine: Machine, config: RunConfig, prepared: PreparedRun) -> Planner:
        pipeline: Pipeline = prepared.model_config
        count, text = None, infer_caption_shapes(pipeline)
        if prepared.data is not None:
            samples = prepared.data.train
            count, caption = len(samples), samples.store.load_conditions(samples[0].caption)
            text = {name: tuple(value.shape) for name, value in caption.items()}
        return cls(read_image_shapes(pipeline, config.lora), DataSize(1, 1, count), machine, pipeline, text)

    @staticmethod
    def halve_samples(config: RunConfig) -> Changes:
        side, step = config.image.resolution, config.image.bucket_step
        return {"image.resolution": side // 2 // step * step} if side >= 2 * step else {}

    def estimate(self, config: RunConfig) -> Estimate:
        training, lora = config.training, config.lora.model_dump_json()
        recompute = training.gradient_checkpointing != "none"
        per_row = self._observe_images(config.image.resolution, lora, self._element_size, recompute=recompute)
        rows = training.batch_size * (2 if config.image.prior is not None else 1)
        kept = 0 if recompute and training.offload_activations else rows * per_row.kept
        placement = self._build_placement(config, self.build_decisions(config))
        return estimate(self.shapes, None, placement, Activations(kept, rows * per_row.backward))

    def _minimize_recomputed_layers(self, config: RunConfig, memory: int) -> RunConfig:
        return config  # either all blocks are recomputed or none

    @cached_property
    def _observe_images(self) -> Callable[..., Activations]:
        return cache(partial(observe_activations, self.pipeline, self.text))


def read_image_shapes(pipeline: Pipeline, lora: Any) -> ModelShapes:
    model = _build_meta_model(pipeline, lora)
    base = model.get_base_model()
    blocks = [base.get_submodule(path) for path in base.list_shard_blocks()]
    return ModelShapes(
        hidden=1,
        vocabulary=1,
        weights=tuple(read_weights(model, blocks, None, in_mxfp4=False)),
        layers=(0,) * len(blocks),
        properties=ModelProperties(True, False, False, False, "an image model", False, {}),
        model=None,
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in base.denoiser.buffers()),
    )


def _build_meta_model(pipeline: Pipeline, lora: Any) -> Any:
    from accelerate import init_empty_weights

    model = ImageModel(pipeline)
    model.requires_grad_(False)
    with init_empty_weights():
        return apply_empty_adapter(model, lora, torch.float32, task_type=None)


def observe_activations(
    pipeline: Pipeline, text: CaptionShapes, side: int, lora: str, element_size: int, *, recompute: bool
) -> Activations:
    """Observe the activation memory for an image of `side` x `side` pixels, with `element_size` bytes per value.

    `lora` is the settings section as JSON, because the arguments must be hashable.
    """
    dtype = torch.float32 if element_size == 4 else torch.bfloat16
    model = _build_meta_model(pipeline, LoraSection.model_validate_json(lora)).to("meta", dtype)
    denoiser = model.get_base_model().denoiser.train()
    if recompute:
        denoiser.enable_gradient_checkpointing()
    with substitute_attention(), (meter := Meter(model)):
        output = model(*_build_inputs(pipeline, text, side // pipeline.downsampling, dtype))
        kept = meter.live
        torch.autograd.backward(output, torch.empty_like(output))
    return Activations(kept, meter.peak - kept)


def _build_inputs(pipeline: Pipeline, text: CaptionShapes, side: int, dtype: torch.dtype) -> tuple[Any, ...]:
    conditions = {name: torch.empty(1, *shape, device="meta", dtype=dtype) for name, shape in text.items()}
    conditions["sizes"] = torch.empty(1, 6, device="meta")
    conditions["guidance"] = torch.empty(1, device="meta")
    noisy = torch.empty(1, pipeline.channels, side, side, device="meta", dtype=dtype)
    return noisy, torch.empty(1, device="meta"), conditions


def infer_caption_shapes(pipeline: Pipeline) -> CaptionShapes:
    if pipeline.caption_shapes:
        return pipeline.caption_shapes
    settings = pipeline.build_empty_denoiser().config
    width = next(settings[name] for name in ("joint_attention_dim", "cross_attention_dim") if name in settings)
    pooled = settings.get("pooled_projection_dim")
    if not pooled:
        projected = settings.get("projection_class_embeddings_input_dim")
        pooled = int(projected) - 6 * int(settings["addition_time_embed_dim"]) if projected else 1
    return {"text": (CAPTION_TOKENS[pipeline.family.name], width), "pooled": (int(pooled),)}
