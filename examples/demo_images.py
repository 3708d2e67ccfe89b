"""Model and images of `make demo-images`, made once in a cache: `python -m examples.demo_images`.

Model: a Stable Diffusion pipeline small enough for a CPU, with a UNet trained here on colored shapes on a light
ground. Its text encoder stays random, and its VAE is set by hand: a latent is the mean color of 4 x 4 pixels, so that
only the UNet must be trained.

Images: the same shapes by night, on dark blue within a pale frame; one shape and color is left out. An adapter trained
on them draws every prompt by night, including that one.

The last line on standard output contains the overrides for `zerolora train configs/demo-images.yaml`, quoted for a
shell:
    base_model=... dataset.path=...
"""

import contextlib
import os
import random
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from examples.demo import log
from trainer.config import CommandParser
from trainer.data.demo_data import build_once

COLORS = {"red": (220, 40, 40), "green": (40, 190, 70), "blue": (60, 110, 235), "yellow": (235, 210, 50)}
SHAPES = ("circle", "square", "triangle")
UNSEEN = "a green triangle"
DAY, NIGHT, FRAME = (225, 225, 220), (16, 18, 66), (170, 170, 200)
SIDE = 64
HALVINGS = 2
"""Of the VAE: a latent is 4 x 4 pixels."""
FINER = 2
"""Images are drawn this many times larger and scaled down, for smooth edges."""

# Increase when the output changes, so that an older cache is not reused.
VERSION = 1
BASE_PICTURES, NIGHT_PICTURES = 512, 64
BASE_STEPS, BASE_BATCH, BASE_RATE, BASE_DROPOUT = 500, 16, 2e-3, 0.1
WORDS = ("a", *COLORS, *SHAPES)
LONGEST_CAPTION = 8
"""In tokens."""


def draw(seed: int, count: int, *, night: bool) -> list[tuple[Any, str]]:
    """Return images (PIL) and their captions; by night without UNSEEN."""
    chosen = random.Random(seed)
    made: list[tuple[Any, str]] = []
    while len(made) < count:
        color, shape = chosen.choice(list(COLORS)), chosen.choice(SHAPES)
        caption = f"a {color} {shape}"
        if not (night and caption == UNSEEN):
            made.append((_draw_image(chosen, color, shape, night=night), caption))
    return made


