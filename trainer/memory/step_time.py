"""Predict the time of a step on any number of GPUs from measured utilizations and link speeds.

A layer computes while the weights of the next layer are gathered: a short gather only slows down the layer's matmuls,
and a long one delays the next layer. The adapter's gradients are summed after the backward pass.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig, UserError
from trainer.config.yaml_core import read_yaml
from trainer.memory.activations import MicroStep
from trainer.memory.planner import Planner
from trainer.memory.stored_weights import ModelShapes
from trainer.model.expert_layers import count_experts_per_token
from trainer.monitor.mfu import PEAK_TFLOPS, TERA

GPU_MEASUREMENTS: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("cards.yaml")).tree
REFERENCE_GPU = "H100"
"""GPU that provides the measurements, with a note, for GPUs without their own."""
RECOMPUTED_FORWARD = 0.3
"""Time to recompute a layer's forward pass, as a fraction of the layer's time in a step (both without attention)."""
STEP_TIME_STD = 0.0035
"""Standard deviation of a rank's step time, as a fraction of the mean; the slowest rank determines the step time."""
LATENCY_S = 20e-6
"""Latency of a collective per doubling of the number of ranks."""
ATTENTION_BACKWARD = 2.5
"""Ratio of attention's FLOPs in the backward pass to those in the forward pass."""


@dataclass(frozen=True)
class Collective:
    name: str
    per_step: int
    """Number of calls in a step."""
    bytes_received: int
    """Bytes that a GPU receives in one call."""
    seconds: float
    """Duration of one call while nothing else runs."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one GPU, by activity."""

    compute: float
    gathers: float
    """Time that gathers add to the step, by slowing down or delaying matmuls."""
    exchanges: float
    """Time for exchanging attention's inputs and outputs between ranks that share a sequence."""
    gradients: float
    slowest: float
    """Time spent waiting for the slowest rank."""
    tokens: int
    """Tokens per step and GPU."""
    collectives: tuple[Collective, ...] = ()

    @property
    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("compute", "gathers", "exchanges", "gradients", "slowest")}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def predict_step(planner: Planner, config: RunConfig, gpu_name: str, network_bandwidth: float) -> tuple[StepTime, str]:
    """Return the step time for a configuration without `auto`, and a note on assumed values.

    `network_bandwidth` is the number of bytes per second that a GPU receives from other hosts. Raises UserError
    for gathers by module and for offloading, because their speed is not predicted.
    """
    decided, training, machine = planner.build_decisions(config), config.training, planner.machine
    by_module = config.zero.stage == 3 and decided.gather.value != "layer"
    if by_module or config.zero.offload_optimizer or config.zero.offload_parameters:
        reason = "step times with per-module gathers or offloading are not predicted"
        raise UserError(f"--network: {reason}; estimate without --network, --price and --card")
    measured, utilization, note = _find_measurements(planner, config, gpu_name)
    work = planner.build_micro_step(config, decided)
    accumulation, ranks = training.gradient_accumulation_steps, machine.world_size
    fraction = _compute_recomputed_fraction(config, len(planner.shapes.layers))
    compute = _predict_compute(planner, config, work, fraction, measured, find_peak_flops(gpu_name) * utilization)
    gather, gathers = _predict_gathers(planner, config, measured["link"], network_bandwidth)
    slowed = compute + measured["interference"] * min(gather, compute)
    added = max(slowed, gather) - compute + gather / (2 * len(planner.shapes.layers))
    within_host = len(set(machine.hosts[: config.parallel.sequence])) <= 1
    link = measured["exchange"] if within_host else network_bandwidth
    exchange, exchanges = _predict_exchanges(planner, config, work, fraction, link)
    slowest_link = network_bandwidth if len(set(machine.hosts)) > 1 else measured["link"]
    received = planner.estimate_received_bytes(config)["gradients"]
    gradients = received / slowest_link + LATENCY_S * math.log2(ranks)
    slowest = STEP_TIME_STD * math.sqrt(2 * math.log(ranks)) * compute * accumulation
    tokens = work.rows * work.settings.length * accumulation
    sums = [Collective("adapter gradient reduction", 1, received, gradients)] if received else []
    parts = (compute * accumulation, added * accumulation, exchange * accumulation, gradients, slowest)
    return StepTime(*parts, tokens, (*gathers, *exchanges, *sums)), note


def _find_measurements(planner: Planner, config: RunConfig, gpu_name: str) -> tuple[dict[str, Any], float, str]:
    """Return a GPU's measurements, its utilization, and a note on values taken from other measurements.

    A GPU that was never measured uses the measurements of REFERENCE_GPU. A quantization type that was never
    measured uses the utilization of bf16.
    """
    measured, note = GPU_MEASUREMENTS.get(gpu_name), ""
    if measured is None:
        measured = GPU_MEASUREMENTS[REFERENCE_GPU]
        note = f"no measurements for {gpu_name}; using the utilization and link speeds of {REFERENCE_GPU}"
    has_experts = any(weight.experts for weight in planner.shapes.weights)
    kind = config.quantization.quant_type if config.adapter == "qlora" else "bf16"
    utilization = measured.get("experts", {}) if has_experts else measured["utilization"]
    if kind not in utilization:
        note = note or f"no measurements for {kind}{' with experts' * has_experts} on {gpu_name}"
    return measured, utilization.get(kind, utilization.get("bf16", measured["utilization"]["bf16"])), note


def _compute_recomputed_fraction(config: RunConfig, layers: int) -> float:
    mode = config.training.gradient_checkpointing
    if mode in ("none", "selective"):
        return 0.0 if mode == "none" else 0.5
    return min(config.training.gradient_checkpointing_layers or layers, layers) / layers


def _predict_compute(
    planner: Planner, config: RunConfig, micro_step: MicroStep, fraction: float, measured: dict[str, Any], rate: float
) -> float:
    """Return the compute time of a micro-step in seconds: attention at its measured rate, all else at `rate` FLOP/s."""
    ranks, part = config.parallel.sequence, micro_step.settings.length
    length = ranks * part
    linear = count_flops(planner.shapes, micro_step.rows, part, min(micro_step.targets, part))
    attention = count_attention_flops(planner.shapes, micro_step.rows, length) / ranks
    speeds = measured["attention"]
    forward, backward = speeds[max((shortest for shortest in speeds if shortest <= length), default=min(speeds))]
    selective = config.training.gradient_checkpointing == "selective"
    recomputed = fraction if config.training.recompute_attention and not selective else 0.0
    layers = linear / rate * (1 + RECOMPUTED_FORWARD * fraction)
    return layers + attention * ((1 + recomputed) / forward + ATTENTION_BACKWARD / backward)


def _predict_gathers(
    planner: Planner, config: RunConfig, link_bandwidth: float, network_bandwidth: float
) -> tuple[float, list[Collective]]:
    traffic, accumulation = planner.estimate_received_bytes(config), config.training.gradient_accumulation_steps
    local, remote = (traffic[f"weights_from_{source}"] / accumulation for source in ("its_host", "other_hosts"))
    seconds = max(local / link_bandwidth, remote / network_bandwidth if remote else 0.0)
    if not seconds:
        return 0.0, []
    count = 2 * len(planner.shapes.layers)
    seconds += count * LATENCY_S * math.log2(planner.machine.world_size)
    name = f"per-layer all-gather {'from this and other hosts' if remote else 'within the host'}"
    return seconds, [Collective(name, count * accumulation, int(local + remote) // count, seconds / count)]


def _predict_exchanges(
    planner: Planner, config: RunConfig, micro_step: MicroStep, fraction: float, link_bandwidth: float
) -> tuple[float, list[Collective]]:
    """Return the seconds per micro-step of the all-to-all exchanges around attention, and collectives.

    With `parallel.sequence`, ranks exchange tokens for attention heads before and after attention, that is,
    twice per layer and pass.
    """
    ranks = config.parallel.sequence
    if ranks == 1:
        return 0.0, []
    heads, size = _read_heads(planner.shapes)
    keys = getattr(planner.shapes.model.config.get_text_config(), "num_key_value_heads", None) or heads
    widths = 2 * (heads + keys * ranks // math.gcd(keys, ranks)) * size
    passes = (2 + fraction * config.training.recompute_attention) * len(planner.shapes.layers)
    received = micro_step.rows * micro_step.settings.length * widths * micro_step.element_size * (ranks - 1) // ranks
    seconds = received / link_bandwidth + 2 * LATENCY_S * math.log2(ranks)
    count = round(2 * passes) * config.training.gradient_accumulation_steps
    return passes * seconds, [Collective("token/head all-to-all", count, received // 2, seconds / 2)]


def find_peak_flops(gpu_name: str) -> float:
    """Return a GPU's peak dense 16-bit FLOP/s. Raises UserError if the GPU is unknown."""
    if gpu_name not in PEAK_TFLOPS:
        raise UserError(f"--card {gpu_name}: unknown; use one of {', '.join(PEAK_TFLOPS)}")
    return PEAK_TFLOPS[gpu_name] * TERA


def count_flops(shapes: ModelShapes, rows: int, length: int, targets: int) -> float:
    """Return the model FLOPs of a micro-batch excluding attention, counted as in trainer/monitor/mfu.py."""
    visited, tokens = count_experts_per_token(shapes.model.config.get_text_config()), rows * length
    per_token = 0.0
    for weight in shapes.weights:
        if weight.layer >= 0 and (weight.packable or weight.trained):
            used = visited / weight.experts if weight.experts else 1.0
            per_token += (6.0 if weight.trained else 4.0) * used * weight.elements
    return tokens * per_token + 4.0 * shapes.vocabulary * shapes.hidden * targets * rows


def count_attention_flops(shapes: ModelShapes, rows: int, length: int) -> float:
    """Return the FLOPs of causal attention in one forward pass: 2 x length^2 x heads x head size per row and layer."""
    heads, size = _read_heads(shapes)
    return 2.0 * rows * length**2 * heads * size * len(shapes.layers)


def _read_heads(shapes: ModelShapes) -> tuple[int, int]:
    config = shapes.model.config.get_text_config()
    heads: int = getattr(config, "num_attention_heads", 0)
    return heads, getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
