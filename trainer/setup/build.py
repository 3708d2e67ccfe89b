"""Build the model and its engine: base model, adapter, fused operators, checkpointing, optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from trainer.config import RunConfig, resolve_engine_zero
from trainer.config.adapter_settings import list_fully_trained_modules
from trainer.contract.rendezvous import get_host_name
from trainer.memory.decisions import VARLEN, Decisions
from trainer.model.adapter import (
    apply_adapter,
    apply_adapters,
    count_parameters,
    list_rank_warnings,
    summarize_adapted_layers,
)
from trainer.model.expert_layers import find_expert_modules
from trainer.model.targets import describe_unadapted_layers
from trainer.monitor.console import Output
from trainer.monitor.hooks import (
    ExpertLoad,
    FirstGradientCheck,
    History,
    Hook,
    SampleHook,
    SkippedRecords,
    SpikeDetector,
    StartReport,
)
from trainer.monitor.profiler import StepProfiler
from trainer.parallel.engine.adapter_choice import find_choice
from trainer.parallel.engine.deepspeed_engine import (
    DTYPES,
    build_deepspeed_config,
    enable_transformers_zero3,
    start_engine,
    watch_stragglers,
)
from trainer.parallel.engine.flat_adapter import flatten_adapter
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.optimizer import build_optimizer
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, create_shard_group, gather_objects, list_shard_groups, set_seed
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.stragglers import StragglerWatch
from trainer.patches.deepspeed_workarounds import AdapterGuard
from trainer.patches.graphed_loss import GraphedLoss
from trainer.patches.installation import PatchPlan, install_on_adapted_model, install_on_base_model, install_on_engine
from trainer.patches.loss_head import TokenLoss
from trainer.patches.mamba import describe_unadapted_weights
from trainer.tasks.task import StepLoss, Task


class Builder:
    """Builds a run's model, engine and loss according to its decisions; all ranks must call the methods."""

    def __init__(
        self, config: RunConfig, decisions: Decisions, task: Task, ranks: Ranks, device: torch.device, precision: str
    ) -> None:
        self._config, self._decisions, self._task, self._ranks, self._device = config, decisions, task, ranks, device
        self._precision, self._dtype, self._on_gpu = precision, DTYPES[precision], device.type == "cuda"
        # Built before the model, because stage 3 partitions the weights while they are loaded.
        self._engine_config = build_deepspeed_config(
            config.training,
            resolve_engine_zero(config),
            precision,
            on_gpu=self._on_gpu,
            single_gradient=decisions.flat.value,
            has_adapter_guard=bool(config.runs),
        )
        self.guard: AdapterGuard | None = None
        """Guard that clips or skips each adapter's update if there are several adapters; set by `start_engine`."""

    def build_model(self) -> tuple[Any, list[Any]]:
        """Build the base model with its adapter. Return it and lines for the console, the most important one first.

        The lines include warnings about decisions that the model does not support.
        """
        config, task = self._config, self._task
        shards = self._build_layer_shards()
        with phase("weights"):
            model = task.load_base(self._dtype, self._engine_config, shards)
        patches = self._plan_patches(shards)
        lines = [self._decisions.format_summary(), *install_on_base_model(model, patches)]
        # The adapter's initialization must not depend on random numbers drawn while loading.
        set_seed(config.seed)
        if config.runs:
            with enable_transformers_zero3(self._engine_config):
                sections = [(run.lora, run.seed) for run in config.runs]
                model = apply_adapters(model, sections, self._dtype, task_type=task.peft_type)
            lines += describe_unadapted_weights(model)
        elif config.adapter != "none":
            with enable_transformers_zero3(self._engine_config):
                model = apply_adapter(
                    model,
                    config.lora,
                    self._dtype,
                    task.find_added_token_ids(),
                    base_model=config.base_model,
                    task_type=task.peft_type,
                )
            lines += list_rank_warnings(config.lora) + describe_unadapted_layers(model, config.lora)
            lines += describe_unadapted_weights(model)
        lines += install_on_adapted_model(model, patches)
        if config.zero.stage == 3:
            lines.append(self._describe_gather(shards))
        set_seed(config.seed + self._ranks.rank)
        if (choice := find_choice(model)) is not None:
            for name, run in zip(choice.names, config.runs, strict=True):
                choice.seed(name, run.seed + self._ranks.rank)
        return model, [*self._summarize(model), *lines]

    def start_engine(self, model: Any) -> tuple[Engine, StepLoss]:
        config, decisions = self._config, self._decisions
        if config.training.torch_compile:
            model.compile()
        offloads = config.zero.offload_optimizer or not self._on_gpu
        flat = None
        if decisions.flat.value:
            flat = flatten_adapter(model, separate_up=bool(config.lora.loraplus_lr_ratio))
        adapters = [run.training for run in config.runs]
        optimizer = build_optimizer(model, config.training, config.lora, fused=not offloads, adapters=adapters)
        loss = self._task.build_loss(model, fused_head=decisions.fused_head.value)
        with phase("deepspeed"):
            engine = start_engine(model, optimizer, self._engine_config)
        limits, on_device = [training.max_grad_norm for training in adapters], decisions.clips_on_device.value
        self.guard = install_on_engine(
            engine, config.training.max_grad_norm, clips_on_device=on_device, max_grad_norms=limits
        )
        if flat is not None:
            flat.repoint_parameters()
        with phase("first passes"):
            self._task.check_trainable(engine, loss, varlen=decisions.attention.value == VARLEN)
        return engine, loss

    def build_training_loss_and_watch(
        self, loss: StepLoss, engine: Engine, log: Callable[[str], None]
    ) -> tuple[StepLoss, StragglerWatch | None]:
        """Return the loss for training steps, and the straggler watch (None on a single rank).

        The loss replays CUDA graphs if the settings and the model allow it. A run with several adapters uses
        neither CUDA graphs nor a watch.
        """
        if find_choice(engine.module) is not None:
            return loss, None
        training, model = self._config.training, engine.module
        mode, is_allowed = training.cuda_graphs, self._decisions.cuda_graphs.value is not False
        if mode != "off" and is_allowed and isinstance(loss, TokenLoss):
            has_experts = bool(find_expert_modules(model)) and not training.torch_compile
            loss = GraphedLoss.create(loss, model, mode, log, has_experts=has_experts) or loss
        return loss, watch_stragglers(engine, self._ranks, log)

    def build_hooks(
        self, engine: Engine, scu_controller: object | None, history: History, total_steps: int,
        count_skipped: Callable[[], dict[str, int]], sample: Callable[[str, int], None], log: Output,
    ) -> list[Hook]:  # fmt: skip
        """Return this rank's step hooks in the order in which they are called.

        `count_skipped` returns the number of skipped records by source, and `sample` generates samples at a step. In a
        run with several adapters, each adapter only has hooks for its own data and losses.
        """
        config, task, ranks, model = self._config, self._task, self._ranks, engine.module
        spikes: list[Hook] = (
            [SpikeDetector(log, history)] if ranks.is_main and config.training.on_spike == "warn" else []
        )
        if find_choice(model) is not None:
            return [SkippedRecords(count_skipped), *spikes] if ranks.is_main else []
        hooks: list[Hook | None] = [FirstGradientCheck(model, finite=not engine.fp16_enabled()), StartReport(log)]
        if steps := config.logging.profile_steps:
            first_step = max(1, total_steps - steps + 1)
            hooks.append(StepProfiler(Path(config.output_dir), ranks.rank, first_step, engine, scu_controller))
        hooks.append(ExpertLoad.for_model(model, compiled=config.training.torch_compile))
        if ranks.is_main:
            hooks += [SkippedRecords(count_skipped), task.build_flops_meter(model), *spikes]
        if task.sample_every:
            hooks.append(SampleHook(sample, task.sample_every, total_steps))
        return [hook for hook in hooks if hook is not None]

    def _summarize(self, model: Any) -> list[Any]:
        trainable, total = count_parameters(model)
        trains = f"trains {trainable:,} of {total:,} parameters ({trainable / total:.2%}) in {self._precision}"
        devices = f"{self._ranks.world_size} x {self._device.type}"
        lines: list[Any] = [f"{trains}, ZeRO stage {self._config.zero.stage}, {devices}"]
        if self._config.adapter != "none":
            table = Table(box=None, pad_edge=False)
            for heading in ("adapted", "in -> out"):
                table.add_column(heading)
            for heading in ("layers", "parameters"):
                table.add_column(heading, justify="right")
            for layer in summarize_adapted_layers(model):
                table.add_row(layer.name, layer.shape, str(layer.count), f"{layer.parameters:,}")
            lines.append(table)
        return lines

    def _build_layer_shards(self) -> LayerShards | None:
        """Return the shards for loading the base model per layer; None if DeepSpeed gathers it or it is not sharded."""
        zero = self._config.zero
        if self._decisions.gather.value != "layer":
            return None
        hosts = gather_objects(get_host_name())
        group = create_shard_group(zero.shard_within, hosts)
        # Use the largest group: all ranks read the weights together, even a rank that is the only one on its host.
        largest = max(map(len, list_shard_groups(zero.shard_within, hosts)))
        if largest == 1 and not zero.offload_parameters:
            return None
        return LayerShards(
            self._device,
            in_host_memory=zero.offload_parameters,
            pin_memory=zero.pin_memory,
            keep_whole=list_fully_trained_modules(self._config),
            keep_embeddings=self._task.must_keep_embeddings(),
            group=group,
        )

    def _describe_gather(self, shards: LayerShards | None) -> str:
        gather = self._decisions.gather
        if shards is not None:
            return shards.format_summary()
        if gather.value == "layer":
            alone = not dist.is_initialized() or dist.get_world_size() == 1
            return f"base: not sharded, {'on the only rank' if alone else 'one copy per host'} (zero.gather: layer)"
        return f"base: gathered by DeepSpeed (zero.gather: module, {gather.reason})"

    def _plan_patches(self, shards: LayerShards | None) -> PatchPlan:
        config, decisions = self._config, self._decisions
        return PatchPlan(
            training=config.training,
            backend=config.ops.backend,
            has_adapter=config.adapter != "none",
            rank_tokens=config.training.batch_size * config.dataset.max_length,
            shares_sequences=config.parallel.sequence > 1,
            device=self._device,
            dtype=self._dtype,
            varlen=decisions.attention.value == VARLEN,
            own_elementwise=decisions.own_elementwise.value,
            elementwise_reason=decisions.own_elementwise.reason,
            recomputed=decisions.recomputed_results.value,
            adapters=decisions.adapters.value,
            adapters_reason=decisions.adapters.reason,
            separate_projections=not decisions.siblings.value,
            run_dummy_forward=self._task.run_dummy_forward,
            shards=shards,
            mlp_tile=decisions.mlp_tile.value,
        )
