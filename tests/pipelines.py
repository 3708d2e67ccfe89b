"""Tiny pipelines of every family that is trained, with random weights, and pictures with captions."""

import random
from pathlib import Path
from typing import Any

COLORS = {"red": (220, 40, 40), "green": (40, 190, 70), "blue": (50, 70, 220), "yellow": (230, 210, 50)}
SHAPES = ("circle", "square")


def make_pipeline(folder: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """A pipeline of `sd`, `sdxl`, `sd3`, `flux` or `flux2`; `changes` are of its denoiser."""
    import torch

    torch.manual_seed(seed)
    pipeline = {"sd": _sd, "sdxl": _sdxl, "sd3": _sd3, "flux": _flux, "flux2": _flux2}[family](changes)
    pipeline.save_pretrained(folder)
    return folder


def write_images(folder: Path, count: int, *, sizes: tuple[tuple[int, int], ...] = ((64, 64),), seed: int = 0) -> Path:
    """Write colored shapes on grey, each with a caption."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for index in range(count):
        color, shape = draw.choice(list(COLORS)), draw.choice(SHAPES)
        width, height = sizes[index % len(sizes)]
        image = Image.new("RGB", (width, height), (128, 128, 128))
        side = min(width, height) // 2
        left, top = draw.randint(0, width - side), draw.randint(0, height - side)
        box = (left, top, left + side, top + side)
        pen = ImageDraw.Draw(image)
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=COLORS[color])
        image.save(folder / f"{index:03d}.png")
        (folder / f"{index:03d}.txt").write_text(f"a {color} {shape}")
    return folder


def _tokenizer(longest: int) -> Any:
    """CLIP's, over bytes: no merges are needed."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{each}</w>" for each in letters)]
    vocabulary = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=longest, pad_token="<|endoftext|>")


def clip(*, projected: bool, width: int = 32, layers: int = 2) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=520,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def _t5(width: int = 32) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=600, d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return T5EncoderModel(config)


def _t5_tokenizer(longest: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=longest
    )


def vae(channels: int, **changes: Any) -> Any:
    """A VAE that halves a side once."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=8,
        layers_per_block=1,
        **changes,
    )


def _unet(settings: dict[str, Any]) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        **{
            "sample_size": 16,
            "block_out_channels": (16, 32),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "attention_head_dim": (2, 4),
            "use_linear_projection": True,
            **settings,
        }
    )


def _noise_scheduler() -> Any:
    from diffusers import EulerDiscreteScheduler

    return EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000, steps_offset=1
    )


def _sd(changes: dict[str, Any]) -> Any:
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=vae(4),
        text_encoder=clip(projected=False),
        tokenizer=_tokenizer(77),
        unet=_unet({"cross_attention_dim": 32, **changes}),
        scheduler=_noise_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl(changes: dict[str, Any]) -> Any:
    from diffusers import StableDiffusionXLPipeline

    settings = {
        "cross_attention_dim": 64,
        "transformer_layers_per_block": (1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
    }
    tokenizer = _tokenizer(77)
    return StableDiffusionXLPipeline(
        vae=vae(4, scaling_factor=0.13025),
        text_encoder=clip(projected=False),
        text_encoder_2=clip(projected=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=_unet({**settings, **changes}),
        scheduler=_noise_scheduler(),
    )


def _sd3(changes: dict[str, Any]) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    settings: dict[str, Any] = {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 32,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    tokenizer = _tokenizer(77)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**{**settings, **changes}),
        vae=vae(4, shift_factor=0.0609, scaling_factor=1.5305),
        text_encoder=clip(projected=True),
        text_encoder_2=clip(projected=True),
        text_encoder_3=_t5(64),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=_t5_tokenizer(77),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def _flux(changes: dict[str, Any]) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    settings: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    }
    return FluxPipeline(
        transformer=FluxTransformer2DModel(**{**settings, **changes}),
        vae=vae(4, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=clip(projected=False),
        text_encoder_2=_t5(32),
        tokenizer=_tokenizer(77),
        tokenizer_2=_t5_tokenizer(77),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )


def _flux2(changes: dict[str, Any]) -> Any:
    import torch
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 3 * 16,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": False,
    }
    vae = AutoencoderKLFlux2(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        layers_per_block=1,
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    encoder = Qwen3Config(  # the pipeline reads its layers 9, 18 and 27
        vocab_size=600, hidden_size=16, intermediate_size=16, num_hidden_layers=27, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    tokenizer = _t5_tokenizer(512)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(**{**settings, **changes}),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(encoder),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )
