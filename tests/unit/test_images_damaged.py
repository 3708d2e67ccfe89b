"""What is wrong with pictures, captions and pipelines: one line that names it, before anything is written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.pipelines import make_pipeline, write_images
from tests.unit.test_images import run_config
from trainer.config import ImageSection, ModelSection, SourceSection, UserError
from trainer.setup.preflight import prepare
from trainer.setup.text_run import check_no_image_settings
from trainer.tasks.images.encoding import describe_truncated_captions, load_vae
from trainer.tasks.images.model import ImageModel, check_weights
from trainer.tasks.images.pipeline import Pipeline, read_pipeline
from trainer.tasks.images.source_images import ALPHA_WARNING, COLOR_MODE_WARNING, FIRST_FRAME, SourceImage, read_images


def read(folder: Path, caption: str | None = None) -> list[SourceImage]:
    return read_images(SourceSection(path=str(folder)), "dataset", caption)[0]


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(folder)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {"file_name": "nope.png", "text": "x"},
            "metadata.jsonl, record 1: the folder has no image nope.png",
        ),
        (
            {"file_name": "000.png", "text": ["x", "y"]},
            "metadata.jsonl, record 1: needs file_name, and a caption in one",
        ),
        ({"text": "x"}, "metadata.jsonl, record 1: needs file_name"),
    ],
)
def test_a_record_of_metadata_must_fit_its_picture(tmp_path: Path, record: dict[str, object], line: str) -> None:
    folder = write_images(tmp_path / "a", 1)
    (folder / "metadata.jsonl").write_text(json.dumps(record) + "\n")
    assert line in refused(folder)


def test_captions_in_another_encoding_are_refused_with_their_place(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "a", 2)
    (folder / "001.txt").write_bytes("a café".encode("latin-1"))
    assert "001.txt: line 1: byte 0xe9 is not UTF-8" in refused(folder)
    (folder / "001.txt").write_bytes(b"\xef\xbb\xbfa mark before it")
    assert read(folder)[1].caption == "a mark before it"
    (folder / "metadata.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "line 1 of metadata.jsonl has a NUL byte" in refused(folder)


def test_pictures_that_cannot_be_shown_in_8_bits_are_named_and_hidden_copies_left_out(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "a", 2)
    (folder / ".ipynb_checkpoints").mkdir()
    shutil.copy(folder / "000.png", folder / ".ipynb_checkpoints" / "000-checkpoint.png")
    assert len(read(folder)) == 2
    Image.new("I;16", (64, 64), 40_000).save(folder / "000.png")
    assert "000.png: has more than 8 bits per channel (mode I;16)" in refused(folder)
    (folder / "000.png").write_bytes(b"")
    assert "000.png: cannot be read as an image (unknown format)" in refused(folder)


def transparent(mode: str, file: Path) -> None:
    """Save an image, red on the left and transparent on the right, in this mode."""
    rgba = Image.new("RGBA", (64, 64), (220, 40, 40, 255))
    rgba.paste((0, 0, 0, 0), (32, 0, 64, 64))
    if mode == "P":
        indexed = Image.new("P", (64, 64), 0)
        indexed.putpalette([220, 40, 40, 0, 0, 0])
        indexed.paste(1, (32, 0, 64, 64))
        indexed.save(file, transparency=1)
    elif mode in ("RGB", "L"):
        see_through = {"RGB": (0, 0, 0), "L": 0}[mode]
        rgba.convert(mode).save(file, transparency=see_through)
    else:
        rgba.convert(mode).save(file)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparent_parts_are_white_and_counted(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "a.png"
    transparent(mode, file)
    (picture,) = read(tmp_path, "a")
    shown = picture.open()
    assert shown.getpixel((48, 8)) == (255, 255, 255)
    assert shown.getpixel((8, 8)) == ((220, 40, 40) if mode in ("RGBA", "P", "RGB") else (94, 94, 94))
    assert picture.changes == (ALPHA_WARNING,)


def test_every_mode_is_shown_as_it_looks(tmp_path: Path) -> None:
    for mode in ("1", "L", "P", "RGB", "CMYK"):
        image = Image.new("RGB", (64, 64), (255, 255, 255)).convert(mode)
        image.save(tmp_path / f"{mode}.{'tif' if mode == 'CMYK' else 'png'}")
    pictures = read(tmp_path, "a")
    assert [picture.open().getpixel((5, 5)) for picture in pictures] == [(255, 255, 255)] * 5
    assert [picture.changes for picture in pictures if picture.changes] == [(COLOR_MODE_WARNING,)]


def test_the_first_of_several_frames_is_used_and_counted(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "b.png", "c.tif", "d.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
    pictures = read(tmp_path, "a")
    assert [FIRST_FRAME in picture.changes for picture in pictures] == [True] * 4
    assert [picture.open().getpixel((5, 5)) for picture in pictures] == [(255, 0, 0)] * 4


def test_files_that_are_not_used_are_counted_by_kind(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "a", 2)
    for name in ("x.heic", "y.HEIC", "clip.mp4", "left.txt", ".DS_Store"):
        (folder / name).write_bytes(b"x")
    (folder / "metadata.jsonl").write_text("")
    (folder / "link.png").symlink_to(tmp_path / "moved.png")
    _, skipped = read_images(SourceSection(path=str(folder)), "dataset", None)
    assert len(skipped) == 2
    assert "skipped 1 broken link (first: link.png" in skipped[0]
    assert all(part in skipped[1] for part in ("2 with .heic", "1 with .mp4", "1 with .txt")), skipped[1]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.heic").write_bytes(b"x")
    assert "1 with .heic" in refused(tmp_path / "b")


def test_captions_in_a_table_are_read_as_imagefolder_reads_them(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "a", 2)
    (folder / "001.txt").unlink()
    (folder / "metadata.csv").write_text('file_name,text\n001.png,"a fox, red"\n')
    assert [picture.caption for picture in read(folder)][1] == "a fox, red"
    (folder / "metadata.csv").write_text("file,text\n001.png,x\n")
    assert "metadata.csv, record 1: needs file_name" in refused(folder)


@pytest.mark.parametrize(("family", "more"), [("sdxl", ""), ("sd3", "up to 256 for text_encoder_3")])
def test_captions_longer_than_an_encoder_reads_are_counted(tmp_path: Path, family: str, more: str) -> None:
    pipeline = read_pipeline(str(make_pipeline(tmp_path / "pipeline", family)), ModelSection())
    assert describe_truncated_captions(pipeline, ["a" * 75, "short"]) == []
    (line,) = describe_truncated_captions(pipeline, ["a" * 76, "short"])
    assert "1 of 2 captions" in line and "77 tokens" in line and "text_encoder and text_encoder_2" in line
    assert more in line


def test_an_image_set_names_the_record_that_lacks_something(tmp_path: Path) -> None:
    import datasets

    file = str(write_images(tmp_path / "a", 1) / "000.png")
    for name, rows, line in (
        ("picture", {"image": [file, None], "text": ["a", "b"]}, "picture, record 2: has no image in column image"),
        ("caption", {"image": [file, file], "text": ["a", None]}, "caption, record 2: has no caption in column text"),
    ):
        datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(tmp_path / name)
        assert line in refused(tmp_path / name)
    datasets.Dataset.from_dict({"image": [1], "text": ["a"]}).save_to_disk(tmp_path / "numbers")
    assert "column image has no images" in refused(tmp_path / "numbers")
    set_of_one = datasets.Dataset.from_dict({"pic": [file], "words": ["a"]}).cast_column("pic", datasets.Image())
    set_of_one.to_parquet(tmp_path / "one.parquet")
    assert "set dataset.fields: {image: ..., caption: ...}" in refused(tmp_path / "one.parquet")
    named = SourceSection(path=str(tmp_path / "one.parquet"), fields={"image": "pic", "caption": "words"})
    assert [picture.caption for picture in read_images(named, "dataset", None)[0]] == ["a"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline(tmp_path_factory.mktemp("damaged") / "sdxl", "sdxl")


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "sdxl"))


def test_what_is_seldom_meant_of_pictures_is_said(whole: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "a", 4)
    (folder / "000.txt").write_text(" \n")
    Image.new("RGB", (20, 20)).save(folder / "001.png")
    Image.new("RGBA", (64, 64)).save(folder / "002.png")
    (folder / "003.txt").write_text("a" * 90)
    (folder / "004.heic").write_bytes(b"x")
    data = f"dataset={{path: {folder}, cache_dir: {tmp_path / 'cache'}, val_split: 0.001}}"
    found = prepare(run_config(whole.parent, data)).data
    assert len(found.evaluation) == 1 and len(found.train) == 3, "a part that rounds to nothing holds one out"
    lines = [line for line in found.stats.format_summary() if line.startswith("warning: ")]
    said = ("1 with .heic", "1 of 4 images have an alpha channel", "an empty caption", "smaller than", "77 tokens")
    assert [part in line for part, line in zip(said, lines, strict=True)] == [True] * 5, lines


def test_a_language_model_takes_no_settings_of_pictures(whole: Path) -> None:
    config = run_config(whole.parent, "image.flip=true")
    with pytest.raises(UserError, match=r"^image.resolution=32: only for image models; base_model=.* is not one"):
        check_no_image_settings(config)


def pipeline_of(folder: Path) -> Pipeline:
    return read_pipeline(str(folder), ModelSection())


def lose_a_tensor(folder: Path) -> str:
    """The name of a weight that no file of a part has any more."""
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith("norm1.weight"))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("part", ["vae", "text_encoder_2", "tokenizer", "scheduler"])
def test_a_part_that_a_pipeline_lacks_is_named(copied: Path, part: str) -> None:
    shutil.rmtree(copied / part)
    with pytest.raises(UserError, match=f"sdxl: {part} is listed in model_index.json, but missing; copy"):
        pipeline_of(copied)


@pytest.mark.parametrize(
    ("setting", "value"), [("scaling_factor", "x"), ("scaling_factor", float("nan")), ("shift_factor", float("inf")),
                           ("latent_channels", "four"), ("block_out_channels", 5)]
)  # fmt: skip
def test_invalid_settings_of_a_vae_are_named(copied: Path, setting: str, value: object) -> None:
    """NaN latents would otherwise be reported as a problem of the learning rate."""
    file = copied / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    with pytest.raises(UserError, match=rf"sdxl: vae/config\.json {setting}.*; copy it again"):
        pipeline_of(copied)


def test_weights_that_a_pipeline_lacks_are_named(copied: Path) -> None:
    for part, lost in ((part, lose_a_tensor(copied / part)) for part in ("unet", "text_encoder", "vae")):
        pipeline = pipeline_of(copied)
        with pytest.raises(UserError, match=r"its VAE cannot be read" if part == "vae" else lost.replace(".", "[.]")):
            if part == "unet":
                check_weights(ImageModel(pipeline), pipeline, ModelSection())
            elif part == "vae":
                load_vae(pipeline, torch.device("cpu"))
            else:
                pipeline.load_encoder_pipeline(None)


def test_settings_of_a_scheduler_that_mean_nothing_are_one_line(copied: Path) -> None:
    file = copied / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"beta_schedule": "steep"}))
    with pytest.raises(UserError, match=r"its scheduler cannot be read \(steep is not implemented"):
        pipeline_of(copied).build_training_scheduler(ImageSection())
