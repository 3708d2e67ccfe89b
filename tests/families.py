"""A tiny configuration of every family of causal language models in transformers that can be made this small."""

from pathlib import Path
from typing import Any

from tests.multimodal import MULTIMODAL, TEXT, VISION

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2, "head_dim": 16, "sliding_window": 16, "attention_chunk_size": 128, "kv_channels": 16,
    # Experts, as each family calls them.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "top_k_experts": 2, "moe_k": 2, "num_experts_per_token": 2, "moe_top_k": 2,
    "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32, "zero_expert_num": 1, "n_shared_experts": 1,
    "moe_num_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
    "num_hash_layers": 1,
    # Latent attention and its indexers.
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16,
    "v_head_dim": 16, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4,
    # Recurrent layers.
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_state": 8, "mamba_dt_rank": 8, "state_size": 8, "ssm_state_size": 16, "n_mamba_heads": 2,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
    "n_groups": 1, "mamba_chunk_size": 32, "chunk_size": 32, "mamba_d_ssm": 128, "attn_layer_period": 2,
    "attn_layer_offset": 1, "lru_width": 64, "attention_hidden_size": 64,
    # Names of the sizes above in older configurations.
    "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256, "n_inner": 128, "rotary_dim": 8, "d_model": 64,
    "n_heads": 4, "n_layers": 4, "max_seq_len": 256, "d_ff": 128, "ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_ffn_dim": 128, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "word_embed_proj_dim": 64, "context_length": 256, "hidden_dim": 64,
    "ffn_hidden_size": 128, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384,
    "num_kv_shared_layers": 2, "laurel_rank": 8,
}  # fmt: skip
START: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }},
}  # fmt: skip
"""What a family's usual configuration cannot be made without."""
PARTS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma4_assistant": START["gemma4_assistant"],
    "granite4_vision": {
        "text_config": TEXT | {"model_type": "granite4_vision_text"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "hidden_size": 64},
        "qformer_config": VISION | {"model_type": "blip_2_qformer", "hidden_size": 64, "encoder_hidden_size": 64},
    },
}  # fmt: skip
NO_DROPOUT = (
    "hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "activation_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "residual_dropout",
    "embedding_dropout",
)  # fmt: skip
SLIDING = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
            for name in ("sliding_attention", "full_attention")
        },
    },
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "blt_local_decoder": {"hidden_size_global": 64, "hidden_size": 64},
    "blt_local_encoder": {"hidden_size_global": 64, "hidden_size": 64},
    "blt_patcher": {"max_position_embeddings": 256},
    "chameleon": {"vocabulary_map": {"<image>": 380, "IMGIMGAZ": 381}},
    "cwm": {"bos_token_id": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    },
    "falcon": {"head_dim": None},
    "dots3_note_text": {"per_layer_config": {layer: SLIDING for layer in (1, 3)}},
    "dots3_note_audio_encoder": {"adapter_input_size": 32},
    "dots3_note_vision_encoder": {"per_layer_config": {}, "adapter_in_dim": 32},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 381, "<image>": 380}},
    "gemma3n_text": {"activation_sparsity_pattern": None, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0},
    "gemma4_assistant": {"backbone_hidden_size": 64},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 1]],
        "spatial_target_layers": [0, 1, 2, 3],
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "janus_vision_model": {"projection_dim": 64},
    "janus_vqgan": {"projection_dim": 64, "image_token_embed_dim": 64, "num_embeddings": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "expand": 2},
    "modernbert-decoder": {"bos_token_id": 1},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark": {"projector_hidden_size": 64, "out_hidden_size": 64},
    "muse_spark_vision": {"out_hidden_size": 64},
    "muse_spark_audio": {
        "patch_sizes": [16, 6],
        "hidden_sizes": [32, 32],
        "depths": [1, 1],
        "num_hidden_layers": 2,
        "out_hidden_size": 64,
    },
    "muse_glimmer": {"projector_hidden_size": 64, "out_hidden_size": 64},
    "nemotron_h_omni": {"projector_hidden_size": 64, "vision_hidden_size": 32},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "radio": {"video_temporal_patch_size": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 381, "audio_start_token_id": 382},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 381, "audio_start_token_id": 382},
    "reformer": {"axial_pos_embds": False},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"head_dim": None, "v_head_dim": None, "qk_head_dim": None},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # None leaves a setting as it is
WITH_MROPE = (
    "glm4v",
    "glm46v",
    "glm_ocr",
    "glmga",
    "hunyuan_vl",
    "paddleocr_vl",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_omni",
)
"""Families without M-RoPE sections in their configuration; the code's default sections fit heads of 128."""
FAMILIES = (
    "afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert biogpt bitnet bloom codegen cohere "
    "cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 ernie4_5 "
    "ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text gemma3n_text "
    "glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe "
    "granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 inkling_text jamba jetmoe "
    "kimi_linear laguna lfm2 lfm2_moe llama llama4_text longcat_flash mamba mamba2 mimo_v2_flash minicpm3 minimax "
    "minimax_m2 ministral mistral mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 "
    "olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe "
    "qwen3_next recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlm xlnet "
    "xlstm youtu zamba zamba2 zaya"
).split()


TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14, "depth": 2, "num_heads": 2,
    "embed_dim": 32, "embedding_dim": 32, "mlp_dim": 48, "mlp_hidden_size": 48, "out_hidden_size": 64, "d_model": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "vision_output_dim": 32, "output_dim": 64,
    "projector_input_dim": 32, "projector_output_dim": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "num_layers": 2, "num_blocks": 2, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
    "pooling_kernel_size": 1, "vocab_size": 384, "conf_hidden_size": 32, "base_channels": 32,
    "text_hidden_size": 64, "adapter_out_dim": 64,
}  # fmt: skip
"""Sizes of what sees images or hears sounds."""


def all_kinds() -> list[str]:
    """Return the model types of all text and image-text models of transformers that predict tokens."""
    from transformers.models.auto import modeling_auto as auto

    return sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return a configuration of some hundred thousand parameters with every kind of layer of the family."""
    from transformers import CONFIG_MAPPING

    usual = CONFIG_MAPPING[kind](**START.get(kind, {}))
    parts = (
        PARTS.get(kind)
        or MULTIMODAL.get(kind)
        or {name: _part_settings(name, part) for name in usual.sub_configs if (part := getattr(usual, name, None))}
    )
    tokens = {name: 380 for name in vars(usual) if parts and name.endswith(("_token_id", "_token_index"))}
    return CONFIG_MAPPING[kind](**_text_settings(kind, usual) | tokens | parts | changes)


def _part_settings(name: str, part: Any) -> dict[str, Any]:
    is_text = name in ("text_config", "vlm_config", "global_config", "decoder_config", "decoder") and part.model_type
    kept = {each: _part_settings(each, inner) for each in part.sub_configs if (inner := getattr(part, each, None))}
    if is_text:
        return {"model_type": part.model_type} | _text_settings(part.model_type, part) | kept
    return {"model_type": part.model_type} | _fit(TOWER, part) | OWN.get(part.model_type, {}) | kept


def _fit(sizes: dict[str, Any], usual: Any) -> dict[str, Any]:
    """Return the sizes that a configuration has; as a list where it has a list."""
    if hasattr(type(usual), "allow_global_per_layer_attribute_access"):
        usual.allow_global_per_layer_attribute_access = True
    found: dict[str, Any] = {}
    for name, size in sizes.items():
        if hasattr(usual, name):
            now = getattr(usual, name)
            is_list = isinstance(now, list | tuple) and not isinstance(size, list)
            by_layer = is_list and len(now) == getattr(usual, "num_hidden_layers", None)
            count = sizes["num_hidden_layers"] if by_layer else len(now) if is_list else 0
            found[name] = [size] * count if is_list else size
    return found


def _text_settings(kind: str, usual: Any) -> dict[str, Any]:
    settings = _fit(SIZES, usual)
    settings |= {name: 0.0 for name in NO_DROPOUT if hasattr(usual, name)}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(vars(usual).get(name), list):
            settings[name] = (list(dict.fromkeys(getattr(usual, name))) * 4)[:4]
    if "qk_rope_head_dim" in settings:
        settings |= {"num_key_value_heads": 4, "head_dim": 8}
    if kind in ("glm_moe_dsa", "deepseek_v32", "axk2", "glm4_moe_lite", "mistral4"):
        del settings["head_dim"]
    if hasattr(usual, "is_decoder"):
        settings["is_decoder"] = True
    own = OWN.get(kind, {})
    settings = {name: value for name, value in settings.items() if own.get(name, value) is not None} | {
        name: value for name, value in own.items() if value is not None
    }
    if "activation_sparsity_pattern" in own:
        settings["activation_sparsity_pattern"] = None
    rope = getattr(usual, "rope_parameters", None) or {}
    if "mrope_section" in rope or kind.startswith(WITH_MROPE):
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4} | rope
        settings["rope_parameters"] |= {"mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    return settings


def tiny_family(kind: str, **changes: Any) -> Any:
    """Return a random model of the family in 32 bits."""
    import torch

    from trainer.model.model_kind import get_auto_class

    torch.manual_seed(0)
    config = tiny_config(kind, **changes)
    model = get_auto_class(config).from_config(config, dtype=torch.float32)
    if kind == "gemma3n_text":  # It divides by the length of a row; published models have no zeros for padding.
        torch.nn.init.normal_(model.get_input_embeddings().weight[config.pad_token_id].detach(), std=0.02)
    return model


def save_family(folder: Path, kind: str, **changes: Any) -> Path:
    """Save such a model with the tests' tokenizer."""
    from tests.tiny import make_tokenizer

    tiny_family(kind, **changes).save_pretrained(folder)
    make_tokenizer(folder)
    return folder
