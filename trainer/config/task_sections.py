"""Define settings for preferences, rewards and images. A field's docstring is its user documentation."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer.config.data_sections import SourceSection
from trainer.config.needs import Needs
from trainer.config.types import Count, Fraction, NonNegative, Positive, Section

LOSSES = (
    "dpo", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "cpo", "simpo", "orpo", "sft", "kto",
)  # fmt: skip
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo", "sft")
"""Losses that need no reference model."""
_SMOOTHED, _KTO = ("dpo", "robust", "exo_pair", "cpo", "simpo"), Needs(".loss", ("kto",))
_LOGIT_NORMAL, _SAMPLES = Needs(".times", ("logit_normal",)), Needs("logging.sample_prompts")


def _parse_loss_weights(value: Any) -> Any:
    """Convert a loss, a list of losses or a mapping to a mapping of losses to weights.

    Losses without a weight get weight 1. Raises ValueError for an invalid name or weight, or for kto combined
    with other losses.
    """
    names = [value] if isinstance(value, str) else value
    weights = dict.fromkeys(map(str, names), 1.0) if isinstance(names, list | tuple) else value
    if not isinstance(weights, dict) or not weights:
        raise ValueError("must be a loss, or a mapping of losses to weights; use dpo, or {dpo: 1.0, sft: 0.2}")
    for name, weight in weights.items():
        if name not in LOSSES:
            fix = "write dpo" if name == "sigmoid" else f"choose from {', '.join(LOSSES)}"
            raise ValueError(f"{name} is not a loss; {fix}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {name} must be a number above 0")
    if "kto" in weights and len(weights) > 1:
        raise ValueError("kto needs labeled answers, but the other losses need pairs; use kto alone, or remove kto")
    return weights


class PreferenceSection(Section):
    """Settings for `task: preference`: training on pairs of a chosen and a rejected answer."""

    loss: Annotated[dict[str, float], BeforeValidator(_parse_loss_weights)] = Field("dpo", validate_default=True)
    """Loss for a pair, named as in TRL (`dpo` is TRL's `sigmoid`), or several losses with weights, such as
    {dpo: 0.8, sft: 0.2}. `sft` is the mean loss per token of the chosen answer; `cpo` and `orpo` include it. `kto`
    learns from single labeled answers."""
    beta: NonNegative = 0.1
    """How far the model may move from the reference: higher values keep it closer. `orpo`: weight of the odds ratio."""
    reference: Literal["auto", "step", "cached", "none"] = "auto"
    """How to compute log-probabilities under the reference, the base model without the adapter. `step`: in a second
    forward pass in each step; `cached`: once before training, which is faster from the second epoch on. Neither takes
    more GPU memory. With `lora.adapter_path`, that adapter is the reference, which requires `cached`. `none`: all
    answers have the same reference probability. `auto`: `step` if a loss needs a reference."""
    share_prompt: Literal["auto"] | bool = False
    """Compute the prompt of a pair once for both answers, which does not change the loss; not for `kto`. `auto`: if it
    saves at least 10 % of the tokens, and a test pass shows that the model supports it."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5), Needs(".loss", _SMOOTHED)] = 0.0
    """Probability that chosen and rejected are swapped, for `dpo`, `robust`, `exo_pair`, `cpo` and
    `simpo`."""
    gamma: Annotated[NonNegative, Needs(".loss", ("simpo",))] = 0.5
    """Margin between the rewards of the two answers in `simpo`, divided by beta."""
    discopop_tau: Annotated[Positive, Needs(".loss", ("discopop",))] = 0.05
    """Temperature of `discopop`."""
    length_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Weight of the tokens of the longer answer beyond the length of the shorter one (LD-DPO's alpha); 1: no change."""
    weighting: Literal["none", "wpo"] = "none"
    """`wpo` multiplies the loss of a pair by the probability of both answers under the trained model, relative to
    answers that it would generate itself (WPO; TRL's use_weighting). This approximates on-policy data."""
    desirable_weight: Annotated[Positive, _KTO] = 1.0
    """Weight of answers labeled true in the `kto` loss. Choose both weights so that desirable_weight x number of
    desirable answers is 1 to 1.33 times undesirable_weight x number of undesirable answers."""
    undesirable_weight: Annotated[Positive, _KTO] = 1.0
    """Weight of answers labeled false in the `kto` loss."""


class RewardSection(Section):
    """Settings for `task: reward`: a reward model with a score head, trained on pairs (Bradley-Terry)."""

    center: NonNegative = 0.0
    """Weight of the squared sum of a pair's two rewards, added to the loss, which keeps rewards near 0 on average;
    0.01 is usual."""


class ImageSection(Section):
    """Settings for image models: images, noise and samples."""

    resolution: Annotated[int, Field(ge=8, le=8192)] = 1024
    """Side length of a square image in pixels; images with other aspect ratios have about as many pixels."""
    buckets: bool = True
    """Group images by aspect ratio to crop less; false crops every image to a square."""
    bucket_step: Annotated[int, Field(ge=8, le=1024), Needs(".buckets", (True,))] = 64
    """Side lengths of bucketed images are multiples of this value."""
    caption: str | None = None
    """Caption for images without one, such as `a photo of sks dog`."""
    flip: bool = False
    """Mirror each image with probability 0.5."""
    caption_dropout: Fraction = 0.0
    """Probability of dropping the caption of an image, which preserves classifier-free guidance."""
    prior: SourceSection | None = None
    """Class images generated by the base model (DreamBooth's prior preservation): one is added for each image in the
    data."""
    prior_weight: Annotated[NonNegative, Needs(".prior")] = 1.0
    """Loss weight of prior images."""
    prediction: Literal["auto", "epsilon", "v_prediction"] = "auto"
    """Prediction target of SD 1.5 and SDXL; `auto`: as in the model's scheduler."""
    min_snr_gamma: Positive | None = None
    """Weight each timestep by min(SNR, gamma) / SNR (Hang et al., 2023), for SD 1.5 and SDXL; 5 is usual."""
    times: Literal["auto", "uniform", "logit_normal"] = "auto"
    """Distribution of timesteps. `auto`: uniform for SD 1.5 and SDXL, logit-normal for flow matching (Esser et al.,
    2024)."""
    logit_mean: Annotated[float, Field(ge=-10.0, le=10.0), _LOGIT_NORMAL] = 0.0
    """Mean of the logit-normal distribution."""
    logit_std: Annotated[Positive, _LOGIT_NORMAL] = 1.0
    """Standard deviation of the logit-normal distribution."""
    time_shift: Positive | Literal["auto"] = "auto"
    """Flow matching: shift s of the noise levels, s t / (1 + (s - 1) t); `auto`: as in the model's scheduler."""
    guidance: NonNegative = 1.0
    """Flux: guidance value that the model receives in training."""
    sample_steps: Annotated[Count, _SAMPLES] = 28
    """Number of inference steps per sample image."""
    sample_guidance: Annotated[NonNegative | Literal["auto"], _SAMPLES] = "auto"
    """Guidance scale for sample images; `auto`: the pipeline's default."""
    sample_every: Annotated[int, Field(ge=0, le=10**9), _SAMPLES] = 0
    """Steps between sample images during training; 0: only before and after training."""