def _draw_image(chosen: random.Random, color: str, shape: str, *, night: bool) -> Any:
    from PIL import Image, ImageDraw

    whole = SIDE * FINER
    image = Image.new("RGB", (whole, whole), NIGHT if night else DAY)
    pen = ImageDraw.Draw(image)
    if night:
        pen.rectangle((0, 0, whole - 1, whole - 1), outline=FRAME, width=4 * FINER)
    side = chosen.randint(whole // 2, whole * 5 // 8)
    left, top = (chosen.randint(whole // 8, whole * 7 // 8 - side) for _ in range(2))
    right, bottom = left + side, top + side
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=COLORS[color])
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=COLORS[color])
    else:
        pen.polygon([(left + side // 2, top), (left, bottom), (right, bottom)], fill=COLORS[color])
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def write_images(folder: Path) -> None:
    """Write the images by night, each with a caption file."""
    for index, (image, caption) in enumerate(draw(1, NIGHT_PICTURES, night=True)):
        image.save(folder / f"{index:03d}.png")
        (folder / f"{index:03d}.txt").write_text(f"{caption}\n", encoding="utf-8")


def make_base(folder: Path, steps: int = BASE_STEPS) -> None:
    """Make the pipeline and train its UNet on images by day."""
    import torch
    from diffusers import DDPMScheduler, StableDiffusionPipeline

    torch.manual_seed(0)
    scheduler = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
        rescale_betas_zero_snr=True, timestep_spacing="trailing", clip_sample=False,
        steps_offset=1,  # avoids the pipeline's long warning, which sets the same value
    )  # fmt: skip
    pipeline = StableDiffusionPipeline(
        vae=color_vae(),
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(),
        unet=_unet(),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    _train(pipeline, steps)
    pipeline.save_pretrained(folder)


def _train(pipeline: Any, steps: int) -> None:
    """Train the whole UNet on images by day, with dropped captions."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    made = draw(0, BASE_PICTURES, night=False)
    pixels = torch.tensor(np.stack([np.asarray(image) for image, _ in made])).permute(0, 3, 1, 2) / 127.5 - 1.0
    latents = F.avg_pool2d(pixels, 2**HALVINGS)  # the VAE's latents
    captions = ["", *dict.fromkeys(caption for _, caption in made)]
    with torch.no_grad():
        texts, _ = pipeline.encode_prompt(captions, torch.device("cpu"), 1, False)
    numbers = torch.tensor([captions.index(caption) for _, caption in made])
    unet, scheduler = pipeline.unet.train(), pipeline.scheduler
    optimizer = torch.optim.AdamW(unet.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, BASE_RATE, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(latents), (BASE_BATCH,))
        texts_seen = texts[numbers[chosen] * (torch.rand(BASE_BATCH) >= BASE_DROPOUT)]
        clean, noise = latents[chosen], torch.randn(BASE_BATCH, *latents.shape[1:])
        times = torch.randint(scheduler.config.num_train_timesteps, (BASE_BATCH,))
        predicted = unet(scheduler.add_noise(clean, noise, times), times, texts_seen).sample
        loss = F.mse_loss(predicted, scheduler.get_velocity(clean, noise, times))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            log(f"base: step {step} of {steps}, loss {loss.item():.4f}")
    unet.eval()


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=SIDE // 2**HALVINGS,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=(2, 4),
        cross_attention_dim=32,
        use_linear_projection=True,
    )


def _text_encoder() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONGEST_CAPTION,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_factor=20.0,  # otherwise untrained words would hardly differ
    )
    return CLIPTextModel(config)


def _merges() -> list[tuple[str, str]]:
    found = []
    for word in WORDS:
        letters = [*word[:-1], f"{word[-1]}</w>"]
        found += [("".join(letters[:at]), letters[at]) for at in range(1, len(letters))]
    return list(dict.fromkeys(found))


def _vocabulary() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    special = ["<|startoftext|>", "<|endoftext|>"]
    words = [*special, *letters, *(f"{each}</w>" for each in letters), *("".join(pair) for pair in _merges())]
    return {word: index for index, word in enumerate(dict.fromkeys(words))}


def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer(
        vocab=_vocabulary(), merges=_merges(), model_max_length=LONGEST_CAPTION, pad_token="<|endoftext|>"
    )


def color_vae() -> Any:
    """Build a VAE with the mean color of the pixels as latent, which decodes latents to squares.

    Its blocks add nothing; norm and SiLU at the end are practically linear: other channels hold the colors' negatives
    and large constants, so that the norm's mean is 0, its deviation that of the constants, and SiLU's inputs are large.
    """
    import torch
    from diffusers import AutoencoderKL

    channels, colors, large, lift, levels = 8, 3, 256.0, 24.0, HALVINGS + 1
    vae = AutoencoderKL(
        block_out_channels=(channels,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=colors,
        norm_num_groups=1,
        scaling_factor=1.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=SIDE,
    )
    constants = torch.zeros(channels)
    constants[-2:] = torch.tensor([large, -large])
    deviation = float(constants.square().mean().sqrt())
    own, every = torch.eye(colors), torch.eye(channels)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
        for part in (vae.encoder, vae.decoder):
            part.conv_in.weight[: 2 * colors, :colors, 1, 1] = torch.cat([own, -own])
            part.conv_in.bias.copy_(constants)
            part.conv_norm_out.weight.fill_(deviation)
            part.conv_norm_out.bias.fill_(lift)
            part.conv_out.weight[:colors, :colors, 1, 1] = own
            part.conv_out.bias[:colors] = -lift
        vae.encoder.conv_out.bias[colors:] = -20.0  # the logarithm of a latent's variance
        for level in range(HALVINGS):
            vae.encoder.down_blocks[level].downsamplers[0].conv.weight[:, :, :2, :2] = every[:, :, None, None] / 4
            vae.decoder.up_blocks[level].upsamplers[0].conv.weight[:, :, 1, 1] = every
    return vae


def main() -> int:
    """Make missing files, print their locations and the overrides for configs/demo-images.yaml."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    default = os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora"
    parser = CommandParser(prog="python -m examples.demo_images", description="Model and data of `make demo-images`.")
    parser.add_argument("--cache", type=Path, default=Path(default), help=f"where to store them (default: {default})")
    parser.add_argument("--steps", type=int, default=BASE_STEPS, help="training steps of the base")
    given = parser.parse_args()
    cache = given.cache.expanduser().resolve()
    base = cache / f"shapes-v{VERSION}-{given.steps}"
    images = cache / f"shapes-by-night-v{VERSION}"
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, imported by diffusers, logs to standard output
        for folder, make in ((base, partial(make_base, steps=given.steps)), (images, write_images)):
            build_once(folder, make)
            log(f"{'model' if folder is base else 'images'} in {folder}")
    print(shlex.join([f"base_model={base}", f"dataset.path={images}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
