"""Estimate the memory of configurations, and choose a ZeRO stage, micro-batch and recomputation that fit."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch

from trainer.config import AUTO, RunConfig, UserError
from trainer.config.checks import check_combinations
from trainer.config.sections import MAX_AUTO_CACHE_BYTES
from trainer.data.prepared import PreparedRun
from trainer.data.samples import Samples
from trainer.data.step_count import resolve_global_batch
from trainer.memory.activations import Activations, MicroStep, combine_layers, estimate_tower_activations
from trainer.memory.bytes import GIB, Estimate, estimate, offloaded_bytes
from trainer.memory.decisions import VARLEN, Decisions, Machine, decide
from trainer.memory.model_widths import read_shapes
from trainer.memory.observed import Layer, LayerSettings, count_rows_to_observe, observe_layers
from trainer.memory.stored_weights import ModelShapes, Placement, list_gathered_weights, stored_bytes
from trainer.parallel.ranks.group import list_shard_groups

LARGEST_BATCH = 256
"""Largest micro-batch to try; larger ones are not faster on any GPU."""
SPARE_FRACTION = 0.05
"""Fraction of the peak that `find_largest_batch` leaves free: estimates may be 3 % too low, and slack may be larger."""
TOKEN_BY_TOKEN, SHORT = ("rwkv", "mamba", "falcon_mamba"), 16
"""Model types that loop over tokens in Python, and the number of tokens to observe; memory grows linearly."""
MIN_HALVED_LENGTH = 256
"""Length up to which sequences are not halved."""
STAGES = (0, 1, 2, 3)
OFFLOADS = ((False, False), (True, False), (True, True))
"""Whether optimizer and parameters are offloaded; stage 0 allows only the first choice, stage 3 all."""
CPU_STAGE = 2
"""ZeRO stage that `auto` selects without a GPU."""
RECOMPUTATION = "training.gradient_checkpointing"
RECOMPUTED_LAYERS_KEY = "training.gradient_checkpointing_layers"
Changes = dict[str, Any]


@dataclass(frozen=True)
class DataSize:
    """Largest number of tokens and of targets in a sample, and the number of samples."""

    longest: int
    targets: int
    samples: int | None = None
    reference: int | None = None
    """Positions in all scu.reference texts at which adapted and base model are compared; None if unknown."""
    images: int = 0
    """Mean number of image tokens per sample with images, or per pack."""

    @classmethod
    def assume(cls, config: RunConfig) -> "DataSize":
        """Return lengths for use without data, assuming that every sequence has the maximum length."""
        return cls(config.dataset.max_length, targets=config.dataset.max_length)

    @classmethod
    def from_samples(cls, config: RunConfig, samples: Any, reference: Samples | None = None) -> "DataSize":
        """Return the lengths of prepared samples and scu.reference texts; assume the maximum length for a stream."""
        if not hasattr(samples, "count_tokens"):
            return cls.assume(config)
        tokens, targets = samples.count_tokens()
        positions = None if reference is None else int(reference.count_tokens()[0].sum()) - len(reference)
        return cls(int(tokens.max()), int(targets.max()), len(tokens), positions)


@dataclass(frozen=True)
class PlanChoice:
    """A changed configuration with its estimate, or the reason why its settings cannot be combined."""

    config: RunConfig
    changes: Changes
    estimate: Estimate | None
    error: str = ""

    @property
    def needed(self) -> float:
        """Bytes that must be free on a GPU; infinite if the settings cannot be combined."""
        return math.inf if self.estimate is None else self.estimate.needed

    def __str__(self) -> str:
        values = {name: "null" if value is None else str(value).lower() for name, value in self.changes.items()}
        return " ".join(f"{name}={value}" for name, value in values.items()) + f" ({format_gib(self.needed)})"


@dataclass(frozen=True)
class Planner:
    shapes: ModelShapes
    lengths: DataSize
    machine: Machine
    has_sequences: ClassVar[bool] = True
    """Whether samples are sequences of tokens."""
    decide = staticmethod(decide)

    @classmethod
    def from_run(cls, machine: Machine, config: RunConfig, prepared: PreparedRun) -> "Planner":
        """Build the planner for a run. If `prepared` lacks data, assume the maximum length for all sequences."""
        lora, data = None if config.adapter == "none" else config.lora, prepared.data
        vocabulary = len(prepared.tokenizer or ())
        shapes = read_shapes(prepared.model_config, config.model, lora, min_vocabulary_size=vocabulary)
        lengths = DataSize.from_samples(config, data and data.train, prepared.reference)
        if data and data.stats.with_images:
            stats = data.stats
            mean, fraction = stats.image_tokens / stats.with_images, stats.image_tokens / stats.tokens
            lengths = replace(lengths, images=int(lengths.longest * fraction if config.dataset.packing else mean))
        return cls(shapes, lengths, machine)

    @staticmethod
    def halve_samples(config: RunConfig) -> Changes:
        """Return the setting that halves the size of samples, or an empty dict if they would be too small."""
        length = config.dataset.max_length
        return {"dataset.max_length": length // 2} if length > MIN_HALVED_LENGTH else {}

    def estimate(self, config: RunConfig) -> Estimate:
        decided = self.build_decisions(config)
        work, placement = self.build_micro_step(config, decided), self._build_placement(config, decided)
        activations = self.estimate_activations(work)
        images = self.lengths.images * work.rows * (not config.vision.cache)
        tower, tower_kept = estimate_tower_activations(self.shapes.model, images, work)
        activations = replace(activations, kept=activations.kept + tower_kept * (config.vision.train == "lora"))
        return estimate(self.shapes, work, placement, activations, tower)

    def estimate_received_bytes(self, config: RunConfig) -> dict[str, int]:
        """Return the bytes that a GPU receives per step: weights from its own host and from other hosts, and gradients.

        Weights are gathered in the forward and backward passes of each micro-step. Gradients use a ring all-reduce.
        """
        decided, machine = self.build_decisions(config), self.machine
        placement = self._build_placement(config, decided)
        hosts = machine.hosts or ("",) * machine.world_size
        within = config.zero.shard_within if decided.gather.value == "layer" else "all"
        group = list_shard_groups(within, hosts)[0]
        near = sum(hosts[rank] == hosts[group[0]] for rank in group)
        weights = 0
        if placement.zero.stage == 3:
            layers = sum(stored_bytes(weight, placement) for weight in list_gathered_weights(self.shapes, placement))
            weights = 2 * placement.training.gradient_accumulation_steps * layers
        gradients = self.shapes.trained_numel * placement.element_size
        return {
            "weights_from_its_host": weights * (near - 1) // len(group),
            "weights_from_other_hosts": weights * (len(group) - near) // len(group),
            "gradients": 2 * (machine.world_size - 1) * gradients // machine.world_size,
        }

    def try_changes(self, config: RunConfig, changes: Changes) -> PlanChoice:
        changed = apply_changes(config, changes)
        try:
            check_combinations(changed)
        except UserError as error:
            return PlanChoice(changed, changes, None, str(error))
        return PlanChoice(changed, changes, self.estimate(changed))

    def list_stages(self, config: RunConfig) -> list[PlanChoice]:
        config = apply_changes(config, {"training.batch_size": 1}) if config.training.batch_size == AUTO else config
        variations = [
            {"zero.stage": stage, "zero.offload_optimizer": optimizer, "zero.offload_parameters": parameters}
            for stage in STAGES
            for optimizer, parameters in OFFLOADS[: {0: 1, 3: 3}.get(stage, 2)]
        ]
        return [self.try_changes(config, changes) for changes in variations]

    def find_lowest_stage(self, config: RunConfig, memory: int) -> int | None:
        choices = (self.try_changes(config, {"zero.stage": stage}) for stage in STAGES)
        return next((choice.config.zero.stage for choice in choices if choice.needed <= memory), None)

    def find_largest_useful_batch(self, config: RunConfig) -> int:
        global_batch, ranks = config.training.global_batch_size, config.count_data_ranks(self.machine.world_size)
        if global_batch not in (None, AUTO):
            return min(LARGEST_BATCH, max(1, global_batch // ranks))
        if self.lengths.samples:
            epoch = self.lengths.samples // (ranks * config.training.gradient_accumulation_steps)
            return min(LARGEST_BATCH, max(1, epoch))
        return LARGEST_BATCH

    def find_largest_batch(self, config: RunConfig, memory: int) -> int:
        """Return the largest micro-batch that fits, or 0. Above 1 it must leave `SPARE_FRACTION` of the peak free."""

        def is_too_large(size: int) -> bool:
            estimate = self.estimate(apply_changes(config, {"training.batch_size": size}))
            return estimate.needed + (int(estimate.peak * SPARE_FRACTION) if size > 1 else 0) > memory

        return bisect_left(range(1, self.find_largest_useful_batch(config) + 1), True, key=is_too_large)

    def resolve(self, config: RunConfig, memory: int | None) -> RunConfig:
        """Resolve `auto` to the least recomputation that fits, then the lowest stage, then the largest batch.

        Stages are tried with micro-batch 1 if `batch_size` is `auto`. If nothing fits, the last stage and micro-batch 1
        are chosen, which the check before training then rejects. Without a GPU (`memory` is None), `auto` becomes no
        recomputation, stage 2 (or the highest stage that other settings allow) and micro-batch 1.
        """
        if config.training.gradient_checkpointing != "auto":
            return self._resolve(config, memory)
        without = self._resolve(apply_changes(config, {RECOMPUTATION: "none"}), memory)
        if memory is None or self.estimate(without).needed <= memory:
            return without
        all_layers = self._resolve(apply_changes(config, {RECOMPUTATION: "non_reentrant"}), memory)
        fits = self.estimate(all_layers).needed <= memory
        return self._minimize_recomputed_layers(all_layers, memory) if fits else all_layers

    def _minimize_recomputed_layers(self, config: RunConfig, memory: int) -> RunConfig:
        counts = range(1, len(self.shapes.layers))
        fewer = [apply_changes(config, {RECOMPUTED_LAYERS_KEY: count}) for count in counts]
        first_fitting = bisect_left(fewer, True, key=lambda choice: self.estimate(choice).needed <= memory)
        return [*fewer, config][first_fitting]

    def _resolve(self, config: RunConfig, memory: int | None) -> RunConfig:
        samples, ranks = self.lengths.samples, config.count_data_ranks(self.machine.world_size)
        config = resolve_global_batch(config, samples, ranks)
        auto_batch = config.training.batch_size == AUTO
        if auto_batch:
            config = apply_changes(config, {"training.batch_size": 1})
        if config.zero.stage == AUTO:
            config = apply_changes(config, {"zero.stage": self._choose_stage(config, memory)})
        config = self._choose_shard_group(config, memory)
        if auto_batch and memory is not None:
            config = apply_changes(config, {"training.batch_size": max(1, self.find_largest_batch(config, memory))})
        config = resolve_global_batch(config, samples, ranks)
        check_combinations(config)
        return config

    def _choose_shard_group(self, config: RunConfig, memory: int | None) -> RunConfig:
        """Resolve `zero.shard_within: auto` at stage 3 to `host` if one copy per host fits, otherwise to `all`."""
        if config.zero.stage != 3 or config.zero.shard_within != "auto":
            return config
        host = apply_changes(config, {"zero.shard_within": "host"})
        fits = memory is None or self.estimate(host).needed <= memory
        return host if fits else apply_changes(config, {"zero.shard_within": "all"})

    def _choose_stage(self, config: RunConfig, memory: int | None) -> int:
        """Return the lowest stage that fits (CPU_STAGE without a GPU), or else the highest allowed stage."""
        if memory is not None and (stage := self.find_lowest_stage(config, memory)) is not None:
            return stage
        choices = {stage: self.try_changes(config, {"zero.stage": stage}) for stage in STAGES}
        allowed = [stage for stage, choice in choices.items() if choice.estimate is not None]
        if not allowed:
            raise UserError(f"zero.stage=auto: {choices[CPU_STAGE].error}")
        return CPU_STAGE if memory is None and CPU_STAGE in allowed else allowed[-1]

    def build_decisions(self, config: RunConfig) -> Decisions:
        return self.decide(config, self.machine, self.shapes.properties)

    def build_micro_step(self, config: RunConfig, decided: Decisions) -> MicroStep:
        training = config.training
        settings, fused = self._build_settings(config, decided), bool(decided.fused_head.value)
        room = self.machine.host_memory
        if room is not None:
            room = max(0, room - offloaded_bytes(self.shapes, self._build_placement(config, decided)))
        reference = 0
        if config.scu.enabled and config.scu.measure == "kl":  # the last micro-step also has reference texts
            steps = training.gradient_accumulation_steps
            reference = math.ceil(config.scu.reference_share * training.batch_size * steps)
        return MicroStep(
            rows=training.batch_size + reference,
            reference_rows=reference,
            # Without the fused loss, a position with a target in one row has logits in every row. If fusing is only
            # decided on the device, all logits are counted.
            targets=self.lengths.targets if training.batch_size == 1 or fused else settings.length,
            settings=settings,
            own_norms=decided.norms.value == "ours",
            fused_loss=fused,
            training=training,
            host_memory=room,
        )

    def _build_settings(self, config: RunConfig, decided: Decisions) -> LayerSettings:
        attention, on_gpu, packed = decided.attention.value, self.machine.on_gpu, config.adapter == "qlora"
        flat = attention == VARLEN or attention.startswith("flash_attention")
        if attention == VARLEN and not self.machine.flash:
            # For attention sinks without flash attention, count the model's own code, with the pack as one document.
            attention = "eager" if self.shapes.properties.sinks else "sdpa"
        separate = not decided.siblings.value and decided.adapters.value in ("cuda", "reference")
        return LayerSettings(
            length=-(-min(self.lengths.longest, config.dataset.max_length) // config.parallel.sequence),
            dtype=torch.float32 if self._element_size == 4 else torch.bfloat16,
            attention="flash" if flat and attention != "eager" else attention,
            masked=config.dataset.packing and not flat,
            copied_heads=on_gpu and not self.machine.flash and attention == "sdpa",
            elementwise=decided.own_elementwise.value,
            frozen_norms=config.adapter != "none",
            recomputed=decided.recomputed_results.value,
            fused=decided.adapters.value in ("cuda", "reference"),
            selective=config.training.gradient_checkpointing == "selective",
            separate=separate,
            mlp_tile=decided.mlp_tile.value,
            on_gpu=on_gpu,
            packed=packed or self.shapes.stored != "",
            packed_experts=packed or self.shapes.stored != "" or any(weight.mxfp4 for weight in self.shapes.weights),
            is_8bit=packed and config.quantization.is_8bit and self.shapes.stored != "blocks",
            scan_by_kernel=on_gpu and self.machine.scan_kernels,
        )

    def estimate_activations(self, micro_step: MicroStep) -> Activations:
        plain = replace(micro_step.settings, recomputed="none", selective=False)
        by_kind = self._estimate_layers(micro_step.settings, micro_step.rows)
        plain_by_kind = self._estimate_layers(plain, micro_step.rows)
        kinds = self.shapes.layers
        layers, plain_layers = ([observed[kind] for kind in kinds] for observed in (by_kind, plain_by_kind))
        return combine_layers(layers, plain_layers, micro_step.larger_pass_rows / micro_step.rows, micro_step)

    def _estimate_layers(self, settings: LayerSettings, rows: int) -> dict[int, Layer]:
        if settings.length > 2 * SHORT and self.shapes.model.config.model_type in TOKEN_BY_TOKEN:
            single, double = (self._estimate_layers(replace(settings, length=n), rows) for n in (SHORT, 2 * SHORT))
            steps = settings.length / SHORT - 1
            return {kind: layer.extrapolate(double[kind], steps) for kind, layer in single.items()}
        linear_from = count_rows_to_observe(self.shapes, settings)
        if rows <= linear_from:
            return self._observe(settings, rows)
        single, double = (self._observe(settings, count) for count in (linear_from, 2 * linear_from))
        return {kind: layer.extrapolate(double[kind], rows / linear_from - 1) for kind, layer in single.items()}

    @cached_property
    def _observe(self) -> Callable[[LayerSettings, int], dict[int, Layer]]:
        return cache(partial(observe_layers, self.shapes))

    def _build_placement(self, config: RunConfig, decided: Decisions) -> Placement:
        return Placement(
            config.zero,
            config.training,
            config.quantization,
            packed=config.adapter == "qlora",
            world_size=self.machine.world_size,
            by_layer=decided.gather.value == "layer",
            flat=decided.flat.value,
            element_size=self._element_size,
            shard_group=decided.shard_group.value,
            base_states=self._reference_cache_bytes(config, decided),
        )

    def _reference_cache_bytes(self, config: RunConfig, decided: Decisions) -> int:
        """Return the bytes that scu.reference_cache may need; 0 if it is off or its size is unknown."""
        scu = config.scu
        kl = scu.enabled and scu.measure == "kl"
        if not kl or not scu.reference_cache or decided.fused_head.value is False:
            return 0
        size = (self.lengths.reference or 0) * self.shapes.hidden * self._element_size
        return size if scu.reference_cache is True or size <= MAX_AUTO_CACHE_BYTES else 0

    @cached_property
    def _element_size(self) -> int:
        return 4 if self.machine.precision == "fp32" else 2


def apply_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a copy of the configuration with `section.setting` or top-level settings replaced."""
    sections: dict[str, dict[str, Any]] = {"": {}}
    for dotted, value in changes.items():
        section, _, name = dotted.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("")
    top |= {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=top)


def combine_adapters(config: RunConfig, runs: Sequence[RunConfig], *, on_gpu: bool) -> RunConfig:
    """Combine the configurations of adapters trained together into one, to plan their joint memory.

    `runs` are the configurations of the adapters. Their LoRA ranks and micro-batch sizes are added up, and the
    longest max_length applies. On a CPU, `ops.backend: auto` selects the operators in plain torch, because
    PEFT's layers compute one adapter at a time.
    """
    first, longest = runs[0], max(runs, key=lambda run: run.dataset.max_length)
    combined = config.model_copy(update={"lora": first.lora, "dataset": longest.dataset, "training": first.training})
    changes: Changes = {
        "lora.r": sum(run.lora.r for run in runs),
        "lora.rank_pattern": {},
        "training.batch_size": sum(run.training.batch_size for run in runs),
        "training.global_batch_size": None,
        "training.cuda_graphs": "off",
    }
    if config.ops.backend == "auto" and not on_gpu:
        changes["ops.backend"] = "reference"
    return apply_changes(combined, changes)


def format_gib(size: float) -> str:
    if size < GIB / 10:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / GIB:.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB"
