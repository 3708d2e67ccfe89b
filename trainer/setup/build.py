"""Build the model for the engine: base, adapter, fused operators, checkpointing."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from trainer.config import RunConfig, trained_in_full
from trainer.contract.rendezvous import host_name
from trainer.memory.decisions import VARLEN, Decisions
from trainer.model.adapter import adapted_layers, apply_adapter, count_parameters, rank_lines
from trainer.model.targets import unadapted_layers
from trainer.parallel.engine.deepspeed_engine import DTYPES, announce_partitioning
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.ranks.group import Ranks, form_group, gather_objects, set_seed
from trainer.parallel.ranks.progress import phase
from trainer.patches.installation import Wanted, install_on_adapted, install_on_base
from trainer.patches.mamba import unadapted_lines
from trainer.tasks.task import Task


def build_model(
    config: RunConfig,
    decided: Decisions,
    task: Task,
    ranks: Ranks,
    device: torch.device,
    precision: str,
    engine_config: dict[str, Any],
) -> tuple[Any, list[str]]:
    """Build the base model with its adapter; also returns lines for the console. Every rank must call it.

    `engine_config` is DeepSpeed's dictionary, with which stage 3 partitions the weights while they are read. The lines
    warn if the model differs from what was decided.
    """
    dtype = DTYPES[precision]
    shards = _layer_shards(config, decided, task, ranks, device)
    with phase("weights"):
        model = task.load_base(dtype, engine_config, shards)
    wanted = select_patches(config, decided, device, dtype, task.small_pass, shards)
    lines = [decided.line(), *install_on_base(model, wanted)]
    # The adapter's initialization depends only on the seed, not on random numbers drawn while loading.
    set_seed(config.seed)
    if config.adapter != "none":
        with announce_partitioning(engine_config):
            model = apply_adapter(
                model,
                config.lora,
                dtype,
                task.added_tokens(),
                base_model=config.base_model,
                task_type=task.peft_type,
            )
        lines += rank_lines(config.lora) + unadapted_layers(model, config.lora)
        lines += unadapted_lines(model)
    lines += install_on_adapted(model, wanted)
    if config.zero.stage == 3:
        lines.append(_describe_gather(decided, shards))
    set_seed(config.seed + ranks.rank)
    return model, lines


def start_summary(model: Any, config: RunConfig, precision: str, devices: str) -> list[Any]:
    """Return a table of the adapted layers, and a line on trained parameters, precision, ZeRO stage and devices."""
    lines: list[Any] = []
    if config.adapter != "none":
        table = Table(box=None, pad_edge=False)
        for heading, side in (("adapted", "left"), ("in -> out", "left"), ("layers", "right"), ("parameters", "right")):
            table.add_column(heading, justify="left" if side == "left" else "right")
        for layer in adapted_layers(model):
            table.add_row(layer.name, layer.shape, str(layer.count), f"{layer.parameters:,}")
        lines.append(table)
    trainable, total = count_parameters(model)
    trains = f"trains {trainable:,} of {total:,} parameters ({trainable / total:.2%})"
    return [*lines, f"{trains} in {precision}, ZeRO stage {config.zero.stage}, {devices}"]


def _layer_shards(
    config: RunConfig, decided: Decisions, task: Task, ranks: Ranks, device: torch.device
) -> LayerShards | None:
    """Return the shards into which the base is loaded per layer; None with DeepSpeed's gather or a single rank."""
    if decided.gather.value != "layer":
        return None
    group = form_group(config.zero.shard_within, gather_objects(host_name()))
    shared_by = dist.get_world_size(group) if dist.is_initialized() else 1
    if shared_by == 1 and not config.zero.offload_parameters:
        return None
    return LayerShards(
        device,
        in_host_memory=config.zero.offload_parameters,
        pin_memory=config.zero.pin_memory,
        keep_whole=trained_in_full(config),
        keep_embeddings=task.keep_embeddings(),
        group=group,
    )


def _describe_gather(decided: Decisions, shards: LayerShards | None) -> str:
    if shards is not None:
        return shards.line()
    if decided.gather.value == "layer":
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return f"base: whole on {'the only rank' if alone else 'each rank, one per host'} (zero.gather: layer)"
    return f"base: gathered by DeepSpeed (zero.gather: module, {decided.gather.reason})"


def select_patches(
    config: RunConfig,
    decided: Decisions,
    device: torch.device,
    dtype: torch.dtype,
    small_pass: Callable[[Any], object],
    shards: LayerShards | None = None,
) -> Wanted:
    """Return the patches to install on the model and engine of a run (trainer/patches/installation.py)."""
    return Wanted(
        config=config,
        device=device,
        dtype=dtype,
        varlen=decided.attention.value == VARLEN,
        own_elementwise=decided.own_elementwise.value,
        elementwise_reason=decided.own_elementwise.reason,
        recomputed=decided.recomputed_results.value,
        adapters=decided.adapters.value,
        adapters_reason=decided.adapters.reason,
        separate_projections=not decided.siblings.value,
        small_pass=small_pass,
        shards=shards,
        mlp_tile=decided.mlp_tile.value,
    )
