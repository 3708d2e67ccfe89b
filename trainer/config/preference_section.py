"""The settings of preference training; the text under a field is its documentation."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer.config.types import NonNegative, Positive, Section

LOSSES = (
    "dpo", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "cpo", "simpo", "orpo", "sft", "kto",
)  # fmt: skip
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo", "sft")
"""Losses that compare the two answers without a reference model."""


def _weights(value: Any) -> Any:
    """Read one name as a loss of weight 1, and a list as several. Raises ValueError for other names and weights."""
    names = [value] if isinstance(value, str) else value
    weights = dict.fromkeys(map(str, names), 1.0) if isinstance(names, list | tuple) else value
    if not isinstance(weights, dict) or not weights:
        raise ValueError("must be the name of a loss, or a map of losses and weights; use dpo, or {dpo: 1.0, sft: 0.2}")
    for name, weight in weights.items():
        if name not in LOSSES:
            raise ValueError(f"{name} is not a loss; choose from {', '.join(LOSSES)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {name} must be a number above 0")
    if "kto" in weights and len(weights) > 1:
        raise ValueError("kto learns from labelled answers and the others from pairs; use kto alone, or leave it out")
    return weights


class PreferenceSection(Section):
    """Settings of `task: preference`: training on pairs of a chosen and a rejected answer."""

    loss: Annotated[dict[str, float], BeforeValidator(_weights)] = Field("dpo", validate_default=True)
    """Loss of a pair, by the names of TRL (`dpo` is its `sigmoid`), or several with their weights, such as
    {dpo: 0.8, sft: 0.2}. `sft` is the mean loss per token of the chosen answer. `cpo` and `orpo` contain it. `kto`
    learns from single answers with a label."""
    beta: NonNegative = 0.1
    """How far the model may move from the reference: higher values keep it closer. `orpo`: weight of the odds ratio."""
    reference: Literal["auto", "step", "cached", "none"] = "auto"
    """Reference model, the base without the adapter: a second forward pass in each `step`, or all answers once before
    training (`cached`), which is faster from the second epoch on. Neither takes more GPU memory. With
    `lora.adapter_path` that adapter is the reference, which must be `cached`. `none`: a reference that gives all
    answers the same probability. `auto`: `step` if a loss needs a reference."""
    share_prompt: Literal["auto"] | bool = False
    """Whether the prompt of a pair is computed once for both answers, with equal losses; not for `kto`. `auto`: if that
    saves at least 10 % of the tokens, and a pass shows that the model supports it."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that chosen and rejected are swapped, for `dpo`, `robust`, `exo_pair`, `cpo` and
    `simpo`."""
    gamma: NonNegative = 0.5
    """Margin of `simpo` between the rewards of the two answers, divided by beta."""
    discopop_tau: Positive = 0.05
    """Temperature of `discopop`."""
    length_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Weight of the tokens of the longer answer beyond the length of the shorter one (LD-DPO's alpha); 1: no change."""
    weighting: Literal["none", "wpo"] = "none"
    """`wpo` multiplies the loss of a pair by the probability of both answers under the trained model, relative to
    answers that it would generate itself (WPO; TRL's use_weighting). This approximates on-policy data."""
    desirable_weight: Positive = 1.0
    """Weight of answers labelled true in the loss of `kto`. Choose both weights so that desirable_weight x number of
    desirable answers is 1 to 1.33 times undesirable_weight x number of undesirable ones."""
    undesirable_weight: Positive = 1.0
    """Weight of answers labelled false in the loss of `kto`."""


class RewardSection(Section):
    """Settings of `task: reward`: a reward model with a score head, trained on pairs (Bradley-Terry)."""

    center: NonNegative = 0.0
    """Weight of the squared sum of a pair's two rewards, added to the loss, which keeps rewards near 0 on average;
    0.01 is usual."""
