"""The model as the engine gets it (base, adapter, fused operators, checkpointing) and the batches it is fed."""

from typing import Any

import torch

from trainer.config import RunConfig, UserError, trained_in_full
from trainer.data import Batches, Samples, StreamBatches
from trainer.data.prepared import Prepared
from trainer.decisions import VARLEN, Decisions
from trainer.engine.deepspeed_engine import DTYPES, partitioning_announced
from trainer.engine.layer_gather.shards import LayerShards
from trainer.model.adapter import adapted_layers, apply_adapter, rank_lines
from trainer.model.base import grows_vocabulary, load_base_model, match_vocabulary
from trainer.model.expert_layers import expert_modules
from trainer.model.targets import unadapted_layers
from trainer.patches.liger import PARTS, apply_liger, line_of
from trainer.patches.mamba import call_projections_of_mamba, unadapted_lines, unquantized_lines
from trainer.patches.norm_mlp_rope import forget_inputs, replace_elementwise
from trainer.patches.packed_attention import choose_attention, use_varlen
from trainer.patches.recompute import enable_recomputation
from trainer.ranks.group import Ranks, set_seed


def build_model(
    config: RunConfig,
    decided: Decisions,
    tokenizer: Any,
    ranks: Ranks,
    device: torch.device,
    precision: str,
    engine_config: dict[str, Any],
) -> tuple[Any, list[str]]:
    """The base model with its adapter as decided, and lines for the console; every rank must call it.

    `engine_config` is DeepSpeed's dictionary, by which stage 3 partitions the weights while they are read. The lines
    warn where the model turned out other than was decided.
    """
    dtype = DTYPES[precision]
    shards = _layer_shards(config, decided, tokenizer, ranks, device)
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
    lines = [decided.line(), *_patch_base(model, config, decided, device, dtype)]
    # The adapter's first values depend on the seed alone, not on what loading drew before.
    set_seed(config.seed)
    if config.adapter != "none":
        added = tokenizer.convert_tokens_to_ids(list(config.model.added_tokens))
        with partitioning_announced(engine_config):
            model = apply_adapter(model, config.lora, dtype, added, base_model=config.base_model)
        lines += rank_lines(adapted_layers(model), config.lora) + unadapted_layers(model, config.lora)
        lines += unadapted_lines(model, quantized=config.adapter == "qlora")
        if config.adapter == "qlora":
            lines += unquantized_lines(model)
        lines += _patch_adapted(model, config, decided, shards, tokenizer.pad_token_id, device)
    if config.zero.stage == 3:
        lines.append(_gathering(decided, shards))
    set_seed(config.seed + ranks.rank)
    recomputation = enable_recomputation(model, config.training)
    return model, lines + ([recomputation] if recomputation else [])


def _patch_base(
    model: Any, config: RunConfig, decided: Decisions, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """What is replaced in the base, in the order of trainer/patches/entries.py: before adapters are added."""
    if decided.attention.value == VARLEN:
        use_varlen(model, device, dtype)
    return _replace_elementwise(model, config, decided)


def _patch_adapted(
    model: Any,
    config: RunConfig,
    decided: Decisions,
    shards: LayerShards | None,
    any_token: int,
    device: torch.device,
) -> list[str]:
    """What is replaced in the adapted model, in the same order; each forward holds the one that was there before."""
    lines = call_projections_of_mamba(model)
    if shards is not None:
        shards.attach(model)
    lines += _compute_experts(model, config, device)
    lines += _fuse(model, config, decided, any_token, device)
    if decided.recomputed_results.value != "none":
        forget_inputs(model)
    return lines


def _compute_experts(model: Any, config: RunConfig, device: torch.device) -> list[str]:
    if not expert_modules(model):
        return []
    from trainer.patches.fused_experts import compute_experts  # brings peft, and with it bitsandbytes

    if device.type == "cuda":
        _load_operators(config)
    return compute_experts(model, on_gpu=device.type == "cuda")


def _replace_elementwise(model: Any, config: RunConfig, decided: Decisions) -> list[str]:
    """Our norms, SwiGLU and rotary embedding, Liger's for what is left, as decided."""
    parts = dict(zip(PARTS, (decided.norms, decided.swiglu, decided.rotary), strict=True))
    lines: list[str] = []
    done: set[str] = set()
    if decided.own_elementwise.value:
        _load_operators(config)
        recomputed = decided.recomputed_results.value
        replaced = replace_elementwise(
            model,
            frozen_norms=config.adapter != "none",
            recompute=recomputed != "none",
            recompute_norms=recomputed == "norms",
        )
        lines, done = replaced.lines(), replaced.whole()
        for part in sorted(done ^ {part for part, choice in parts.items() if choice.value == "ours"}):
            now = "ours" if part in done else "not ours"
            lines.append(f"[yellow]warning:[/yellow] {PARTS[part]}: {now} on this device; the memory estimate is off")
    if decided.liger.value and len(done) < len(PARTS):
        apply_liger(model, done)
    elif config.ops.elementwise == "liger":
        raise UserError(f"ops.elementwise=liger: {decided.liger.reason}; use ops.elementwise: auto")
    return [*lines, line_of(done, decided.liger.reason)]


def _load_operators(config: RunConfig) -> None:
    import ops

    try:
        ops.load(config.ops.backend if config.ops.backend != "peft" else "auto")
    except ValueError as error:
        raise UserError(str(error)) from None


def _layer_shards(
    config: RunConfig, decided: Decisions, tokenizer: Any, ranks: Ranks, device: torch.device
) -> LayerShards | None:
    """What cuts the base per layer while it is loaded; None where DeepSpeed does it or there is nothing to cut."""
    if decided.gather.value != "layer" or (ranks.world_size == 1 and not config.zero.offload_parameters):
        return None
    return LayerShards(
        device,
        in_host_memory=config.zero.offload_parameters,
        pin_memory=config.zero.pin_memory,
        keep_whole=trained_in_full(config),
        keep_embeddings=bool(config.model.added_tokens) or grows_vocabulary(config.base_model, config.model, tokenizer),
    )


def _gathering(decided: Decisions, shards: LayerShards | None) -> str:
    """For the console: how stage 3 gathers the base, and why so."""
    if shards is not None:
        return shards.line()
    if decided.gather.value == "layer":
        return "base: whole on the only rank (zero.gather: layer)"
    return f"base: gathered by DeepSpeed (zero.gather: module, {decided.gather.reason})"


def _fuse(model: Any, config: RunConfig, decided: Decisions, any_token: int, device: torch.device) -> list[str]:
    """Swap in the fused operators, as decided."""
    if decided.adapters.value == "peft":
        return [f"adapters: PEFT's own forward ({decided.adapters.reason})"]
    from trainer.patches.fused_lora import fuse  # brings bitsandbytes and the operators

    backend = config.ops.backend
    assert backend != "peft"
    no_groups = None if decided.siblings.value else decided.siblings.reason
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
