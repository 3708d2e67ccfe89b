"""Tiny random mixtures of experts, one of each way in which checkpoints store the experts and models compute them."""

from pathlib import Path
from typing import Any

SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 16, "shared_expert_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
# Families by how their checkpoints store experts.
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {},
    "olmoe": {},
    "deepseek_v3": GROUPS | LATENT,
    "glm4_moe": GROUPS,
    "phimoe": {},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "qwen3_next": LINEAR_ATTENTION,
    "qwen3_5_moe_text": LINEAR_ATTENTION,
}
FUSED: dict[str, dict[str, Any]] = {
    "granitemoe": {},
    "gpt_oss": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"interleave_moe_layer_step": 1, "head_dim": 16, "intermediate_size_mlp": 128},
}
MIXTURES = ONE_BY_ONE | FUSED


def make_mixture(folder: Path, name: str, *, seed: int = 0, **changes: Any) -> Path:
    """A random model of the family, saved as its published checkpoints are, without a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **(SMALL | EXPERTS | MIXTURES[name] | changes))
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)  # a bias that is zero would hide one that is left out
    model.save_pretrained(folder)
    return folder


def store_in_mxfp4(folder: Path) -> Path:
    """Store the experts of a model that was saved in full precision as gpt-oss's checkpoints have them."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, wide, out = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, wide // 32, 16), generator=draw, dtype=torch.uint8)
        stored[f"{name}_blocks"] = blocks
        stored[f"{name}_scales"] = torch.randint(118, 124, blocks.shape[:3], generator=draw, dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def store_dequantised(
    source: Path, target: Path, *, four_bit: bool, device: str = "cpu", precision: str = "float32"
) -> Path:
    """The model of `source` in 32 bits with the values that it is trained on, its own MXFP4's or, `four_bit`, NF4's.

    `device` quantizes, as training in `precision` does.
    """
    import torch
    from transformers import AutoConfig

    from tests.tiny import make_tokenizer
    from trainer.config import ModelSection, QuantizationSection
    from trainer.model.base import load_base_model
    from trainer.model.four_bit import FrozenLinear4bit, dequantize_weight
    from trainer.model.model_kind import get_auto_class
    from trainer.model.packed_experts import PackedExperts

    packed = load_base_model(
        str(source),
        ModelSection(),
        dtype=getattr(torch, precision),
        device=torch.device(device),
        attention="eager",
        quantization=QuantizationSection() if four_bit else None,
    )
    config = AutoConfig.from_pretrained(source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    whole = get_auto_class(config).from_config(config, dtype=torch.float32)
    buffers = dict(whole.named_buffers())
    with torch.no_grad():
        for path, module in packed.named_modules():
            for name, own in module.named_parameters(recurse=False):
                value: Any = own
                if isinstance(own, PackedExperts):
                    value = own.dequantize()
                elif isinstance(module, FrozenLinear4bit) and name == "weight":
                    value = dequantize_weight(own, module.quant_state, torch.float32)
                whole.get_submodule(path).get_parameter(name).copy_(value)
        for name, buffer in packed.named_buffers():
            if name in buffers:
                buffers[name].copy_(buffer)
    whole.save_pretrained(target)
    make_tokenizer(target)
    return target
