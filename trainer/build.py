"""The model as the engine gets it (base, adapter, fused operators, checkpointing) and the batches it is fed."""

from typing import Any

import torch

from trainer.adapt import apply_adapter
from trainer.attention import resolve_attention
from trainer.config import RunConfig, UserError
from trainer.data import Batches, Samples, StreamBatches
from trainer.model import load_base_model, match_vocabulary
from trainer.prepare import Prepared
from trainer.ranks import Ranks, set_seed
from trainer.zero import DTYPES, partitioning_announced


def build_model(
    config: RunConfig, tokenizer: Any, ranks: Ranks, device: torch.device, precision: str, engine_config: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The base model with its adapter, and lines for the console on what was fused; every rank must call it.

    `engine_config` is DeepSpeed's dictionary, by which stage 3 partitions the weights while they are read.
    """
    dtype = DTYPES[precision]
    model = load_base_model(
        config.base_model,
        config.model,
        dtype=dtype,
        device=device,
        attention=resolve_attention(config.model, packing=config.dataset.packing, device=device, dtype=dtype),
        quantization=config.quantization if config.adapter == "qlora" else None,
        deepspeed_config=engine_config if config.zero.stage == 3 else None,
    )
    match_vocabulary(model, tokenizer)
    fusion: list[str] = []
    # The adapter's first values depend on the seed alone, not on what loading drew before.
    set_seed(config.seed)
    if config.adapter != "none":
        added = tokenizer.convert_tokens_to_ids(list(config.model.added_tokens))
        with partitioning_announced(engine_config):
            model = apply_adapter(model, config.lora, dtype, added, base_model=config.base_model)
        fusion = _fuse(model, config, tokenizer.pad_token_id, device)
    set_seed(config.seed + ranks.rank)
    if config.training.gradient_checkpointing != "none":
        reentrant = config.training.gradient_checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model, fusion


def _fuse(model: Any, config: RunConfig, any_token: int, device: torch.device) -> list[str]:
    """Swap in the fused operators as `ops.backend` says."""
    backend = config.ops.backend
    if backend == "peft":
        return ["adapters: PEFT's own forward (asked for)"]
    if backend == "auto" and device.type == "cpu":
        return ["adapters: PEFT's own forward (ops.backend: auto on a CPU)"]
    from trainer.fuse import fuse  # brings bitsandbytes and the operators

    no_groups = None
    if config.zero.stage == 3:
        no_groups = "stage 3 gathers layer by layer"
    elif config.training.torch_compile:
        no_groups = "torch.compile traces each layer alone"
    tokens = torch.full((1, 8), any_token, device=device)
    try:
        report = fuse(model, backend, forward=lambda: model(input_ids=tokens, use_cache=False), no_groups=no_groups)
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
