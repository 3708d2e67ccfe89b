"""Pictures to latents: what is read, refused, sized, cached and drawn, and what becomes of the adapter."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.pipelines import make_pipeline, write_images
from trainer.config import ImageSection, RunConfig, SourceSection, UserError, load_config
from trainer.setup.preflight import prepare
from trainer.tasks.images.batches import ImageBatches, group_by_size, iterate_evaluation_images
from trainer.tasks.images.encoding import image_to_tensor
from trainer.tasks.images.objective import Objective
from trainer.tasks.images.sizes import fit_to_bucket, list_bucket_sizes
from trainer.tasks.images.source_images import read_images


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    make_pipeline(root / "sdxl", "sdxl")
    write_images(root / "pictures", 6, sizes=((64, 64), (96, 64)))
    return root


def run_config(root: Path, *overrides: str, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "base_model": str(root / "sdxl"),
        "output_dir": str(root / "out"),
        "lora": {"r": 4},
        "dataset": {"path": str(root / "pictures"), "cache_dir": str(root / "cache")},
        "image": {"resolution": 32, "bucket_step": 8},
        "training": {"batch_size": 2, "max_steps": 2, "precision": "fp32"},
    }
    (root / "run.yaml").write_text(yaml.safe_dump(settings | changes))
    return load_config(root / "run.yaml", overrides).config


def refused(config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        prepare(config)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_picture_gets_the_size_nearest_in_shape_and_is_cut_little() -> None:
    sizes = list_bucket_sizes(ImageSection(resolution=1024))
    assert (1024, 1024) in sizes and (1152, 896) in sizes and (896, 1152) in sizes
    assert all(w * h <= 1024 * 1024 and w % 64 == 0 and h % 64 == 0 for w, h in sizes)
    for width, height in ((1000, 1000), (4000, 3000), (300, 500), (1920, 1080)):
        found = fit_to_bucket(width, height, sizes)
        image = found.apply(Image.new("RGB", (width, height)))
        assert image.size == (found.width, found.height)
        shown = found.width * found.height / (found.scaled_size[0] * found.scaled_size[1])
        assert shown > 0.93, f"{width} x {height} loses {1 - shown:.0%}"
    assert list_bucket_sizes(ImageSection(resolution=512, buckets=False)) == [(512, 512)]


def test_captions_come_from_text_files_metadata_and_a_default(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "a", 3)
    (folder / "000.txt").unlink()
    with pytest.raises(UserError, match=r"no caption for 000\.png \(1 of 3 have none\).*image\.caption"):
        read_images(SourceSection(path=str(folder)), "dataset", None)
    assert read_images(SourceSection(path=str(folder)), "dataset", "a thing")[0][0].caption == "a thing"
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "000.png", "text": "from metadata"}) + "\n")
    assert read_images(SourceSection(path=str(folder)), "dataset", None)[0][0].caption == "from metadata"
    (folder / "000.txt").write_text("from a file")
    with pytest.raises(UserError, match=r"000\.txt: the metadata has another caption of 000\.png; remove one"):
        read_images(SourceSection(path=str(folder)), "dataset", None)
    (folder / "000.txt").write_text("from  metadata\n")
    assert read_images(SourceSection(path=str(folder)), "dataset", None)[0][0].caption == "from metadata"
    (folder / "metadata.jsonl").write_text('{"file_name": "000.png"}\n')
    with pytest.raises(UserError, match=r"metadata\.jsonl, record 1: needs file_name, and a caption in"):
        read_images(SourceSection(path=str(folder)), "dataset", None)


def test_an_image_set_of_datasets_is_read(tmp_path: Path) -> None:
    import datasets

    folder = write_images(tmp_path / "a", 2)
    rows = {"image": [str(folder / "000.png"), str(folder / "001.png")], "text": ["one", "two"]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "set")
    found, _ = read_images(SourceSection(path=str(tmp_path / "set")), "dataset", None)
    assert [picture.caption for picture in found] == ["one", "two"]
    assert found[0].open().tobytes() == Image.open(folder / "000.png").tobytes()


def test_a_broken_picture_is_named(root: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "broken", 3)
    data = (folder / "001.png").read_bytes()
    (folder / "001.png").write_bytes(data[: len(data) // 2])
    config = run_config(root, f"dataset.path={folder}", f"dataset.cache_dir={tmp_path / 'cache'}")
    assert "001.png: cannot be read as an image" in refused(config)
    (folder / "001.png").write_bytes(b"nothing")
    assert "001.png: cannot be read as an image" in refused(config)
    assert not list((tmp_path / "cache").glob("*/latents*"))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("image.resolution=33", "image.resolution=33: must be a multiple of 2"),
        ("image.bucket_step=9", "image.bucket_step=9: must be a multiple"),
        ("scu.enabled=true", "scu.enabled=true: measures bits per token"),
        ("adapter=none", "adapter=none: not supported for image models"),
        ("training.qat=int8", "training.qat=int8: only for language models; remove it"),
        ("parallel.sequence=2", "parallel.sequence=2: only for language models; remove it"),
        ("dataset.packing=true", "dataset.packing=true: only for language models; remove it"),
        ("dataset.max_length=4096", "dataset.max_length=4096: only for language models; remove it"),
        (
            "lora.modules_to_save=conv_in",
            "lora.modules_to_save=[conv_in]: diffusers only loads LoRA; list these layers",
        ),
        ("image.time_shift=3", "image.time_shift=3: only for flow matching"),
        (
            "training.gradient_checkpointing=selective",
            "training.gradient_checkpointing=selective: not supported for image models",
        ),
        ("lora.target_modules=to_x", "lora.target_modules=to_x: matches no layer of this model; did you mean to_"),
        ("dataset.path=/nowhere/pictures", "dataset.path=/nowhere/pictures: no such file or folder"),
        ("task=language", "contains an image model; set task: auto"),
    ],
)
def test_what_cannot_work_is_one_line(root: Path, override: str, line: str) -> None:
    assert line in refused(run_config(root, override))


def test_an_unknown_pipeline_is_refused_with_those_that_are_known(root: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    line = refused(run_config(root, f"base_model={tmp_path}"))
    assert "names WanPipeline, which is not supported; use StableDiffusionPipeline" in line


def test_cached_latents_and_conditions_are_what_the_pipeline_computes(root: Path) -> None:
    import diffusers

    prepared = prepare(run_config(root, "image.flip=true"))
    samples = prepared.data.train
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(root / "sdxl", dtype=torch.float32)
    pictures, _ = read_images(SourceSection(path=str(root / "pictures")), "dataset", None)
    entry, picture = samples[1], pictures[1]
    pixels = image_to_tensor(
        fit_to_bucket(picture.width, picture.height, [(entry.width, entry.height)]).apply(picture.open())
    )
    with torch.no_grad():
        seen = pipeline.vae.encode(pixels[None]).latent_dist
        mirrored = pipeline.vae.encode(pixels[None].flip(-1)).latent_dist
        text, _, pooled, _ = pipeline.encode_prompt([picture.caption], do_classifier_free_guidance=False)
    mean, std = samples.store.load_latents(entry.index, flipped=False)
    assert torch.equal(mean, seen.mean[0] * pipeline.vae.config.scaling_factor)
    assert torch.equal(std, seen.std[0] * pipeline.vae.config.scaling_factor)
    flipped, _ = samples.store.load_latents(entry.index, flipped=True)
    assert torch.equal(flipped, mirrored.mean[0] * pipeline.vae.config.scaling_factor)
    conditions = samples.store.load_conditions(entry.caption)
    torch.testing.assert_close(conditions["text"], text[0])
    torch.testing.assert_close(conditions["pooled"], pooled[0])


def test_sources_are_mixed_by_weight_and_keep_their_captions(root: Path, tmp_path: Path) -> None:
    one, other = write_images(tmp_path / "one", 4), write_images(tmp_path / "other", 4, seed=5)
    for file in other.glob("*.txt"):
        file.write_text("the other source")
    mix = [{"path": str(one), "weight": 2}, {"path": str(other), "weight": 0.5}]
    dataset = {"mix": mix, "cache_dir": str(tmp_path / "cache")}
    samples = prepare(run_config(root, dataset=dataset)).data.train
    captions = [samples.store.captions[entry.caption] for entry in samples.entries]
    assert (len(captions), captions.count("the other source")) == (10, 2)
    assert sorted(entry.index for entry in samples.entries if entry.index < 4) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_data_is_encoded_once_and_again_when_a_picture_changes(root: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pictures", 2)
    config = run_config(root, f"dataset.path={folder}", f"dataset.cache_dir={tmp_path / 'cache'}")
    prepare(config)
    [made] = (tmp_path / "cache").glob("images-*[0-9a-f]")
    before = (made / "latents-0000.safetensors").stat().st_mtime_ns
    prepare(config)
    assert (made / "latents-0000.safetensors").stat().st_mtime_ns == before
    Image.new("RGB", (64, 64)).save(folder / "000.png")
    prepare(config)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_inspect_shows_pictures_and_those_of_a_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainer.commands.inspect import main

    run_config(root)
    assert main([str(root / "run.yaml"), "--examples", "2"]) == 0
    first, second, figures = capsys.readouterr().out.splitlines()
    assert first.endswith("pictures/000.png: 64 x 64 as 32 x 32: 'a yellow square'")
    assert "001.png: 96 x 64 as 40 x 24, cropped by 1 at top and bottom" in second
    assert figures.startswith("train: 6 images, ")
    prepared = prepare(run_config(root))
    [batches] = batches_of(prepared, ranks=1, accumulation=4)
    assert main([str(root / "run.yaml"), "--step", "2", "--ranks", "2", "seed=3"]) == 0
    shown = [Path(line.partition(":")[0]).name for line in capsys.readouterr().out.splitlines()]
    assert shown == [Path(prepared.data.train[index].name).name for index in batches.get_order(0)[4:8].tolist()]


def batches_of(prepared: Any, *, ranks: int, accumulation: int, **changes: Any) -> list[ImageBatches]:
    image = ImageSection(**changes)
    objective = Objective(prepared.model_config, image)
    common: dict[str, Any] = {"prior": None, "batch_size": 1, "accumulation": accumulation, "seed": 3, "shuffle": True}
    return [
        ImageBatches(prepared.data.train, objective.draw_timestep, image, rank=rank, world_size=ranks, **common)
        for rank in range(ranks)
    ]


def test_two_ranks_draw_what_one_draws(root: Path) -> None:
    prepared = prepare(run_config(root))
    [alone] = batches_of(prepared, ranks=1, accumulation=4)
    both = batches_of(prepared, ranks=2, accumulation=2)
    whole, taken = alone.build_step_batches(1, 0)
    parts = [batches.build_step_batches(1, 0)[0] for batches in both]
    assert taken == 4
    apart = [parts[rank][step] for step in range(2) for rank in range(2)]
    for one, other in zip(whole, apart, strict=True):
        for name in ("latents", "noise", "timesteps"):
            assert torch.equal(getattr(one.groups[0], name), getattr(other.groups[0], name))
    again, _ = alone.build_step_batches(2, 0)
    assert not torch.equal(again[0].groups[0].noise, whole[0].groups[0].noise), "every epoch draws again"
    last, taken = both[1].build_step_batches(1, 5)
    assert taken == 1 and [batch.target_count for batch in last] == [0, 0], "what fills up does not count"
    assert all(float(group.weights.sum()) == 0 for batch in last for group in batch.groups)


def test_captions_are_dropped_as_often_as_asked(root: Path) -> None:
    prepared = prepare(run_config(root))
    [batches] = batches_of(prepared, ranks=1, accumulation=6, caption_dropout=0.5)
    store = prepared.data.train.store
    empty = store.load_conditions(store.captions.index(""))["text"]
    dropped = [
        torch.equal(text, empty)
        for epoch in range(40)
        for batch in batches.build_step_batches(epoch, 0)[0]
        for group in batch.groups
        for text in group.conditions["text"]
    ]
    assert 0.4 < sum(dropped) / len(dropped) < 0.6


def test_global_batches_have_one_size_as_far_as_there_are_pictures() -> None:
    sizes = np.array([(64, 64)] * 9 + [(96, 64)] * 7)
    order = group_by_size(np.random.default_rng(0).permutation(16), sizes, 4, np.random.default_rng(1))
    assert sorted(order.tolist()) == list(range(16))
    kinds = [len({tuple(sizes[index]) for index in order[start : start + 4]}) for start in range(0, 16, 4)]
    assert kinds == [1, 1, 1, 2]


def test_every_rank_has_as_many_passes_where_sizes_are_mixed(root: Path) -> None:
    """At stage 3 a rank with fewer of them would leave the others waiting for ever."""
    prepared = prepare(run_config(root))
    samples = prepared.data.train
    draw = Objective(prepared.model_config, ImageSection()).draw_timestep, ImageSection()
    common: dict[str, Any] = {"prior": None, "batch_size": 2, "accumulation": 1, "seed": 3, "shuffle": True}
    both = [ImageBatches(samples, *draw, rank=rank, world_size=2, **common) for rank in range(2)]
    passes = [[len(each.build_step_batches(epoch, 0)[0][0].groups) for each in both] for epoch in range(6)]
    assert all(one == other for one, other in passes)
    assert max(map(max, passes)) == 2, "no mixed batch came about: the test shows nothing"
    weights = [float(group.weights.sum()) for each in both for group in each.build_step_batches(0, 0)[0][0].groups]
    assert sum(weights) == 4, "what fills up does not count"
    rows = [list(iterate_evaluation_images(samples, batch_size=5, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [len(batch.groups) for batch in rows[0]] == [len(batch.groups) for batch in rows[1]]


def test_held_out_pictures_are_seen_at_fixed_times(root: Path) -> None:
    prepared = prepare(run_config(root, "dataset.val_split=0.34"))
    held_out = prepared.data.evaluation
    rows = [list(iterate_evaluation_images(held_out, batch_size=3, rank=rank, world_size=2)) for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1])
    assert sum(batch.target_count for part in rows for batch in part) == 4 * len(held_out)
    first = rows[0][0].groups[0]
    assert first.timesteps.tolist() == [0.125, 0.375, 0.625]


def test_min_snr_weighs_easy_times_less() -> None:
    from trainer.config import ModelSection
    from trainer.tasks.images.pipeline import read_pipeline

    pipeline = read_pipeline("random:sdxl", ModelSection())
    latents, noise, times = torch.ones(3, 4, 2, 2), torch.zeros(3, 4, 2, 2), torch.tensor([0.01, 0.5, 0.99])
    plain = Objective(pipeline, ImageSection()).add_noise(latents, noise, times)
    weighted = Objective(pipeline, ImageSection(min_snr_gamma=5.0)).add_noise(latents, noise, times)
    assert plain.weights.tolist() == [1, 1, 1]
    assert weighted.weights[0] < 0.06 and weighted.weights[1:].tolist() == [1, 1]
    velocity = Objective(pipeline, ImageSection(prediction="v_prediction")).add_noise(latents, noise, times)
    torch.testing.assert_close(velocity.target, -(1 - plain.noisy.square()).sqrt(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("sdxl", 2.567),
        ("sd1.5", 0.860),
        pytest.param("sd3.5-medium", 2.243, marks=pytest.mark.slow),
        ("flux-dev", 11.901),
        ("flux2-klein-4b", 3.876),
    ],
)
def test_published_shapes_have_as_many_weights_as_the_models(shape: str, billions: float) -> None:
    from trainer.config import ModelSection
    from trainer.tasks.images.model import ImageModel
    from trainer.tasks.images.pipeline import read_pipeline

    model = ImageModel(read_pipeline(f"random:{shape}", ModelSection()))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.002)


@pytest.mark.parametrize(("family", "side"), [("sdxl", 64), ("flux", 64), ("sd3", 64)])
def test_what_the_empty_twin_keeps_is_what_the_model_keeps(root: Path, family: str, side: int) -> None:
    from trainer.config import LoraSection, ModelSection
    from trainer.memory.image_models import observe_activations
    from trainer.model.adapter import apply_adapter
    from trainer.tasks.images.batches import iterate_evaluation_images
    from trainer.tasks.images.model import load_image_model
    from trainer.tasks.images.objective import NoiseLoss
    from trainer.tasks.images.pipeline import read_pipeline

    if not (root / family).exists():
        make_pipeline(root / family, family)
    overrides = (
        f"base_model={root / family}",
        f"image.resolution={side}",
        "image.buckets=false",
        "dataset.val_split=0.2",
    )
    prepared = prepare(run_config(root, *overrides))
    pipeline, lora = read_pipeline(str(root / family), ModelSection()), LoraSection(r=4)
    model = load_image_model(pipeline, ModelSection(), dtype=torch.float32, device=torch.device("cpu"))
    model = apply_adapter(model, lora, torch.float32, task_type=None).train()
    weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    [batch, *_] = iterate_evaluation_images(prepared.data.evaluation, batch_size=1, rank=0, world_size=1)
    loss = NoiseLoss(Objective(pipeline, ImageSection()), torch.float32, 1.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(model, batch, torch.device("cpu"))
    kept = sum(storage.nbytes() for storage in saved.values())
    text = {name: tuple(each.shape[1:]) for name, each in batch.groups[0].conditions.items() if name != "sizes"}
    assert observe_activations(pipeline, text, side, lora.model_dump_json(), 4, recompute=False).kept == pytest.approx(
        kept, rel=0.1
    )
    recomputed = observe_activations(pipeline, text, side, lora.model_dump_json(), 4, recompute=True)
    assert recomputed.kept < kept / 2 and 0 < recomputed.backward < kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "side", "measured_gib"),
    [("sdxl", 512, 6.98), ("sd3.5-medium", 1024, 6.05)],
)
def test_the_estimate_is_what_a_card_showed(shape: str, side: int, measured_gib: float) -> None:
    """One H200, tests/bench/bench_images.py on ca66c0e; at 1,024 pixels with recomputation."""
    from trainer.commands.estimate import build_planner

    settings = {
        "base_model": f"random:{shape}",
        "output_dir": "out",
        "dataset": {"path": "nothing"},
        "lora": {"r": 16},
        "image": {"resolution": side},
        "training": {"gradient_checkpointing": side == 1024},
    }
    config = RunConfig.model_validate(settings)
    planner, _ = build_planner(config, 1)
    assert planner.estimate(config).peak / 2**30 == pytest.approx(measured_gib, rel=0.05)


def test_the_estimate_of_a_published_shape_is_its_weights_and_what_it_keeps() -> None:
    from trainer.commands.estimate import build_planner

    settings = {
        "base_model": "random:sdxl",
        "output_dir": "out",
        "dataset": {"path": "nothing"},
        "image": {"resolution": 512},
    }
    config = RunConfig.model_validate(settings)
    planner, _ = build_planner(config, 1)
    found = planner.estimate(config)
    assert found.terms["base model"] == pytest.approx(2 * 2.567e9, rel=0.01)
    assert 0 < found.terms["activations"] < 3 * 2**30 and found.peak < 10 * 2**30
    nf4 = planner.estimate(config.model_copy(update={"adapter": "qlora"}))
    assert nf4.terms["base model"] < found.terms["base model"] / 2
