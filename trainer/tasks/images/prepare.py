"""Check an image run and prepare its data, before any denoiser weights are loaded."""

from collections.abc import Callable, Iterator

from trainer.config import RunConfig, UserError
from trainer.config.errors import to_text
from trainer.config.needs import find_other_task_settings
from trainer.data.prepared import PreparedRun
from trainer.model.targets import check_targets
from trainer.tasks.images.data import prepare_images
from trainer.tasks.images.model import ImageModel, check_weights
from trainer.tasks.images.pipeline import Pipeline, read_pipeline
from trainer.tasks.images.sizes import check_sizes


def prepare_image_run(config: RunConfig, log: Callable[[str], None], files: object = None) -> PreparedRun:
    """Check the pipeline and settings, and encode the data. Raises UserError for invalid settings or data."""
    for mistake in _find_mistakes(config):
        raise UserError(mistake)
    log(f"checking the pipeline {config.base_model}")
    pipeline = read_pipeline(config.base_model, config.model)
    for mistake in _find_family_mistakes(config, pipeline):
        raise UserError(mistake)
    check_sizes(config.image, pipeline.downsampling * pipeline.family.patch)
    pipeline.build_training_scheduler(config.image)
    with pipeline.convert_read_errors(f"{pipeline.family.denoiser}/config.json"):
        model = ImageModel(pipeline)
    check_weights(model, pipeline, config.model)
    check_targets(model, config.lora)
    paths = [source.path for source in config.dataset.mix] or [config.dataset.path]
    log(f"encoding the images of {', '.join(map(str, paths))}, unless cached")
    return PreparedRun(None, pipeline, prepare_images(config, pipeline, log))


def _find_mistakes(config: RunConfig) -> Iterator[str]:
    training, image = config.training, config.image
    if config.scu.enabled:
        yield "scu.enabled=true: measures bits per token, which image models do not have; set scu.enabled: false"
    if config.adapter == "none":
        yield "adapter=none: not supported for image models; use lora or qlora"
    for setting in find_other_task_settings(config, "image"):
        yield f"{setting.name}={to_text(setting.value)}: only for language models; remove it"
    if training.gradient_checkpointing == "selective":
        yield "training.gradient_checkpointing=selective: not supported for image models; use non_reentrant"
    if layers := training.gradient_checkpointing_layers:
        yield f"training.gradient_checkpointing_layers={layers}: image models recompute every block; remove the setting"
    if config.lora.modules_to_save:
        saved = to_text(config.lora.modules_to_save)
        yield f"lora.modules_to_save={saved}: diffusers only loads LoRA; list these layers in lora.target_modules"
    if config.lora.init in ("loftq", "pissa", "pissa_niter_16", "olora"):
        yield f"lora.init={config.lora.init}: not supported for image models; use default, gaussian or orthogonal"
    if image.prior is not None and not image.prior.path:
        yield "image.prior.path: missing; set it to a folder with images of the class"


def _find_family_mistakes(config: RunConfig, pipeline: Pipeline) -> Iterator[str]:
    image, flow, name = config.image, pipeline.family.is_flow_matching, pipeline.family.name
    if flow and image.min_snr_gamma is not None:
        yield f"image.min_snr_gamma={image.min_snr_gamma:g}: {name} is trained by flow matching; remove the setting"
    if flow and image.prediction != "auto":
        yield f"image.prediction={image.prediction}: {name} is trained by flow matching; use auto"
    if not flow and image.time_shift != "auto":
        yield f"image.time_shift={image.time_shift:g}: only for flow matching; use auto"
    defaults = type(image)()
    for setting in ("logit_mean", "logit_std") if not flow and image.times == "auto" else ():
        if (value := getattr(image, setting)) != getattr(defaults, setting):
            yield f"image.{setting}={value:g}: {name} draws uniform times; set image.times: logit_normal, or remove it"
    if image.guidance != defaults.guidance and not pipeline.settings.get("guidance_embeds"):
        yield f"image.guidance={image.guidance:g}: only for guidance-distilled models such as Flux; remove it"
