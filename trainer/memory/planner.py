"""Memory estimates of configurations, and the stage, micro-batch and recomputation that fit an amount of memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch

from trainer.config import AUTO, RunConfig, UserError
from trainer.config.checks import check_combinations
from trainer.data.prepared import Prepared
from trainer.data.samples import Samples
from trainer.data.step_count import resolve_global_batch
from trainer.memory.activations import Seen, Work, add_layers, tower_activations
from trainer.memory.bytes import GIB, Estimate, estimate, offloaded
from trainer.memory.decisions import VARLEN, Decisions, Machine, decide
from trainer.memory.model_widths import read_shapes
from trainer.memory.observed import Kernels, Layer, observe_layers, rows_to_observe
from trainer.memory.stored_weights import Placement, Shapes, fetched_weights, stored_bytes
from trainer.parallel.ranks.group import list_groups
from trainer.scu.steering import MAX_AUTO_CACHE_BYTES

LARGEST_BATCH = 256
"""Larger micro-batches are not faster on any GPU."""
SPARE = 0.05
"""Fraction of the peak that `largest_batch` leaves free: estimates may be 3 % too low, and slack may be larger."""
TOKEN_BY_TOKEN, SHORT = ("rwkv", "mamba", "falcon_mamba"), 16
"""Models without attention that run a Python loop over tokens, and the tokens that are observed; memory is linear."""
SHORTEST = 256
"""Tokens; shorter samples are not suggested."""
STAGES = (0, 1, 2, 3)
# Without a GPU, memory does not decide: the default.
CPU_STAGE = 2
RECOMPUTATION = "training.gradient_checkpointing"
LAYERS = "training.gradient_checkpointing_layers"
Changes = dict[str, Any]


@dataclass(frozen=True)
class Lengths:
    """Size of the samples: the most tokens, the most targets, and the number of samples."""

    longest: int
    targets: int
    samples: int | None = None
    reference: int | None = None
    """Positions of all scu.reference texts at which adapter and base are compared; None if unknown."""
    images: int = 0
    """Image tokens of a sample, on average: of those with images, or of packs."""

    @classmethod
    def assumed(cls, config: RunConfig) -> "Lengths":
        """Assume the maximum length for every sequence, without data."""
        longest = config.dataset.max_length
        return cls(longest, targets=longest)

    @classmethod
    def of(cls, config: RunConfig, samples: Any, reference: Samples | None = None) -> "Lengths":
        """Return the lengths of prepared samples (of a stream and None unknown) and of the scu.reference texts."""
        if not hasattr(samples, "lengths"):
            return cls.assumed(config)
        tokens, targets = samples.lengths()
        target_count = None if reference is None else int(reference.lengths()[0].sum()) - len(reference)
        return cls(int(tokens.max()), int(targets.max()), len(tokens), target_count)


@dataclass(frozen=True)
class Choice:
    """A possible configuration with its estimate, or the reason why it is refused."""

    config: RunConfig
    found: Estimate | None
    refusal: str = ""


@dataclass(frozen=True)
class Planner:
    """Estimates for variants of a configuration on one machine."""

    shapes: Shapes
    lengths: Lengths
    machine: Machine
    has_sequences: ClassVar[bool] = True
    """Whether samples are sequences of tokens."""
    decide = staticmethod(decide)

    @classmethod
    def of_run(cls, machine: Machine, config: RunConfig, prepared: Prepared) -> "Planner":
        """Build the planner of a run; `prepared` may lack data, which then counts as of the maximum length."""
        lora, data = None if config.adapter == "none" else config.lora, prepared.data
        vocabulary = len(prepared.tokenizer or ())
        shapes = read_shapes(prepared.model_config, config.model, lora, vocabulary_at_least=vocabulary)
        lengths = Lengths.of(config, data and data.train, prepared.reference)
        if data and data.stats.with_images:
            found = data.stats
            mean, dense = found.image_tokens / found.with_images, found.image_tokens / found.tokens
            lengths = replace(lengths, images=int(lengths.longest * dense if config.dataset.packing else mean))
        return cls(shapes, lengths, machine)

    @staticmethod
    def smaller_samples(config: RunConfig) -> Changes:
        """Return the setting that halves the size of samples, or an empty dict if they would be too small."""
        length = config.dataset.max_length
        return {"dataset.max_length": length // 2} if length > SHORTEST else {}

    def estimate(self, config: RunConfig) -> Estimate:
        """Return the estimate of a configuration without `auto`."""
        checkpoints = config.training.save_total_limit or 1
        best = int(config.training.best_checkpoint)
        decided = self.decisions(config)
        work, placement = self.work(config, decided), self._placement(config, decided)
        seen, images = self.seen(work), self.lengths.images * work.rows * (not config.vision.cache)
        tower, kept = tower_activations(self.shapes.model, images, work)
        seen = replace(seen, kept=seen.kept + kept * (config.vision.train == "lora"))
        return estimate(self.shapes, work, placement, seen, tower, checkpoints=checkpoints + best)

    def traffic(self, config: RunConfig) -> dict[str, int]:
        """Return the bytes that a GPU receives in a step: weights from its host and from others, and gradients.

        Weights are gathered in the forward and in the backward pass of each micro-step. A ring sums gradients.
        """
        decided, machine = self.decisions(config), self.machine
        placement = self._placement(config, decided)
        hosts = machine.hosts or ("",) * machine.world_size
        within = config.zero.shard_within if decided.gather.value == "layer" else "all"
        group = list_groups(within, hosts)[0]
        near = sum(hosts[rank] == hosts[group[0]] for rank in group)
        weights = 0
        if placement.zero.stage == 3:
            once = sum(stored_bytes(weight, placement) for weight in fetched_weights(self.shapes, placement))
            weights = 2 * placement.training.gradient_accumulation_steps * once
        gradients = 2 * (machine.world_size - 1) * self.shapes.trained * placement.element // machine.world_size
        return {
            "weights_from_its_host": weights * (near - 1) // len(group),
            "weights_from_other_hosts": weights * (len(group) - near) // len(group),
            "gradients": gradients,
        }

    def choice(self, config: RunConfig, changes: Mapping[str, Any]) -> Choice:
        """Return the estimate after some changes, or why they cannot be combined."""
        changed = apply_changes(config, changes)
        try:
            check_combinations(changed)
        except UserError as error:
            return Choice(changed, None, str(error))
        return Choice(changed, self.estimate(changed))

    def table(self, config: RunConfig) -> list[Choice]:
        """Return every stage, without and with each kind of offload."""
        config = apply_changes(config, {"training.batch_size": 1}) if config.training.batch_size == AUTO else config
        variations = [
            {"zero.stage": stage, **OFFLOADS[name]}
            for stage in STAGES
            for name in [*OFFLOADS][: {0: 1, 3: 3}.get(stage, 2)]
        ]
        return [self.choice(config, changes) for changes in variations]

    def lowest_stage(self, config: RunConfig, memory: int) -> int | None:
        """Return the lowest stage with an estimate within `memory` bytes, with the configured offload."""
        for stage in STAGES:
            found = self.choice(config, {"zero.stage": stage}).found
            if found is not None and found.needed <= memory:
                return stage
        return None

    def most_rows(self, config: RunConfig) -> int:
        """Return the largest useful micro-batch regardless of memory."""
        together, ranks = config.training.global_batch_size, config.data_ranks(self.machine.world_size)
        if together not in (None, AUTO):
            return min(LARGEST_BATCH, max(1, together // ranks))
        if self.lengths.samples:
            of_epoch = self.lengths.samples // (ranks * config.training.gradient_accumulation_steps)
            return min(LARGEST_BATCH, max(1, of_epoch))
        return LARGEST_BATCH

    def sample_text(self, config: RunConfig) -> str:
        """Format the size of a sample."""
        return f"{self.lengths.longest:,} tokens"

    def largest_batch(self, config: RunConfig, memory: int) -> int:
        """Return the largest micro-batch within `memory` bytes, less `SPARE` if several rows; 0 if none fits."""
        most = self.most_rows(config)
        fits, too_large = 0, most + 1
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            found = self.estimate(apply_changes(config, {"training.batch_size": middle}))
            if found.needed + (int(found.peak * SPARE) if middle > 1 else 0) <= memory:
                fits = middle
            else:
                too_large = middle
        return fits

    def resolve(self, config: RunConfig, memory: int | None) -> RunConfig:
        """Replace `auto`: the least recomputation that fits, with it the lowest stage, then the largest batch.

        Stages are tried with micro-batch 1 if that is `auto`. If nothing fits, the last stage and micro-batch 1 are
        chosen, which the check before training then refuses. Without a GPU (`memory` None): no recomputation, stage 2
        or the highest that other settings allow, and micro-batch 1.
        """
        if config.training.gradient_checkpointing != "auto":
            return self._resolved(config, memory)
        without = self._resolved(apply_changes(config, {RECOMPUTATION: "none"}), memory)
        if memory is None or self.estimate(without).needed <= memory:
            return without
        all_layers = self._resolved(apply_changes(config, {RECOMPUTATION: "non_reentrant"}), memory)
        return all_layers if self.estimate(all_layers).needed > memory else self._fewest_layers(all_layers, memory)

    def _fewest_layers(self, config: RunConfig, memory: int) -> RunConfig:
        """Set the smallest number of recomputed layers that fits `memory`, if not all are needed."""
        best, too_few, enough = config, 0, len(self.shapes.layers)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            tried = apply_changes(config, {LAYERS: middle})
            if self.estimate(tried).needed <= memory:
                best, enough = tried, middle
            else:
                too_few = middle
        return best

    def _resolved(self, config: RunConfig, memory: int | None) -> RunConfig:
        samples, ranks = self.lengths.samples, config.data_ranks(self.machine.world_size)
        config = resolve_global_batch(config, samples, ranks)
        stage_open, batch_open = config.zero.stage == AUTO, config.training.batch_size == AUTO
        if batch_open:
            config = apply_changes(config, {"training.batch_size": 1})
        if stage_open:
            stage = self._cpu_stage(config) if memory is None else self.lowest_stage(config, memory)
            config = apply_changes(config, {"zero.stage": self._highest_allowed(config) if stage is None else stage})
        config = self._choose_shard_group(config, memory)
        if batch_open and memory is not None:
            config = apply_changes(config, {"training.batch_size": max(1, self.largest_batch(config, memory))})
        config = resolve_global_batch(config, samples, ranks)
        check_combinations(config)
        return config

    def _choose_shard_group(self, config: RunConfig, memory: int | None) -> RunConfig:
        """Replace zero.shard_within: auto at stage 3 by `host` if the shards of a host fit, otherwise by `all`."""
        if config.zero.stage != 3 or config.zero.shard_within != "auto":
            return config
        host = apply_changes(config, {"zero.shard_within": "host"})
        fits = memory is None or self.estimate(host).needed <= memory
        return host if fits else apply_changes(config, {"zero.shard_within": "all"})

    def _cpu_stage(self, config: RunConfig) -> int | None:
        return CPU_STAGE if self.choice(config, {"zero.stage": CPU_STAGE}).found is not None else None

    def _highest_allowed(self, config: RunConfig) -> int:
        allowed = [stage for stage in STAGES if self.choice(config, {"zero.stage": stage}).found is not None]
        if not allowed:
            raise UserError(f"zero.stage=auto: {self.choice(config, {'zero.stage': CPU_STAGE}).refusal}")
        return allowed[-1]

    def decisions(self, config: RunConfig) -> Decisions:
        """Return the decisions for a configuration on this machine."""
        return self.decide(config, self.machine, self.shapes.properties)

    def work(self, config: RunConfig, decided: Decisions) -> Work:
        """Return the sizes and kernels of one micro-step."""
        training = config.training
        kernels, fused = self._kernels(config, decided), bool(decided.fused_head.value)
        room = self.machine.host_room
        if room is not None:
            room = max(0, room - offloaded(self.shapes, self._placement(config, decided)))
        reference = _reference_rows(config)
        return Work(
            rows=training.batch_size + reference,
            reference_rows=reference,
            # Without the fused loss, a position with a target in one row has logits in every row. If only the device
            # can decide, all logits count.
            targets=self.lengths.targets if training.batch_size == 1 or fused else kernels.length,
            kernels=kernels,
            own_norms=decided.norms.value == "ours",
            fused_loss=fused,
            training=training,
            host_room=room,
        )

    def _kernels(self, config: RunConfig, decided: Decisions) -> Kernels:
        attention, on_gpu, packed = decided.attention.value, self.machine.on_gpu, config.adapter == "qlora"
        flat = attention == VARLEN or attention.startswith("flash_attention")
        if attention == VARLEN and not self.machine.flash:
            # Attention sinks without flash attention: the model's own code, as if the pack were one document.
            attention = "eager" if self.shapes.properties.sinks else "sdpa"
        separate = not decided.siblings.value and decided.adapters.value in ("cuda", "reference")
        return Kernels(
            length=-(-min(self.lengths.longest, config.dataset.max_length) // config.parallel.sequence),
            dtype=torch.float32 if self._element == 4 else torch.bfloat16,
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
            eight_bit=packed and config.quantization.eight_bit and self.shapes.stored != "blocks",
            scan_by_kernel=on_gpu and self.machine.scan_kernels,
        )

    def seen(self, work: Work) -> Seen:
        """Return the activations of a micro-step."""
        plain = replace(work.kernels, recomputed="none", selective=False)
        of_kind, of_plain = (self._layers(kernels, work.rows) for kernels in (work.kernels, plain))
        layers = self.shapes.layers
        larger = work.larger_pass / work.rows
        return add_layers([of_kind[kind] for kind in layers], [of_plain[kind] for kind in layers], larger, work)

    def _layers(self, kernels: Kernels, rows: int) -> dict[int, Layer]:
        if kernels.length > 2 * SHORT and self.shapes.model.config.model_type in TOKEN_BY_TOKEN:
            once, twice = (self._layers(replace(kernels, length=length), rows) for length in (SHORT, 2 * SHORT))
            return {kind: layer.extend(twice[kind], kernels.length / SHORT - 1) for kind, layer in once.items()}
        few = rows_to_observe(self.shapes, kernels)
        if rows <= few:
            return self._observed(kernels, rows)
        once, twice = self._observed(kernels, few), self._observed(kernels, 2 * few)
        return {kind: layer.extend(twice[kind], rows / few - 1) for kind, layer in once.items()}

    @cached_property
    def _observed(self) -> Callable[[Kernels, int], dict[int, Layer]]:
        return cache(partial(observe_layers, self.shapes))

    def _placement(self, config: RunConfig, decided: Decisions) -> Placement:
        return Placement(
            config.zero,
            config.training,
            config.quantization,
            packed=config.adapter == "qlora",
            world_size=self.machine.world_size,
            by_layer=decided.gather.value == "layer",
            flat=decided.flat.value,
            element=self._element,
            shard_group=decided.shard_group.value,
            base_states=self._base_states(config, decided),
        )

    def _base_states(self, config: RunConfig, decided: Decisions) -> int:
        """Return the bytes of scu.reference_cache, if the run is long enough to use it and the file's size is known."""
        scu = config.scu
        kl = scu.enabled and scu.measure == "kl"
        if not kl or not scu.reference_cache or decided.fused_head.value is False:
            return 0
        size = (self.lengths.reference or 0) * self.shapes.hidden * self._element
        return size if scu.reference_cache is True or size <= MAX_AUTO_CACHE_BYTES else 0

    @cached_property
    def _element(self) -> int:
        return 4 if self.machine.precision == "fp32" else 2


