"""The denoiser as the rest of the trainer sees a model: read module by module, its usual targets, its layers."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.model.random_weights import RandomTensors
from trainer.model.stored_layout import Stored
from trainer.model.tensor_files import SafetensorsFiles
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.tasks.images.families import Conditions, Family
from trainer.tasks.images.pipeline import Pipeline
from trainer.tasks.images.text import Captions, EncoderFiles, empty_encoders

ATTENTION = ("attn", "attn1", "self_attn")
"""Names of the first attention of a transformer block in diffusers and of CLIP's, whichever model it is of."""


class ModelSettings(SimpleNamespace):
    """What is asked of any model's configuration."""

    def get_text_config(self) -> "ModelSettings":
        """Itself: all of the model is trained on."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


class ImageModel(nn.Module):
    """The denoiser under the name that it has in its pipeline, so that saved adapters have diffusers' names."""

    base_model_prefix = ""
    """Which PEFT asks for where models of transformers are among the parts."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Without memory for its weights; text encoders are parts of it where they are trained."""
        super().__init__()
        denoiser, family = pipeline.empty_denoiser(), pipeline.family
        self.family: Family = family
        self.name_or_path = pipeline.denoiser_folder
        dropout = getattr(denoiser.config, "dropout", 0.0) or 0.0
        self.config = ModelSettings(model_type=family.name, dropout=float(dropout), tie_word_embeddings=False)
        self.add_module(family.denoiser, denoiser)
        self.text_encoders = empty_encoders(pipeline) if pipeline.trains_text else {}
        for name, encoder in self.text_encoders.items():
            self.add_module(name, encoder)
        self._captions = Captions(pipeline, denoiser, self.text_encoders) if self.text_encoders else None

    @property
    def denoiser(self) -> Any:
        """The component that is trained."""
        return getattr(self, self.family.denoiser)

    @property
    def dtype(self) -> torch.dtype:
        """Of what it computes in."""
        return next(each.dtype for each in self.parameters() if each.is_floating_point())

    def conditions(self, captions: Sequence[str], cached: Conditions) -> Conditions:
        """What the denoiser reads of captions: what is cached, or what trained text encoders now make of them."""
        return cached if self._captions is None else self._captions.encoded(captions, cached)

    def forward(self, noisy: Tensor, times: Tensor, conditions: Conditions, captions: Sequence[str]) -> Tensor:
        """The prediction [B, C, H, W] for noisy latents at the scheduler's times [B]."""
        conditions = self.conditions(captions, conditions)
        return self.family.predict(self.denoiser, noisy, times, conditions)

    def usual_targets(self) -> list[str]:
        """Attention and feed-forward: the linear layers of every transformer block but those of its norms."""
        return [
            path
            for block in transformer_blocks(self)
            for path, module in self.named_modules()
            if path.startswith(f"{block}.")
            and isinstance(module, nn.Linear)
            and not path.removeprefix(f"{block}.").startswith("norm")
        ]

    def gathered_blocks(self) -> list[str]:
        """What stage 3 gathers at once: transformer blocks, and the convolutions around them."""
        blocks = transformer_blocks(self)
        residual = [path for path, module in self.named_modules() if type(module).__name__ == "ResnetBlock2D"]
        return [path for path, _ in self.named_modules() if path in {*blocks, *residual}]

    def never_read(self) -> list[str]:
        """Layers without effect: SDXL reads its first text encoder before the last layer, and nothing else of it."""
        if self.family.name != "sdxl" or "text_encoder" not in self.text_encoders:
            return []
        return [path for path in transformer_blocks(self) if path.startswith("text_encoder.")][-1:]

    def get_output_embeddings(self) -> None:
        """It has none."""

    def get_input_embeddings(self) -> None:
        """It has none."""

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward pass."""
        return bool(self.denoiser.is_gradient_checkpointing)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """transformers' name for it; what runs a block again is set by trainer/patches/recompute.py."""
        self.denoiser.enable_gradient_checkpointing()
        encoder: Any
        for encoder in self.text_encoders.values():
            encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """The opposite."""
        self.denoiser.disable_gradient_checkpointing()
        encoder: Any
        for encoder in self.text_encoders.values():
            encoder.gradient_checkpointing_disable()


