"""Published shapes of denoisers, for `base_model: random:SHAPE`: the real architecture with random weights.

Sources: the config.json of each model's unet or transformer, and of its scheduler and text encoders.
"""

from dataclasses import dataclass
from typing import Any

from trainer.config.yaml_core import plain

PREFIX = "random:"


@dataclass(frozen=True)
class Published:
    """The settings of a denoiser and its scheduler, and the shapes of its inputs."""

    family: str
    settings: dict[str, Any]
    scheduler: dict[str, Any]
    channels: int
    """Channels of the latents."""
    text: dict[str, tuple[int, ...]]
    """Shapes of a caption's conditions."""


_DDPM = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}
_UNET = {"in_channels": 4, "out_channels": 4, "layers_per_block": 2}
_SD3 = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
}
_SD3_TEXT = {"text": (333, 4096), "pooled": (2048,)}

SHAPES: dict[str, Published] = {
    "sd1.5": Published(
        "sd",
        _UNET
        | {
            "sample_size": 64,
            "block_out_channels": [320, 640, 1280, 1280],
            "cross_attention_dim": 768,
            "attention_head_dim": 8,
        },
        _DDPM,
        4,
        {"text": (77, 768)},
    ),
    "sdxl": Published(
        "sdxl",
        _UNET
        | {
            "sample_size": 128,
            "block_out_channels": [320, 640, 1280],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "transformer_layers_per_block": [1, 2, 10],
            "attention_head_dim": [5, 10, 20],
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        _DDPM,
        4,
        {"text": (77, 2048), "pooled": (1280,)},
    ),
    "sd3.5-medium": Published(
        "sd3",
        _SD3
        | {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)),
        },
        {"num_train_timesteps": 1000, "shift": 3.0},
        16,
        _SD3_TEXT,
    ),
    "sd3.5-large": Published(
        "sd3",
        _SD3
        | {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
        },
        {"num_train_timesteps": 1000, "shift": 3.0},
        16,
        _SD3_TEXT,
    ),
    "flux-dev": Published(
        "flux",
        {
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 19,
            "num_single_layers": 38,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": [16, 56, 56],
        },
        {
            "num_train_timesteps": 1000,
            "shift": 3.0,
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 1.15,
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
        },
        16,
        {"text": (512, 4096), "pooled": (768,)},
    ),
    "flux2-klein-4b": Published(
        "flux2",
        {
            "patch_size": 1,
            "in_channels": 128,
            "num_layers": 5,
            "num_single_layers": 20,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "timestep_guidance_channels": 256,
            "mlp_ratio": 3.0,
            "axes_dims_rope": [32, 32, 32, 32],
            "rope_theta": 2000,
            "guidance_embeds": False,
        },
        {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": True},
        128,
        {"text": (512, 7680)},
    ),
}


def published_shape(base_model: str) -> tuple[Published, dict[str, Any]] | None:
    """Return the shape named by `random:SHAPE,key=value,...` and its changed settings, or None for another name."""
    if not base_model.startswith(PREFIX):
        return None
    name, *changes = base_model.removeprefix(PREFIX).split(",")
    if name not in SHAPES:
        return None
    values = dict(change.partition("=")[::2] for change in changes)
    return SHAPES[name], SHAPES[name].settings | {key: plain(value) for key, value in values.items()}
