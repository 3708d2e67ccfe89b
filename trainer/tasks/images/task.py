"""Train image models: the denoiser predicts noise or velocity from noisy latents."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from trainer.config import RunConfig
from trainer.contract.known_versions import require
from trainer.data.prepared import PreparedRun
from trainer.monitor.metrics import Record
from trainer.monitor.report.charts import render_template
from trainer.monitor.report.model_card import MARKER, format_python_path, get_public_name, is_on_hub
from trainer.monitor.report.write import extract_metric_values
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.tasks.images.batches import ImageBatch, ImageBatches, iterate_evaluation_images
from trainer.tasks.images.data import PreparedImages
from trainer.tasks.images.families import Conditions
from trainer.tasks.images.files import DIFFUSERS_FILE, write_for_diffusers
from trainer.tasks.images.model import ImageModel, load_image_model
from trainer.tasks.images.objective import NoiseLoss, Objective
from trainer.tasks.images.pipeline import Pipeline, read_pipeline, resolve_single_file_pipeline
from trainer.tasks.task import Task

Log = Callable[[str], None]


class ImageTask(Task):
    """Task for image models (diffusers pipelines); a sample is an image with its caption."""

    title = "an image model"
    batch_units = ("images",)
    peft_type = None
    formats = ("peft", "kohya", "hf")
    unsupported: ClassVar[Mapping[str, str]] = {
        "generate": "generate images with diffusers as in the adapter's README.md",
        "serve": "serve is only for models that generate text; `zerolora export` converts the adapter for ComfyUI",
        "eval": "see its held-out loss in metrics.jsonl",
        "merge --quantize": "--quantize is only for language models; merge without it",
        "merge --dtype=stored": "--dtype=stored is only for language models; merge without it",
    }

    def __init__(
        self, config: RunConfig, prepared: PreparedRun, ranks: Ranks, device: torch.device, precision: str, log: Log
    ) -> None:
        """Set up the task; every `auto` in `config` must be resolved."""
        self._config, self._ranks, self._device, self._log = config, ranks, device, log
        self._dtype, self.sample_every = DTYPES[precision], config.image.sample_every or 0
        self._pipeline: Pipeline = prepared.model_config
        self._data: PreparedImages = prepared.data
        self._objective = Objective(self._pipeline, config.image)

    def load_base(self, dtype: torch.dtype, engine_config: dict[str, Any], shards: LayerShards | None) -> ImageModel:
        return load_image_model(
            self._pipeline,
            self._config.model,
            dtype=dtype,
            device=self._device,
            quantization=self._config.quantization if self._config.adapter == "qlora" else None,
            deepspeed_config=engine_config if engine_config["zero_optimization"]["stage"] == 3 else None,
            shards=shards,
        )

    def run_dummy_forward(self, model: Any) -> object:
        levels = self._pipeline.settings.get("block_out_channels", ())
        side = 4 * self._pipeline.family.patch * 2 ** max(0, len(levels) - 1)
        device = self._device
        conditions = _add_batch_dimension(self._data.train.store.load_conditions(0), device, self._dtype)
        conditions["sizes"] = torch.full((1, 6), 8.0 * side, device=device)
        conditions["guidance"] = torch.ones(1, device=device)
        noisy = torch.zeros(1, self._pipeline.channels, side, side, device=device, dtype=self._dtype)
        return model(noisy, torch.ones(1, device=device), conditions)

    def build_loss(self, model: Any, *, fused_head: bool | None) -> NoiseLoss:
        return NoiseLoss(self._objective, self._dtype, self._config.image.guidance)

    def build_batches(self) -> ImageBatches:
        config, training = self._config, self._config.training
        return ImageBatches(
            self._data.train,
            self._objective.draw_timestep,
            config.image,
            prior=self._data.prior,
            batch_size=training.batch_size,
            accumulation=training.gradient_accumulation_steps,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            seed=config.seed,
            shuffle=config.dataset.shuffle,
        )

    def build_evaluation_batches(self) -> Iterable[ImageBatch]:
        training, samples = self._config.training, self._data.evaluation
        assert samples is not None
        return iterate_evaluation_images(
            samples,
            batch_size=training.eval_batch_size or training.batch_size,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )

    @torch.no_grad()
    def generate_samples(self, engine: Engine, when: str, step: int, folder: Any) -> None:
        """Generate and save an image for each sample prompt, always with the same seeds; a collective call."""
        prompts, pipeline, image = self._config.logging.sample_prompts, self._pipeline, self._config.image
        if not prompts or pipeline.folder is None:
            return
        model, was_training, store = engine.module.get_base_model(), engine.module.training, self._data.train.store
        engine.eval()
        sampler = build_sampling_pipeline(model.denoiser, pipeline, self._device)
        images = []
        for index, prompt in enumerate(prompts):
            # The empty prompt is for classifier-free guidance.
            encoded = [store.load_conditions(store.captions.index(caption)) for caption in (prompt, "")]
            conditions, empty = (_add_batch_dimension(each, self._device, model.dtype) for each in encoded)
            arguments: dict[str, Any] = dict(pipeline.family.build_pipeline_arguments(conditions, empty))
            if image.sample_guidance != "auto":
                arguments["guidance_scale"] = image.sample_guidance
            latents = sampler(
                **arguments,
                height=image.resolution,
                width=image.resolution,
                num_inference_steps=image.sample_steps,
                generator=torch.Generator().manual_seed(self._config.seed + index),
                output_type="latent",
            ).images
            images.append(_decode(sampler, latents, image.resolution))
        sampler.vae.to("cpu")
        engine.train(was_training)
        for prompt, sample in zip(prompts, images, strict=True):
            folder.save_image(prompt, when, step, sample)
        self._log(f"sample images, step {step}: {len(images)} in samples/")

    def prepare_companion_files(self) -> Callable[[Path], None]:
        return write_for_diffusers

    @classmethod
    def build_model_card(cls, config: RunConfig, run_dir: Path, records: list[Record], name: str) -> str:
        pipeline = read_pipeline(config.base_model, config.model)
        base = get_public_name(config.base_model)
        sources = [source.path for source in config.dataset.mix or (config.dataset,) if source.path]
        front: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
        front |= {"base_model": base} if is_on_hub(base) else {}
        front["tags"] = ["lora", "diffusers", "text-to-image", "zerolora"]
        rows = [
            ("data", ", ".join(map(get_public_name, sources))),
            ("resolution", f"{config.image.resolution}, {'buckets' if config.image.buckets else 'squares'}"),
            ("adapter", f"{config.adapter}, r={config.lora.r}, alpha={config.lora.alpha:g}"),
            ("steps", f"{max((record['step'] or 0 for record in records), default=0):,.0f}"),
            ("learning rate", f"{config.training.learning_rate:g}, {config.training.lr_scheduler}"),
            ("seed", str(config.seed)),
        ]
        if len(losses := extract_metric_values(records, "eval/loss")) > 1:
            rows.append(("held-out loss", f"{losses[0]:.5f} → {losses[-1]:.5f}"))
        uploaded = not Path(name).is_absolute()
        single = resolve_single_file_pipeline(config.base_model, config.model)
        return render_template(
            "image_card.md.jinja",
            front=yaml.safe_dump(front, sort_keys=False),
            marker=MARKER,
            title=name.rpartition("/")[2],
            base=base,
            prompts=list(config.logging.sample_prompts),
            family=pipeline.family,
            single=single,
            origin=format_python_path(single[0], is_uploaded=uploaded) if single else "",
            adapter=f'"{name}"' if uploaded else format_python_path(name),
            base_path=format_python_path(config.base_model, is_uploaded=uploaded),
            file=DIFFUSERS_FILE,
            rows=rows,
        )


def build_sampling_pipeline(denoiser: Any, pipeline: Pipeline, device: torch.device) -> Any:
    """Build diffusers' pipeline with this denoiser, an fp32 VAE and no text encoders."""
    # diffusers derives the latent size from the VAE.
    sampler = pipeline.load_encoder_pipeline(torch.float32, text=False, vae=True)
    sampler.register_modules(**{pipeline.family.denoiser: denoiser})
    sampler.vae.to(device)
    sampler.set_progress_bar_config(disable=True)
    return sampler


def _add_batch_dimension(conditions: Conditions, device: torch.device, dtype: torch.dtype) -> Conditions:
    return {name: value[None].to(device, dtype) for name, value in conditions.items()}


def _decode(sampler: Any, latents: torch.Tensor, side: int) -> Any:
    vae = sampler.vae
    if latents.dim() == 3:  # packed [B, T, 4 C], by pipelines that cut latents into patches
        latents = require(sampler, "_unpack_latents", "diffusers")(latents, side, side, sampler.vae_scale_factor)
    latents = latents.float()
    if not hasattr(vae, "bn"):  # FLUX.2's pipeline has already denormalized them
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return sampler.image_processor.postprocess(vae.decode(latents, return_dict=False)[0], output_type="pil")[0]
