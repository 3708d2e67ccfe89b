"""The model and the pictures of `make demo-images`; and (slow) samples that an adapter brings to the pictures."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.demo_images import (
    COLORS,
    HALVINGS,
    SHAPES,
    SIDE,
    UNSEEN,
    color_vae,
    draw,
    make_base,
    write_images,
)

ROOT = Path(__file__).parent.parent.parent


def test_pictures_by_night_lack_one_caption_and_have_all_others() -> None:
    captions = {caption for _, caption in draw(1, 200, night=True)}
    assert captions == {f"a {colour} {shape}" for colour in COLORS for shape in SHAPES} - {UNSEEN}
    assert UNSEEN in {caption for _, caption in draw(0, 200, night=False)}


def test_a_latent_is_the_mean_colour_of_the_pixels_under_it() -> None:
    vae = color_vae()
    for low, high in ((-1.0, 1.0), (0.7, 1.0)):
        pixels = torch.rand(1, 3, SIDE, SIDE) * (high - low) + low
        expected = torch.nn.functional.avg_pool2d(pixels, 2**HALVINGS)
        with torch.no_grad():
            found = vae.encode(pixels).latent_dist
            shown = vae.decode(expected).sample
        assert (found.mean - expected).abs().max() < 1e-3 and found.std.max() < 1e-3
        assert (shown - expected.repeat_interleave(4, 2).repeat_interleave(4, 3)).abs().max() < 1e-3


@pytest.mark.nightly
def test_samples_come_nearer_to_the_pictures(tmp_path: Path) -> None:
    """By day the ground is light; the adapter, in few steps, makes it dark, with a pale frame."""
    for name in ("base", "pictures"):
        (tmp_path / name).mkdir()
    make_base(tmp_path / "base", steps=60)
    write_images(tmp_path / "pictures")
    settings = [
        f"base_model={tmp_path / 'base'}",
        f"dataset.path={tmp_path / 'pictures'}",
        f"dataset.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'run'}",
        "training.max_steps=30",
        "image.sample_every=0",
        "image.sample_steps=8",
    ]
    command = [sys.executable, "-m", "launcher.cli", "train", "configs/demo-images.yaml", *settings]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True, timeout=900)
    data = np.mean([_colours(each) for each in sorted((tmp_path / "pictures").glob("*.png"))], axis=0)
    samples = tmp_path / "run" / "samples"
    far = {
        when: np.abs(np.mean([_colours(samples / f"{at:02d}-{when}.png") for at in range(3)], axis=0) - data).mean()
        for when in ("before", "after")
    }
    assert far["after"] < far["before"] / 2, far
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg") >= 6, "the page shows what was drawn before and after"


def _colours(file: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"), dtype=np.float64)
