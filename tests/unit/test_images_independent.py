"""What tests/plain_diffusers.py takes from our own batches, next to diffusers' own code: sizes, times, noise levels."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusionXLPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling
from PIL import Image

from tests.pipelines import make_pipeline
from trainer.config import ImageSection, ModelSection, load_config
from trainer.setup.preflight import prepare
from trainer.tasks.images.batches import SIZES, build_seeded_generator, build_size_conditions, iterate_evaluation_images
from trainer.tasks.images.objective import Objective
from trainer.tasks.images.pipeline import read_pipeline
from trainer.tasks.images.sizes import fit_to_bucket

DRAWS = 200


def test_size_and_crop_are_those_of_sdxls_own_pipeline(tmp_path: Path) -> None:
    """Each pixel says where it was, so that what is kept says where the crop began."""
    make_pipeline(tmp_path / "sdxl", "sdxl")
    (tmp_path / "pictures").mkdir()
    for name, (width, height) in {"wide": (40, 28), "high": (28, 40)}.items():
        across, down = np.meshgrid(np.arange(width), np.arange(height))
        pixels = np.stack([across, down, 0 * down], axis=-1).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{name}.png")
    settings: dict[str, Any] = {
        "base_model": str(tmp_path / "sdxl"),
        "output_dir": str(tmp_path / "out"),
        "dataset": {"path": str(tmp_path / "pictures"), "cache_dir": str(tmp_path / "cache")},
        "image": {"resolution": 32, "bucket_step": 8, "caption": "a gradient"},
        "training": {"max_steps": 1, "precision": "fp32"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    samples = prepare(load_config(tmp_path / "run.yaml", []).config).data.train
    pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path / "sdxl")
    width_of_text = pipeline.text_encoder_2.config.projection_dim
    expected = []
    for entry in samples.entries:
        picture = Image.open(entry.name)
        seen: Any = fit_to_bucket(*picture.size, [(entry.width, entry.height)]).apply(picture)
        left, top, _ = seen.getpixel((0, 0))
        assert max(left, top) == 2, "nothing was cut off that could be reported wrongly"
        given = ((picture.height, picture.width), (top, left), (seen.height, seen.width))
        expected += pipeline._get_add_time_ids(*given, torch.float32, width_of_text)
        assert torch.equal(build_size_conditions(entry), expected[-1])
    [batch, *_] = iterate_evaluation_images(samples, batch_size=8, rank=0, world_size=1)
    found = torch.cat([group.conditions[SIZES] for group in batch.groups])
    assert torch.equal(found.unique(dim=0), torch.stack(expected).unique(dim=0))


@pytest.mark.parametrize(("shape", "mean", "std"), [("sd3.5-medium", 0.0, 1.0), ("flux-dev", 0.5, 1.5)])
def test_times_of_flow_matching_are_drawn_as_diffusers_draws_them(
    shape: str, mean: float, std: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same normal numbers, which here are those of our generators."""
    objective = Objective(
        read_pipeline(f"random:{shape}", ModelSection()), ImageSection(logit_mean=mean, logit_std=std)
    )
    ours = [objective.draw_timestep(build_seeded_generator(seed)) for seed in range(DRAWS)]
    drawn = [torch.randn((), generator=build_seeded_generator(seed), dtype=torch.float64) for seed in range(DRAWS)]
    monkeypatch.setattr(torch, "normal", lambda mean, std, size, **_: mean + std * torch.stack(drawn).view(size))
    expected = compute_density_for_timestep_sampling("logit_normal", DRAWS, logit_mean=mean, logit_std=std)
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), expected)


@pytest.mark.parametrize(("shape", "times"), [("sdxl", "auto"), ("flux-dev", "uniform")])
def test_uniform_times_are_drawn_as_diffusers_draws_them(
    shape: str, times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = Objective(read_pipeline(f"random:{shape}", ModelSection()), ImageSection(times=times))
    ours = [objective.draw_timestep(build_seeded_generator(seed)) for seed in range(DRAWS)]
    drawn = [torch.rand((), generator=build_seeded_generator(seed), dtype=torch.float64) for seed in range(DRAWS)]
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.stack(drawn).view(size))
    assert ours == compute_density_for_timestep_sampling("none", DRAWS).tolist()


def levels(objective: Objective, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of noise in the input of the model, and the time steps that it is given."""
    count = len(times)
    noised = objective.add_noise(torch.zeros(count, 1, 1, 1), torch.ones(count, 1, 1, 1), times)
    return noised.noisy.flatten(), noised.timesteps


@pytest.mark.parametrize("shape", ["sd3.5-medium", "sd3.5-large", "flux-dev", "flux2-klein-4b"])
def test_noise_and_times_are_those_at_diffusers_places_in_the_schedule(shape: str) -> None:
    """Its scripts count from the noisiest time, so that their draw u is our 1 - u; both densities are symmetric."""
    pipeline = read_pipeline(f"random:{shape}", ModelSection())
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler_settings)
    u = torch.rand(DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    indices = (u * scheduler.config.num_train_timesteps).long()
    level, times = levels(Objective(pipeline, ImageSection()), 1 - u)
    assert torch.equal(level, scheduler.sigmas[indices])
    assert torch.equal(times, scheduler.timesteps[indices])


def every_time(count: int = 1000) -> torch.Tensor:
    """The middle of each place in the schedule, and the noise level there without a shift."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize(("shape", "shift"), [("sd3.5-medium", 3.0), ("sd3.5-medium", 1.7), ("flux-dev", 1.15)])
def test_a_shift_is_the_schedulers_own(shape: str, shift: float) -> None:
    """By the table of one made with it, and by the function that it shifts samples with."""
    pipeline = read_pipeline(f"random:{shape}", ModelSection())
    level, times = levels(Objective(pipeline, ImageSection(time_shift=shift)), every_time())
    made = FlowMatchEulerDiscreteScheduler(shift=shift)
    assert torch.equal(level, made.sigmas.flip(0)) and torch.equal(times, made.timesteps.flip(0))
    linear = FlowMatchEulerDiscreteScheduler(time_shift_type="linear")
    torch.testing.assert_close(level.double(), linear.time_shift(shift, 1.0, every_time() + 0.5e-3))


def test_a_shift_for_flux_by_its_resolution_is_what_its_pipeline_samples_with() -> None:
    """`calculate_shift` gives the logarithm of it: 3.16 for the 4,096 latents of 1,024 x 1,024 pixels."""
    pipeline = read_pipeline("random:flux-dev", ModelSection())
    mu = calculate_shift(4096)
    level, _ = levels(Objective(pipeline, ImageSection(time_shift=math.exp(mu))), every_time())
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler_settings)
    torch.testing.assert_close(level.double(), scheduler.time_shift(mu, 1.0, every_time() + 0.5e-3))
    assert math.exp(mu) == pytest.approx(3.16, abs=0.01)


def test_flux_is_not_shifted_unasked() -> None:
    """diffusers shifts by resolution where it samples, not where it trains."""
    level, _ = levels(Objective(read_pipeline("random:flux-dev", ModelSection()), ImageSection()), every_time())
    torch.testing.assert_close(level.double(), every_time() + 0.5e-3)
