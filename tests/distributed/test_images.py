"""Image models of every family on two ranks: losses of plain diffusers and PEFT, an adapter that diffusers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.conftest import Matrix, environment, run_ranks
from tests.distributed.plan import case
from tests.pipelines import make_pipeline, write_images
from tests.plain_diffusers import plain_losses
from trainer.config import RunConfig, load_config

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

STEPS, RANKS, STAGES = 3, 2, (0, 1, 2, 3)
RELATIVE = 1e-6
MODULE = {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0}
SHOWN = {"image__flip": True, "image__caption_dropout": 0.5, "image__min_snr_gamma": 5.0}


DRAWS = {"sdxl": 2, "sd": 2, "sd3": 3, "flux": 2, "flux2": 2}
"""The stage at which each kind draws samples."""
SIZES: dict[str, Any] = {"attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
"""Rows of whole blocks of 64, which bitsandbytes' layers need on a CPU."""
RECOMPUTED = {"training__gradient_checkpointing": "non_reentrant"}
HOST = {"zero__stage": 3, "zero__offload_parameters": True, "zero__offload_optimizer": True}
PROMPTS = ["a red circle", "a blue square"]


def plan(folder: Path) -> list[dict[str, Any]]:
    drawn = {"logging__sample_prompts": PROMPTS[:1], "image__sample_steps": 2}
    flux, sd3 = {"base_model": str(folder / "flux")}, {"base_model": str(folder / "sd3")}
    wide = {"base_model": str(folder / "flux-wide"), "adapter": "qlora"}
    cases = [
        case(f"{kind}-{stage}", zero__stage=stage, base_model=str(folder / kind), **(drawn if draws == stage else {}))
        for kind, draws in DRAWS.items()
        for stage in STAGES
    ]
    cases += [case("sdxl-module", **MODULE)]
    cases += [case("sdxl-recomputed", **RECOMPUTED), case("flux-recomputed-3", zero__stage=3, **RECOMPUTED, **flux)]
    cases += [
        case("sdxl-activations", training__offload_activations=True, **RECOMPUTED),
        case("sd3-host", **HOST, **sd3),
    ]
    cases += [case(f"flux-nf4-{stage}", zero__stage=stage, **wide, **drawn) for stage in (2, 3)]
    sampled = drawn | {"logging__sample_prompts": PROMPTS, "image__sample_every": 1}
    cases += [case("sampled", logging__report_to="tensorboard", **sampled)]
    cases += [case("flux-fused", ops__backend="reference", **flux), case("sdxl-fused", ops__backend="reference")]
    cases += [case("with-class", image__prior={"path": str(folder / "class")}, image__prior_weight=0.5)]
    cases += [case("shown", **SHOWN)]
    cases += [case(f"mixed-{stage}", zero__stage=stage, training__batch_size=2) for stage in (2, 3)]
    cases += [case(f"flux-{kind}", adapter="qlora", quantization__quant_type=kind, **flux) for kind in ("int8", "fp8")]
    cases += [case("v-prediction", image__prediction="v_prediction", image__min_snr_gamma=5.0)]
    convolutions = {"lora__target_modules": ["to_q", "to_v", "conv1", "conv2"]}
    cases += [case(f"convolutions-{stage}", zero__stage=stage, **convolutions) for stage in (2, 3)]
    again = {"training__resume_from_checkpoint": "shown/checkpoint-2", "output_dir": "again", **SHOWN}
    return [*cases, case("again", **again)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("images")
    for family in DRAWS:
        make_pipeline(folder / family, family)
    make_pipeline(folder / "flux-wide", "flux", **SIZES)
    write_images(folder / "pictures", 10, sizes=((64, 64), (96, 64), (64, 96)))
    write_images(folder / "class", 3, seed=9)
    (folder / "base.yaml").write_text(yaml.safe_dump(base(folder)))
    cases = plan(folder)
    for each in cases:
        overrides = each["overrides"]
        if "output_dir" in overrides:
            overrides["output_dir"] = str(folder / overrides["output_dir"])
            overrides["training.resume_from_checkpoint"] = str(folder / "shown/checkpoint-2")
    (folder / "plan.json").write_text(json.dumps(cases))
    arguments, log = (str(folder), str(folder / "plan.json")), folder / "launch-2.log"
    run_ranks(RANKS, "tests.distributed.matrix", *arguments, env=environment(), log=log, timeout_s=840)
    return Matrix(folder, cases)


def base(folder: Path) -> dict[str, Any]:
    return {
        "base_model": str(folder / "sdxl"),
        "output_dir": "unset",
        "lora": {"r": 4, "alpha": 8},
        "dataset": {"path": str(folder / "pictures"), "val_split": 0.2, "cache_dir": str(folder / "cache")},
        "image": {"resolution": 32, "bucket_step": 8},
        "training": {
            "batch_size": 1,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "precision": "fp32",
            "save_steps": 2,
        },
        "logging": {"report_to": "none"},
    }


def plain(runs: Matrix, *overrides: str) -> tuple[list[float], Any]:
    config: RunConfig = load_config(runs["sdxl-0"].folder.parent / "base.yaml", overrides).config
    return plain_losses(config, ranks=RANKS)


@pytest.fixture(scope="module")
def plain_sdxl(runs: Matrix) -> tuple[list[float], Any]:
    return plain(runs)


@pytest.mark.parametrize(
    "name", [*(f"sdxl-{stage}" for stage in STAGES), "sdxl-module", "sdxl-recomputed", "sdxl-fused"]
)
def test_losses_of_sdxl_are_those_of_plain_diffusers(
    runs: Matrix, plain_sdxl: tuple[list[float], Any], name: str
) -> None:
    assert runs[name].losses == pytest.approx(plain_sdxl[0], rel=RELATIVE)
    assert len(set(runs[name].losses)) == STEPS


@pytest.mark.parametrize("family", ["sd", "sd3", "flux", "flux2"])
def test_losses_of_the_others_are_those_of_plain_diffusers(runs: Matrix, family: str) -> None:
    expected, _ = plain(runs, f"base_model={runs['sdxl-0'].folder.parent / family}")
    more = {"sd3": ["sd3-host"], "flux": ["flux-recomputed-3", "flux-fused"]}.get(family, [])
    for name in (*(f"{family}-{stage}" for stage in STAGES), *more):
        assert runs[name].losses == pytest.approx(expected, rel=RELATIVE), name


def test_losses_with_activations_or_weights_and_optimizer_on_the_host_are_those_without(runs: Matrix) -> None:
    assert runs["sdxl-activations"].losses == pytest.approx(runs["sdxl-recomputed"].losses, rel=RELATIVE)
    assert runs["sd3-host"].losses == pytest.approx(runs["sd3-3"].losses, rel=RELATIVE)


def test_ranks_with_images_of_several_sizes_wait_for_each_other(runs: Matrix) -> None:
    expected, _ = plain(runs, "training.batch_size=2")
    for name in ("mixed-2", "mixed-3"):
        assert runs[name].losses == pytest.approx(expected, rel=RELATIVE), name


def test_an_eight_bit_base_trains_nearly_as_the_whole_one(runs: Matrix) -> None:
    for name in ("flux-int8", "flux-fp8"):
        assert runs[name].losses != runs["flux-2"].losses
        assert runs[name].losses == pytest.approx(runs["flux-2"].losses, rel=0.02)


def test_velocity_and_convolutions_are_trained_as_plain_diffusers_and_peft_do(runs: Matrix) -> None:
    expected, _ = plain(runs, "image.prediction=v_prediction", "image.min_snr_gamma=5.0")
    assert runs["v-prediction"].losses == pytest.approx(expected, rel=RELATIVE)
    expected, _ = plain(runs, "lora.target_modules=[to_q, to_v, conv1, conv2]")
    for name in ("convolutions-2", "convolutions-3"):
        assert runs[name].losses == pytest.approx(expected, rel=RELATIVE)
    assert any(tensor.dim() == 4 for tensor in runs["convolutions-2"].adapter().values())


@pytest.mark.parametrize("stage", [2, 3])
def test_losses_on_a_four_bit_base_are_those_of_plain_diffusers_with_bitsandbytes(runs: Matrix, stage: int) -> None:
    wide = f"base_model={runs['sdxl-0'].folder.parent / 'flux-wide'}"
    expected, _ = plain(runs, wide, "adapter=qlora")
    whole, _ = plain(runs, wide)
    assert runs[f"flux-nf4-{stage}"].losses == pytest.approx(expected, rel=RELATIVE)
    assert expected != pytest.approx(whole, rel=100 * RELATIVE), "4 bits are too close to the whole base to distinguish"
    assert expected == pytest.approx(whole, rel=0.05)


def test_prior_preservation_adds_its_weighted_loss(runs: Matrix) -> None:
    source = json.dumps({"path": str(runs["with-class"].folder.parent / "class")})
    expected, _ = plain(runs, f"image.prior={source}", "image.prior_weight=0.5")
    assert runs["with-class"].losses == pytest.approx(expected, rel=RELATIVE)
    assert all(both > alone for both, alone in zip(runs["with-class"].losses, runs["sdxl-2"].losses, strict=True))


def test_min_snr_weighs_as_the_scripts_of_diffusers_do(runs: Matrix) -> None:
    settings = ("image.flip=true", "image.caption_dropout=0.5", "image.min_snr_gamma=5.0")
    expected, _ = plain(runs, *settings)
    assert runs["shown"].losses == pytest.approx(expected, rel=RELATIVE)


def test_a_run_is_resumed_to_the_bit(runs: Matrix) -> None:
    assert runs["again"].losses == runs["shown"].losses[2:]
    whole, again = runs["shown"].adapter(), runs["again"].adapter()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_held_out_loss_does_not_depend_on_the_seed_of_training_or_the_stage(runs: Matrix) -> None:
    first = [runs[name].records("eval/loss")[0] for name in ("sdxl-0", "sdxl-3", "shown")]
    assert first == pytest.approx([first[0]] * 3, rel=RELATIVE)
    assert runs["sdxl-0"].records("eval/loss")[-1] < first[0]


DRAWN = ["sdxl-2", "sd-2", "sd3-3", "flux-2", "flux2-2", "text-sdxl-3", "text-sd-2", "text-sd3-3", "text-flux-2"]


@pytest.mark.parametrize(("name", "family"), [(name, name.removeprefix("text-").partition("-")[0]) for name in DRAWN])
def test_diffusers_loads_the_adapter_and_draws_the_sample_of_the_run(runs: Matrix, name: str, family: str) -> None:
    from PIL import Image

    folder = runs[name].folder
    pipeline = _pipeline(folder.parent / family)
    without = _drawn(pipeline)
    pipeline.load_lora_weights(folder)
    image = _drawn(pipeline)
    ours = Image.open(folder / "samples" / "00-after.png")
    assert _farthest(image, ours) <= 1, "the adapter loaded by diffusers draws another image"
    assert _farthest(without, Image.open(folder / "samples" / "00-before.png")) <= 1
    assert _farthest(without, image) > 1, "the adapter changes nothing that could differ"


@pytest.mark.parametrize("name", ["text-sdxl-3", "text-sd-2", "flux2-2"])
def test_what_is_exported_for_kohya_draws_the_same(runs: Matrix, name: str, tmp_path: Path) -> None:
    from PIL import Image

    from trainer.checkpoint.finished_run import find_run
    from trainer.commands.adapter_kinds import KOHYA
    from trainer.commands.export.__main__ import export

    run = find_run(runs[name].folder)
    pipeline = _pipeline(Path(run.config.base_model))
    export(run, "kohya", tmp_path / "kohya")
    pipeline.load_lora_weights(tmp_path / "kohya", weight_name=KOHYA)
    assert _farthest(_drawn(pipeline), Image.open(run.folder / "samples" / "00-after.png")) <= 1


@pytest.mark.parametrize("name", ["text-sdxl-3", "sd3-3", "flux-2", "flux-nf4-2"])
def test_the_merged_pipeline_draws_what_pipeline_and_adapter_draw(runs: Matrix, name: str, tmp_path: Path) -> None:
    """After training on 4 bits the adapter is added to the whole weights."""
    from trainer.checkpoint.finished_run import find_run
    from trainer.commands.adapter_kinds import merge_image_adapter

    run = find_run(runs[name].folder)
    merge_image_adapter(run, tmp_path / "merged", dtype="auto", scale=1.0)
    merged = _drawn(_pipeline(tmp_path / "merged"))
    pipeline = _pipeline(Path(run.config.base_model))
    without = _drawn(pipeline)
    pipeline.load_lora_weights(run.folder)
    assert _farthest(merged, _drawn(pipeline)) <= 1
    assert _farthest(merged, without) > 1, "the adapter changes nothing that could differ"


def test_samples_of_a_run_are_files_events_of_tensorboard_and_on_its_page(runs: Matrix) -> None:
    import io

    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = runs["sampled"].folder
    whens = ["before", *(f"step-{step}" for step in range(1, STEPS)), "after"]
    files = {(at, when): folder / "samples" / f"{at:02d}-{when}.png" for at in range(len(PROMPTS)) for when in whens}
    assert set((folder / "samples").glob("*.png")) == set(files.values())
    reader = EventAccumulator(str(next((folder / "tensorboard").iterdir())), size_guidance={"images": 0})
    reader.Reload()
    assert sorted(reader.Tags()["images"]) == sorted(f"samples/{prompt}" for prompt in PROMPTS)
    page = (folder / "report.html").read_text()
    for at, prompt in enumerate(PROMPTS):
        events = reader.Images(f"samples/{prompt}")
        assert [event.step for event in events] == list(range(STEPS + 1))
        for when, event in zip(whens, events, strict=True):
            shown = Image.open(io.BytesIO(event.encoded_image_string))
            assert _farthest(shown, Image.open(files[at, when])) == 0, (prompt, when)
        row = page.split(f"<h2>{prompt}</h2>")[1].split("</section>")[0]
        assert [part.partition("<")[0] for part in row.split("<figcaption>")[1:]] == whens
        assert row.count('src="data:image/jpeg;base64,') == len(whens)
        drawn = [files[at, when].read_bytes() for when in whens]
        assert len(set(drawn[1:])) == STEPS and drawn[0] == drawn[1], "the first step warms up and learns nothing"


def _pipeline(folder: Path) -> Any:
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _drawn(pipeline: Any) -> Any:
    """As a run draws its first prompt."""
    seed = torch.Generator().manual_seed(42)
    return pipeline(prompt=PROMPTS[0], height=32, width=32, num_inference_steps=2, generator=seed).images[0]


def _farthest(one: Any, other: Any) -> int:
    """The largest difference of a channel, of 255."""
    from PIL import ImageChops

    bands: Any = ImageChops.difference(one, other).getextrema()
    return max(high for _, high in bands)