OFFLOADS: dict[str, Changes] = {
    "none": {"zero.offload_optimizer": False, "zero.offload_parameters": False},
    "optimizer": {"zero.offload_optimizer": True, "zero.offload_parameters": False},
    "optimizer, parameters": {"zero.offload_optimizer": True, "zero.offload_parameters": True},
}


def _reference_rows(config: RunConfig) -> int:
    """Return the rows that `scu.measure: kl` adds to the last micro-step: a fraction of the step's sequences."""
    scu, training = config.scu, config.training
    if not scu.enabled or scu.measure != "kl":
        return 0
    return math.ceil(scu.reference_share * training.batch_size * training.gradient_accumulation_steps)


def apply_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a copy of the configuration with `section.setting` or top-level settings replaced."""
    sections: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for dotted, value in changes.items():
        section, _, name = dotted.rpartition(".")
        if section:
            sections.setdefault(section, {})[name] = value
        else:
            top[name] = value
    top |= {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=top)


def combine_adapters(config: RunConfig, own: Sequence[RunConfig], *, on_gpu: bool) -> RunConfig:
    """Return the configuration with which `adapters` are built and estimated: one adapter with the sum of their ranks.

    `own` are those of the adapters. A micro-batch has the rows of all. On a CPU, where a run alone has PEFT's layers,
    the operators are plain torch.
    """
    first, longest = own[0], max(own, key=lambda each: each.dataset.max_length)
    whole = config.model_copy(update={"lora": first.lora, "dataset": longest.dataset, "training": first.training})
    changes: Changes = {
        "lora.r": sum(each.lora.r for each in own),
        "lora.rank_pattern": {},
        "training.batch_size": sum(each.training.batch_size for each in own),
        "training.global_batch_size": None,
        "training.cuda_graphs": "off",
    }
    if config.ops.backend == "auto" and not on_gpu:
        changes["ops.backend"] = "reference"
    return apply_changes(whole, changes)


def gib(size: int) -> str:
    """Format bytes as GiB, or as MiB below a tenth of one."""
    if size < GIB / 10:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / GIB:.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB"
