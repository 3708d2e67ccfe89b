"""All checks and data of a run on pictures, before a weight of the denoiser is loaded."""

from collections.abc import Callable, Iterator

from trainer.config import RunConfig, UserError
from trainer.data.prepared import Prepared
from trainer.images.data import prepare_images
from trainer.images.model import ImageModel
from trainer.images.pipeline import Pipeline, read_pipeline
from trainer.images.sizes import check_sizes
from trainer.model.targets import check_targets


def prepare_pictures(config: RunConfig, tell: Callable[[str], None]) -> Prepared:
    """Check the pipeline and the settings, encode pictures and captions. Raises UserError."""
    for mistake in _mistakes(config):
        raise UserError(mistake)
    tell(f"checking the pipeline {config.base_model}")
    pipeline = read_pipeline(config.base_model, config.model)
    for mistake in _of_family(config, pipeline):
        raise UserError(mistake)
    check_sizes(config.image, pipeline.side)
    check_targets(ImageModel(pipeline), config.lora)
    paths = [source.path for source in config.dataset.mix] or [config.dataset.path]
    tell(f"encoding the pictures of {', '.join(map(str, paths))}, or finding that done")
    return Prepared(None, pipeline, prepare_images(config, pipeline, tell))


def _mistakes(config: RunConfig) -> Iterator[str]:
    """A line for each setting that means nothing to an image model."""
    training, image = config.training, config.image
    if config.scu.enabled:
        yield "scu.enabled=true: steers by bits a token, and a loss on noise has none; turn it off for image models"
    if config.adapter == "none":
        yield "adapter=none: of image models only adapters are trained; use lora or qlora"
    if training.qat:
        yield f"training.qat={training.qat}: rounds for servers of language models; remove it for image models"
    for name in ("packing", "streaming"):
        if getattr(config.dataset, name):
            yield f"dataset.{name}=true: pictures are neither packed nor streamed; remove it"
    if config.model.added_tokens:
        yield "model.added_tokens: image models get no new tokens; remove it"
    if training.gradient_checkpointing in ("reentrant", "selective"):
        yield (
            f"training.gradient_checkpointing={training.gradient_checkpointing}: image models are recomputed block by "
            "block; use non_reentrant"
        )
    if config.lora.init in ("loftq", "pissa", "pissa_niter_16", "olora"):
        yield f"lora.init={config.lora.init}: not for image models; use default, gaussian or orthogonal"
    if image.prior is not None and not image.prior.path:
        yield "image.prior.path: missing; name a folder of pictures of the class"
    if image.train_text_encoders:
        yield "image.train_text_encoders=true: not yet; captions are encoded once by frozen encoders; turn it off"


def _of_family(config: RunConfig, pipeline: Pipeline) -> Iterator[str]:
    image, flow, name = config.image, pipeline.family.flow, pipeline.family.name
    if flow and image.min_snr_gamma is not None:
        yield f"image.min_snr_gamma={image.min_snr_gamma:g}: {name} is trained by flow matching; remove it"
    if flow and image.prediction != "auto":
        yield f"image.prediction={image.prediction}: {name} is trained by flow matching; use auto"
    if not flow and image.time_shift != "auto":
        yield f"image.time_shift={image.time_shift:g}: only flow matching is shifted; use auto"
