"""Install the replacements on a model and its engine, in a fixed order.

Each new forward wraps the one that it replaces. Up to five are stacked on one adapted layer, from the inside out:
PEFT's forward, the fused operator, recomputation of its input, the checkpoint of its layer, gathering hooks.
Replacements for the whole process, for the construction of a layer or for a single pass are installed elsewhere:
docs/decisions/11-patches.md explains why, and docs/reference/workarounds.md lists all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.config import TrainingSection, UserError
from trainer.model.expert_layers import find_expert_modules
from trainer.model.reached_layers import find_decoder_layers
from trainer.parallel.engine.adapter_choice import find_choice
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.progress import phase
from trainer.patches.deepspeed_workarounds import AdapterGuard, UpdateGuard, install_workarounds
from trainer.patches.mamba import install_mamba_projections
from trainer.patches.norm_mlp_rope import PARTS, install_input_recomputation, replace_elementwise
from trainer.patches.packed_attention import (
    copy_heads_without_flash,
    enable_varlen,
    use_flash_in_towers,
    use_varlen_if_supported,
)
from trainer.patches.recompute import enable_recomputation
from trainer.patches.tiled_mlp import tile_feed_forward


@dataclass(frozen=True)
class PatchPlan:
    training: TrainingSection
    backend: Literal["auto", "cuda", "reference", "peft"]
    """Value of the setting ops.backend."""
    has_adapter: bool
    rank_tokens: int
    """Tokens per micro-batch."""
    shares_sequences: bool
    device: torch.device
    dtype: torch.dtype
    varlen: bool
    """Whether packs use variable-length attention."""
    own_elementwise: bool
    """Whether our operators replace norms, gated MLPs and rotary embedding."""
    elementwise_reason: str
    recomputed: str
    """Outputs to recompute: `none`, `activations`, or `norms` (both)."""
    adapters: str
    """Forward of adapted layers: `cuda`, `reference`, `peft`, `rounded` (training.qat), or `none`."""
    adapters_reason: str
    separate_projections: bool
    """Whether shared-input projections are computed one by one."""
    run_dummy_forward: Callable[[Any], object]
    shards: LayerShards | None = None
    mlp_tile: int = 0
    """Tokens per tile of gated MLPs; 0 for no tiles."""


def install_on_base_model(model: Any, plan: PatchPlan) -> list[str]:
    copy_heads_without_flash(plan.device, plan.dtype)
    if plan.shares_sequences:
        enable_varlen(model)  # on any device: the settings and the model were checked before
    elif plan.varlen:
        use_varlen_if_supported(model, plan.device, plan.dtype)
    use_flash_in_towers(model, plan.device, plan.dtype)
    if not plan.own_elementwise:
        return [f"{', '.join(PARTS.values())}: not replaced ({plan.elementwise_reason})"]
    load_operators(plan.backend)
    return replace_elementwise(model, frozen_norms=plan.has_adapter, recompute=plan.recomputed).format_summary()


def install_on_adapted_model(model: Any, plan: PatchPlan) -> list[str]:
    lines = install_mamba_projections(model) if plan.has_adapter else []
    if plan.shards is not None:
        plan.shards.attach(model)
    lines += _install_experts(model, plan) + _install_adapters(model, plan)
    if plan.recomputed != "none":
        count = plan.training.gradient_checkpointing_layers or 0
        install_input_recomputation(model, list(find_decoder_layers(model)[1])[:count])
    if tile := plan.mlp_tile:
        lines.append(f"gated MLPs: {tile_feed_forward(model, tile)} in tiles of {tile:,} tokens")
    if line := enable_recomputation(model, plan.training):
        lines.append(line)
    return lines


def install_on_engine(
    engine: Engine, max_grad_norm: float, *, clips_on_device: bool, max_grad_norms: Sequence[float] = ()
) -> AdapterGuard | None:
    """Patch DeepSpeed's engine; with `max_grad_norms` per adapter, return the guard that applies them."""
    install_workarounds(engine)
    if max_grad_norms:
        return AdapterGuard(engine, max_grad_norms)
    if clips_on_device:
        UpdateGuard(engine, max_grad_norm)
    return None


def load_operators(backend: Literal["auto", "cuda", "reference", "peft"]) -> None:
    """Load the operators for ops.backend, building them if necessary. Raises UserError if that fails."""
    import ops

    try:
        with phase("build operators"):
            ops.load_backend(backend if backend != "peft" else "auto")
    except ValueError as error:
        raise UserError(str(error)) from None


def _install_experts(model: Any, plan: PatchPlan) -> list[str]:
    if not plan.has_adapter or not find_expert_modules(model):
        return []
    from trainer.patches.fused_experts import install_expert_forwards  # imports peft, and with it bitsandbytes

    on_gpu = plan.device.type == "cuda"
    if on_gpu:
        load_operators(plan.backend)
    return install_expert_forwards(model, on_gpu=on_gpu)


def _install_adapters(model: Any, plan: PatchPlan) -> list[str]:
    if plan.adapters == "none":
        return []
    if plan.adapters == "rounded":
        from trainer.patches.fake_quantized_lora import install_fake_quantization  # imports peft

        assert plan.training.qat is not None
        return install_fake_quantization(model, plan.training.qat, plan.dtype)
    if plan.adapters == "peft":
        return [f"adapters: PEFT's own forward ({plan.adapters_reason})"]
    from trainer.patches.fused_lora import fuse_layers  # imports bitsandbytes and the operators

    assert plan.backend != "peft"
    options: dict[str, Any] = {
        "forward": lambda: plan.run_dummy_forward(model),
        "separate": plan.separate_projections,
        "tokens": plan.rank_tokens,
    }
    try:
        if (choice := find_choice(model)) is not None:
            from trainer.patches.many_adapters import fuse_adapters

            return fuse_adapters(model, choice, plan.backend, **options).format_summary()
        report = fuse_layers(model, plan.backend, **options)
    except ValueError as error:
        raise UserError(str(error)) from None
    return report.format_summary()
