"""The settings of image models (SDXL, SD3.5, Flux); the text under a field is its documentation."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.data_sections import SourceSection
from trainer.config.needs import Needs
from trainer.config.types import Count, Fraction, NonNegative, Positive, Section

_LOGIT_NORMAL, _SAMPLES = Needs(".times", ("logit_normal",)), Needs("logging.sample_prompts")


class ImageSection(Section):
    """What training an image model has of its own: its pictures, its noise, its samples."""

    resolution: Annotated[int, Field(ge=8, le=8192)] = 1024
    """Side of a square picture in pixels; pictures of other shapes get as many pixels."""
    buckets: bool = True
    """Sort pictures into sizes by their shape, and crop little; false crops every picture to a square."""
    bucket_step: Annotated[int, Field(ge=8, le=1024), Needs(".buckets", (True,))] = 64
    """What the sides of those sizes are multiples of."""
    caption: str | None = None
    """Caption of pictures that have none, such as `a photo of sks dog`."""
    flip: bool = False
    """Show each picture mirrored half of the time."""
    caption_dropout: Fraction = 0.0
    """Probability with which a picture is shown without its caption, so that guidance goes on to work."""
    prior: SourceSection | None = None
    """Pictures of the class that the base makes itself (DreamBooth's prior preservation): one beside each picture of
    the data, so that the base is not forgotten."""
    prior_weight: Annotated[NonNegative, Needs(".prior")] = 1.0
    """Weight of their loss."""
    prediction: Literal["auto", "epsilon", "v_prediction"] = "auto"
    """What SD 1.5 and SDXL are trained to predict; `auto`: what the scheduler of the model says."""
    min_snr_gamma: Positive | None = None
    """Weight a time by min(SNR, gamma) / SNR (Hang et al., 2023), for SD 1.5 and SDXL; 5 is usual."""
    times: Literal["auto", "uniform", "logit_normal"] = "auto"
    """How times are drawn. `auto`: uniform for SD 1.5 and SDXL, logit-normal for flow matching (Esser et al., 2024)."""
    logit_mean: Annotated[float, Field(ge=-10.0, le=10.0), _LOGIT_NORMAL] = 0.0
    """Mean of the logit-normal."""
    logit_std: Annotated[Positive, _LOGIT_NORMAL] = 1.0
    """Standard deviation of the logit-normal."""
    time_shift: Positive | Literal["auto"] = "auto"
    """Flow matching: shift s of the noise levels, s t / (1 + (s - 1) t); `auto`: what the model's scheduler has."""
    guidance: NonNegative = 1.0
    """Flux: the guidance that the model is told in training."""
    train_text_encoders: bool = False
    """Adapt the text encoders of CLIP as well; captions are then encoded in every step and not once."""
    sample_steps: Annotated[Count, _SAMPLES] = 28
    """Steps of the pipeline for a sample image."""
    sample_guidance: Annotated[NonNegative | Literal["auto"], _SAMPLES] = "auto"
    """Guidance of sample images; `auto`: what the pipeline does unasked."""
    sample_every: Annotated[int, Field(ge=0, le=10**9), _SAMPLES] = 0
    """Steps between sample images in training; 0 makes them before and after only."""
