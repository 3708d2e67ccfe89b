"""Tiny random models of text and images, as their checkpoints are saved."""

from pathlib import Path
from typing import Any

from tests.tiny import make_tokenizer

TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
QWEN_IDS = {"image_token_id": 380, "video_token_id": 379, "vision_start_token_id": 381, "vision_end_token_id": 382}
IDS = {"image_token_index": 380, "boi_token_index": 381, "eoi_token_index": 382}
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        **IDS,
    },
    "gemma4": {
        "text_config": TEXT
        | {
            "sliding_window": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 384,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 16,
        },
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 1},
        "audio_config": None,
        "image_token_id": 380,
        "boi_token_id": 381,
        "eoi_token_id": 382,
        "video_token_id": 379,
        "audio_token_id": 378,
        "boa_token_id": 377,
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": TEXT | DELTA | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        "vision_config": QWEN_VISION,
        **QWEN_IDS,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
        "image_token_index": 380,
        "spatial_merge_size": 1,
    },
    "llama4": {
        "text_config": TEXT
        | {
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 128,
        },
        "vision_config": VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        **IDS,
    },
}


def make_multimodal(folder: Path, name: str) -> Path:
    """A random model of `MULTIMODAL` with its tokenizer, in the class that its checkpoints name."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    torch.manual_seed(0)
    AutoModelForMultimodalLM.from_config(AutoConfig.for_model(name, **MULTIMODAL[name])).save_pretrained(folder)
    make_tokenizer(folder)
    return folder
