"""Predict the time of a step on any number of GPUs from measured utilizations and the speed of links.

Per layer, computation runs while the weights of the next layer are gathered: a gather that is shorter only slows the
products, a longer one is waited for. Gradients of the adapter are summed when the backward pass is over.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig, UserError
from trainer.config.yaml_core import read_yaml
from trainer.memory.planner import Planner
from trainer.memory.stored_weights import Shapes
from trainer.model.expert_layers import experts_per_token
from trainer.monitor.mfu import PEAKS, TERA

CARDS: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("cards.yaml")).tree
MEASURED = "H100"
"""The card with the figures that other cards get, with a note."""
FORWARD = 0.29
"""Cost of recomputing the forward pass of a layer, over that of the layer's step."""
SKEW = 0.0035
"""Standard deviation of a rank's step over its mean; a step takes as long as that of the slowest rank."""
LATENCY_S = 20e-6
"""Of each doubling of the number of ranks in a collective."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one GPU, by what it does or waits for."""

    compute: float
    gathers: float
    """By which gathers make the step longer, whether they slow products or are waited for."""
    gradients: float
    slowest: float
    """Until the slowest rank is done."""
    tokens: int
    """Tokens of a step on one GPU."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.gathers + self.gradients + self.slowest


def predict_step(planner: Planner, config: RunConfig, card: str, network: float) -> tuple[StepTime, str]:
    """Return the time of a step of a configuration without `auto`, and a note on what was never measured.

    `network` is the number of bytes per second that a GPU receives from other hosts. Raises UserError for
    configurations without a predictable speed.
    """
    decided, training, machine = planner.decisions(config), config.training, planner.machine
    by_module = config.zero.stage == 3 and decided.gather.value != "layer"
    if by_module or config.zero.offload_optimizer or config.zero.offload_parameters or config.parallel.sequence > 1:
        reason = "by module, offloading and parallel.sequence are not predicted"
        raise UserError(f"--network: the speed of gathers {reason}; estimate without --network, --price and --card")
    measured, note = CARDS.get(card), ""
    if measured is None:
        measured, note = CARDS[MEASURED], f"{card} was never measured: assumes the utilization and links of {MEASURED}"
    work, accumulation = planner.work(config, decided), training.gradient_accumulation_steps
    has_experts = any(weight.experts for weight in planner.shapes.weights)
    kind = config.quantization.quant_type if config.adapter == "qlora" else "bf16"
    known = measured.get("experts", {}) if has_experts else measured["utilization"]
    if kind not in known:
        note = note or f"{kind}{' with experts' * has_experts} was never measured on {card}"
    utilization = known.get(kind, known.get("bf16", measured["utilization"]["bf16"]))
    layers = len(planner.shapes.layers)
    recomputed = {"none": 0, "selective": layers // 2}.get(
        training.gradient_checkpointing, training.gradient_checkpointing_layers or layers
    )
    flops = count_flops(planner.shapes, work.rows, work.kernels.length, work.targets)
    compute = flops / (peak(card) * utilization) * (1 + FORWARD * recomputed / layers)
    traffic, ranks = planner.traffic(config), machine.world_size
    near, far = (traffic[f"weights_from_{place}"] / accumulation for place in ("its_host", "other_hosts"))
    gather = max(near / measured["link"], far / network if far else 0.0)
    if gather:
        gather += 2 * layers * LATENCY_S * math.log2(ranks)
    slowed = compute + measured["interference"] * min(gather, compute)
    longer = max(slowed, gather) - compute + gather / (2 * layers)
    slowest_link = network if len(set(machine.hosts)) > 1 else measured["link"]
    gradients = traffic["gradients"] / slowest_link + LATENCY_S * math.log2(ranks)
    slowest = SKEW * math.sqrt(2 * math.log(ranks)) * compute * accumulation
    tokens = work.rows * work.kernels.length * accumulation
    return StepTime(compute * accumulation, longer * accumulation, gradients, slowest, tokens), note


def peak(card: str) -> float:
    """Return the dense 16-bit FLOP/s of a card; raises UserError if it is unknown."""
    if card not in PEAKS:
        raise UserError(f"--card {card}: unknown; use one of {', '.join(PEAKS)}")
    return PEAKS[card] * TERA


def count_flops(shapes: Shapes, rows: int, length: int, targets: int) -> float:
    """Return the model FLOPs of a micro-batch of full rows, as trainer/monitor/mfu.py counts those of real batches."""
    config = shapes.model.config.get_text_config()
    visited, tokens = experts_per_token(config), rows * length
    heads = getattr(config, "num_attention_heads", 0)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    per_token = 0.0
    for weight in shapes.weights:
        if weight.layer >= 0 and (weight.packable or weight.trained):
            used = visited / weight.experts if weight.experts else 1.0
            per_token += (6.0 if weight.trained else 4.0) * used * weight.elements
    head = 4.0 * shapes.vocabulary * shapes.hidden * targets * rows
    return tokens * per_token + head + 6.0 * rows * length**2 * heads * head_size * len(shapes.layers)