def transformer_blocks(model: nn.Module) -> list[str]:
    """Paths of the modules that hold an attention beside what belongs to it, innermost ones."""
    found = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        attention = next((children[name] for name in ATTENTION if name in children), None)
        if attention is not None and any(isinstance(each, nn.Linear) for each in attention.modules()):
            found.append(path)
    return found


def check_weights(model: ImageModel, pipeline: Pipeline, section: ModelSection) -> None:
    """Raise UserError where the files of an empty model's weights are not there, damaged, or of another shape."""
    if pipeline.folder is not None:
        files = DenoiserFiles(pipeline, section, EncoderFiles(pipeline, model.text_encoders))
        _layout(model, files, pipeline)


def load_image_model(
    pipeline: Pipeline,
    section: ModelSection,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationSection | None = None,
    deepspeed_config: dict[str, Any] | None = None,
    shards: LayerShards | None = None,
) -> ImageModel:
    """The denoiser in `dtype`, or in 4 bits, filled module by module; partitioned as trainer/model/base.py says."""
    from trainer.model.streamed_weights import fill  # brings bitsandbytes

    model = ImageModel(pipeline)
    model.requires_grad_(False)
    files: Any
    if pipeline.folder is None:
        files = RandomTensors(pipeline.base_model, model, device)
    else:
        files = DenoiserFiles(pipeline, section, EncoderFiles(pipeline, model.text_encoders))
    if shards is not None:
        shards.plan(model)
    fill(
        model,
        files,
        _layout(model, files, pipeline),
        dtype=dtype,
        device=device,
        quantization=quantization,
        deepspeed_config=deepspeed_config,
        shards=shards,
    )
    vars(model)["is_loaded_in_4bit"] = quantization is not None and not quantization.eight_bit
    return model


class DenoiserFiles:
    """The safetensors of the denoiser and those of text encoders, their tensors named as in the whole model."""

    def __init__(self, pipeline: Pipeline, section: ModelSection, encoders: EncoderFiles) -> None:
        """Raises UserError if they are not all there or one cannot be read."""
        assert pipeline.folder is not None
        folder = pipeline.folder / pipeline.family.denoiser
        self._prefix = f"{pipeline.family.denoiser}."
        self._encoders = encoders
        self._files = SafetensorsFiles(str(folder), section, stem="diffusion_pytorch_model")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        own = {self._prefix + name: shape for name, shape in self._files.shapes().items()}
        return own | self._encoders.shapes()

    def read(self, name: str, index: int | None = None) -> Tensor:
        """One tensor, on the CPU."""
        if not name.startswith(self._prefix):
            return self._encoders.read(name)
        return self._files.read(name.removeprefix(self._prefix), index)


def _layout(model: nn.Module, files: Any, pipeline: Pipeline) -> dict[str, Any]:
    """Every parameter and stored buffer by its own name. Raises UserError for what is missing or of another shape."""
    shapes, wanted = files.shapes(), dict(model.named_parameters())
    _refuse(pipeline, [name for name in wanted if name not in shapes], "are in none of its files")
    of_other_shape = [name for name, each in wanted.items() if tuple(each.shape) != shapes[name]]
    _refuse(pipeline, of_other_shape, "have another shape than config.json says")
    buffers = [name for name, _ in model.named_buffers() if name in shapes]
    return {name: Stored(name, {name: (name,)}) for name in (*wanted, *buffers)}


def _refuse(pipeline: Pipeline, names: Sequence[str], what: str) -> None:
    if names:
        raise UserError(
            f"base_model={pipeline.base_model}: {len(names)} weights {what} (first: {names[0]}); take "
            "config.json and weights from the same model, or download it again"
        )
