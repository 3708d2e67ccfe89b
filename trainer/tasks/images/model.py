"""The denoiser wrapped as a model: loaded module by module, with default LoRA targets and transformer blocks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.model.random_weights import RandomTensors
from trainer.model.stored_layout import StoredParameter
from trainer.model.tensor_files import SafetensorsFiles
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.tasks.images.families import Conditions
from trainer.tasks.images.pipeline import Pipeline

ATTENTION = ("attn", "attn1")
"""Names of a transformer block's first attention module in diffusers."""


class ModelConfigStub(SimpleNamespace):
    """The attributes of a transformers configuration that other code reads."""

    def get_text_config(self) -> "ModelConfigStub":
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class ImageModel(nn.Module):
    """Wraps the denoiser in a submodule named as in the pipeline, so that saved adapters have diffusers' names."""

    base_model_prefix = ""
    """PEFT reads this attribute if submodules are transformers models."""

    def __init__(self, pipeline: Pipeline, denoiser: Any = None) -> None:
        super().__init__()
        denoiser, family = denoiser or pipeline.build_empty_denoiser(), pipeline.family
        self.pipeline, self.family = pipeline, family
        self.name_or_path = pipeline.denoiser_folder
        dropout = getattr(denoiser.config, "dropout", 0.0) or 0.0
        self.config = ModelConfigStub(model_type=family.name, dropout=float(dropout), tie_word_embeddings=False)
        self.add_module(family.denoiser, denoiser)

    def build_without_adapter(self) -> "ImageModel":
        """Return a copy of the model without an adapter, on the meta device."""
        with torch.device("meta"):
            return ImageModel(self.pipeline, type(self.denoiser).from_config(self.pipeline.settings))

    @property
    def denoiser(self) -> Any:
        return getattr(self, self.family.denoiser)

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in self.parameters() if weight.is_floating_point())

    def forward(self, noisy: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        """Return the prediction [B, C, H, W] for noisy latents at the scheduler's timesteps [B]."""
        return self.family.predict(self.denoiser, noisy, timesteps, conditions)

    def list_default_targets(self) -> list[str]:
        """Return the paths of all linear layers in transformer blocks, except in adaptive norms."""
        return [
            path
            for block in list_transformer_blocks(self)
            for path, module in self.named_modules()
            if path.startswith(f"{block}.")
            and isinstance(module, nn.Linear)
            and not path.removeprefix(f"{block}.").startswith("norm")
        ]

    def list_shard_blocks(self) -> list[str]:
        """Return the paths of the shard units at stage 3: transformer blocks and residual convolution blocks."""
        blocks, modules = set(list_transformer_blocks(self)), self.named_modules()
        return [path for path, module in modules if path in blocks or type(module).__name__ == "ResnetBlock2D"]

    def get_output_embeddings(self) -> None:
        """Return None: there is no language-model head."""

    def get_input_embeddings(self) -> None:
        """Return None: there are no token embeddings."""

    @property
    def is_gradient_checkpointing(self) -> bool:
        return bool(self.denoiser.is_gradient_checkpointing)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Enable recomputation; trainer/patches/recompute.py sets the function that recomputes a block."""
        self.denoiser.enable_gradient_checkpointing()

    def gradient_checkpointing_disable(self) -> None:
        self.denoiser.disable_gradient_checkpointing()


def list_transformer_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the modules that have an attention module as a child."""
    blocks = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        attention = next((children[name] for name in ATTENTION if name in children), None)
        if attention is not None and any(isinstance(part, nn.Linear) for part in attention.modules()):
            blocks.append(path)
    return blocks


def check_weights(model: ImageModel, pipeline: Pipeline, section: ModelSection) -> None:
    """Raise UserError if weight files are missing or damaged, or their shapes differ from the model's."""
    if pipeline.folder is not None:
        _map_stored_tensors(model, _open_files(pipeline, section), pipeline)


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
    """Load the denoiser module by module in `dtype` or quantized, partitioned as in trainer/model/base.py."""
    from trainer.model.streamed_weights import Filler  # imports bitsandbytes

    model = ImageModel(pipeline)
    model.requires_grad_(False)
    random = pipeline.folder is None
    files: Any = RandomTensors(pipeline.base_model, model, device) if random else _open_files(pipeline, section)
    stored = _map_stored_tensors(model, files, pipeline)
    Filler(model, files, stored, dtype, device, quantization).fill(deepspeed_config, shards)
    vars(model)["is_loaded_in_4bit"] = quantization is not None and not quantization.is_8bit
    return model


def _open_files(pipeline: Pipeline, section: ModelSection) -> SafetensorsFiles:
    return SafetensorsFiles(pipeline.denoiser_folder, section, stem="diffusion_pytorch_model")


def _map_stored_tensors(model: ImageModel, files: Any, pipeline: Pipeline) -> dict[str, Any]:
    """Map all parameters and buffers to tensors in files. Raises UserError for missing tensors and wrong shapes."""
    shapes, parameters = files.read_shapes(), dict(model.named_parameters())
    # Files only contain the denoiser, with names relative to it.
    prefix = "" if pipeline.folder is None else f"{pipeline.family.denoiser}."
    stored = {name: name.removeprefix(prefix) for name in (*parameters, *dict(model.named_buffers()))}
    missing = [name for name in parameters if stored[name] not in shapes]
    _reject_weights(pipeline, missing, "are missing from its files")
    different = [name for name, weight in parameters.items() if tuple(weight.shape) != shapes[stored[name]]]
    _reject_weights(pipeline, different, "differ in shape from config.json")
    return {name: StoredParameter(name, {name: (key,)}) for name, key in stored.items() if key in shapes}


def _reject_weights(pipeline: Pipeline, names: Sequence[str], problem: str) -> None:
    if names:
        fix = "use config.json and weights of the same model, or download the model again"
        raise UserError(f"base_model={pipeline.base_model}: {len(names)} weights {problem} (first: {names[0]}); {fix}")
