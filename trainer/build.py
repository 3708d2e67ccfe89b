"""The model as the engine gets it (base, adapter, fused operators, checkpointing) and the batches it is fed."""

from typing import Any

import torch

from trainer.adapt import adapted_layers, apply_adapter, rank_lines
from trainer.architectures import call_projections_of_mamba, unadapted_lines, unquantized_lines
from trainer.attention import choose_attention, use_varlen
from trainer.config import RunConfig, UserError, gathers_by_layer, trained_in_full, why_not_by_layer
from trainer.data import Batches, Samples, StreamBatches
from trainer.layers.shards import LayerShards
from trainer.liger import apply_liger
from trainer.model import grows_vocabulary, load_base_model, match_vocabulary
from trainer.prepare import Prepared
from trainer.ranks import Ranks, set_seed
from trainer.recompute import enable_recomputation
from trainer.targets import unadapted_layers
from trainer.zero import DTYPES, partitioning_announced


def build_model(
    config: RunConfig, tokenizer: Any, ranks: Ranks, device: torch.device, precision: str, engine_config: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The base model with its adapter, and lines for the console on what was fused; every rank must call it.

    `engine_config` is DeepSpeed's dictionary, by which stage 3 partitions the weights while they are read.
    """
    dtype = DTYPES[precision]
    shards = _layer_shards(config, tokenizer, ranks, device)
    model = load_base_model(
        config.base_model,
        config.model,
        dtype=dtype,
        device=device,
        attention=choose_attention(config.model, device, dtype),
        quantization=config.quantization if config.adapter == "qlora" else None,
        deepspeed_config=engine_config if engine_config["zero_optimization"]["stage"] == 3 else None,
        shards=shards,
    )
    match_vocabulary(model, tokenizer)
    if config.dataset.packing and config.model.attn_implementation == "auto":
        use_varlen(model, device, dtype)
    fusion = _replace_elementwise(model, config, device)
    # The adapter's first values depend on the seed alone, not on what loading drew before.
    set_seed(config.seed)
    if config.adapter != "none":
        added = tokenizer.convert_tokens_to_ids(list(config.model.added_tokens))
        with partitioning_announced(engine_config):
            model = apply_adapter(model, config.lora, dtype, added, base_model=config.base_model)
        fusion += rank_lines(adapted_layers(model), config.lora) + unadapted_layers(model, config.lora)
        fusion += unadapted_lines(model, quantized=config.adapter == "qlora")
        if config.adapter == "qlora":
            fusion += unquantized_lines(model)
        fusion += call_projections_of_mamba(model)
        if shards is not None:
            shards.attach(model)
        fusion += _fuse(model, config, tokenizer.pad_token_id, device)
        if _forgets(config):
            from trainer.elementwise import forget_inputs

            forget_inputs(model)
    if config.zero.stage == 3:
        fusion.append(_gathering(config, shards))
    set_seed(config.seed + ranks.rank)
    recomputation = enable_recomputation(model, config.training)
    return model, fusion + ([recomputation] if recomputation else [])


def _replace_elementwise(model: Any, config: RunConfig, device: torch.device) -> list[str]:
    """Our norms, SwiGLU and rotary embedding where they fit, Liger's for what is left."""
    ops_config, compiled = config.ops, config.training.torch_compile
    lines: list[str] = []
    done: set[str] = set()
    ours = ops_config.liger == "auto" and device.type == "cuda" and not compiled
    if ours and ops_config.backend != "peft" and ops_config.backend != "reference":
        import ops
        from trainer.elementwise import replace_elementwise

        try:
            backend = ops.load(ops_config.backend)
        except ValueError as error:
            raise UserError(str(error)) from None
        if backend.name == "cuda":
            frozen = config.adapter != "none"
            forgets = _forgets(config)
            replaced = replace_elementwise(
                model,
                frozen_norms=frozen,
                recompute=forgets,
                recompute_norms=forgets and ops_config.forget == "norms",
            )
            lines, done = replaced.lines(), replaced.whole()
    return [*lines, apply_liger(model, ops_config.liger, device, compiled=compiled, done=done)]


def _forgets(config: RunConfig) -> bool:
    """True where cheap results are computed again in the backward pass and not kept.

    Gradient checkpointing keeps none of them; DeepSpeed's own stage 3 has taken the norm's weight away by then.
    """
    partitioned = config.zero.stage == 3 and not gathers_by_layer(config)
    keeps_all = config.ops.forget == "none" or config.adapter == "none" or partitioned
    return config.training.gradient_checkpointing == "none" and not keeps_all


def _layer_shards(config: RunConfig, tokenizer: Any, ranks: Ranks, device: torch.device) -> LayerShards | None:
    """What cuts the base by layers while it is loaded; None where DeepSpeed does it or there is nothing to cut."""
    if not gathers_by_layer(config) or (ranks.world_size == 1 and not config.zero.offload_parameters):
        return None
    return LayerShards(
        device,
        in_host_memory=config.zero.offload_parameters,
        pin_memory=config.zero.pin_memory,
        keep_whole=trained_in_full(config),
        keep_embeddings=bool(config.model.added_tokens) or grows_vocabulary(config.base_model, config.model, tokenizer),
    )


def _gathering(config: RunConfig, shards: LayerShards | None) -> str:
    """For the console: how stage 3 gathers the base, and why so."""
    if shards is not None:
        return shards.line()
    if gathers_by_layer(config):
        return "base: whole on the only rank (zero.gather: layer)"
    return f"base: gathered by DeepSpeed (zero.gather: module, {why_not_by_layer(config) or 'asked for'})"


def _fuse(model: Any, config: RunConfig, any_token: int, device: torch.device) -> list[str]:
    """Swap in the fused operators as `ops.backend` says."""
    backend = config.ops.backend
    if backend == "peft":
        return ["adapters: PEFT's own forward (asked for)"]
    if backend == "auto" and device.type == "cpu":
        return ["adapters: PEFT's own forward (ops.backend: auto on a CPU)"]
    from trainer.fuse import fuse  # brings bitsandbytes and the operators

    no_groups = None
    if config.zero.stage == 3 and not gathers_by_layer(config):
        no_groups = "zero.gather: module gathers each adapted layer for itself"
    elif config.training.torch_compile:
        no_groups = "torch.compile traces each layer alone"
    few = torch.full((1, 8), any_token, device=device)
    tokens = config.training.batch_size * config.dataset.max_length
    try:
        report = fuse(
            model, backend, forward=lambda: model(input_ids=few, use_cache=False), no_groups=no_groups, tokens=tokens
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    return report.lines()


def make_batches(config: RunConfig, prepared: Prepared, ranks: Ranks, *, flat: bool) -> Batches | StreamBatches:
    """This rank's micro-batches of every step."""
    training, samples = config.training, prepared.data.train
    common: dict[str, Any] = {
        "batch_size": training.batch_size,
        "accumulation": training.gradient_accumulation_steps,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "pad_token_id": prepared.tokenizer.pad_token_id,
        "flat": flat,
    }
    if isinstance(samples, Samples):
        return Batches(samples, seed=config.seed, shuffle=config.dataset.shuffle, **common)
    return StreamBatches(samples, **common)
