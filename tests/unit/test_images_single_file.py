"""An image model in a single file of weights: the same tensors as its pipeline, whatever names the file has."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.pipelines import clip, make_pipeline, write_images
from tests.runs_in_process import train
from trainer.checkpoint.finished_run import find_run
from trainer.commands import merge
from trainer.config import ModelSection, RunConfig, UserError
from trainer.tasks.images.pipeline import read_pipeline
from trainer.tasks.images.task import ImageTask, build_sampling_pipeline

RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
OPEN_CLIP = {
    "text_model.embeddings.token_embedding": "token_embedding", "text_model.final_layer_norm": "ln_final",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.encoder.layers": "transformer.resblocks", "layer_norm": "ln_", "fc1": "c_fc", "fc2": "c_proj",
    "self_attn": "attn", "text_projection.weight": "text_projection",
}  # fmt: skip
# The tiny UNet of tests/pipelines.py in the names of the first checkpoints.
UNET = {
    r"conv_in": "input_blocks.0.0", r"conv_norm_out": "out.0", r"conv_out": "out.2",
    r"time_embedding\.linear_(\d)": lambda found: f"time_embed.{2 * int(found[1]) - 2}",
    r"add_embedding\.linear_(\d)": lambda found: f"label_emb.0.{2 * int(found[1]) - 2}",
    r"down_blocks\.0\.downsamplers\.0\.conv": "input_blocks.2.0.op",
    r"down_blocks\.(\d)\.(resnets|attentions)\.0": (
        lambda found: f"input_blocks.{2 * int(found[1]) + 1}.{_at(found[2])}"
    ),
    r"mid_block\.resnets\.(\d)": lambda found: f"middle_block.{2 * int(found[1])}",
    r"mid_block\.attentions\.0": "middle_block.1",
    r"up_blocks\.0\.upsamplers\.0\.conv": "output_blocks.1.2.conv",
    r"up_blocks\.(\d)\.(resnets|attentions)\.(\d)": (
        lambda found: f"output_blocks.{2 * int(found[1]) + int(found[3])}.{_at(found[2])}"
    ),
}  # fmt: skip
VAE = {
    r"(encoder|decoder)\.conv_norm_out": r"\1.norm_out",
    r"encoder\.down_blocks\.(\d)\.resnets": r"encoder.down.\1.block",
    r"encoder\.down_blocks\.0\.downsamplers\.0": "encoder.down.0.downsample",
    r"decoder\.up_blocks\.(\d)\.resnets": lambda found: f"decoder.up.{1 - int(found[1])}.block",
    r"decoder\.up_blocks\.0\.upsamplers\.0": "decoder.up.1.upsample",
    r"(encoder|decoder)\.mid_block\.resnets\.(\d)": lambda found: f"{found[1]}.mid.block_{int(found[2]) + 1}",
    r"(encoder|decoder)\.mid_block\.attentions\.0\.group_norm": r"\1.mid.attn_1.norm",
    r"(encoder|decoder)\.mid_block\.attentions\.0\.to_([qkv])": r"\1.mid.attn_1.\2",
    r"(encoder|decoder)\.mid_block\.attentions\.0\.to_out\.0": r"\1.mid.attn_1.proj_out",
}  # fmt: skip


def _at(kind: str) -> int:
    return 0 if kind == "resnets" else 1


def _renamed(name: str, rules: dict[str, Any]) -> str:
    for pattern, replacement in rules.items():
        if re.match(rf"{pattern}\.", name):
            return re.sub(rf"^{pattern}", replacement, name)
    return name


def write_single_file(pipeline: Path, file: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Stable Diffusion 1.5 or XL as one file, as its first checkpoints were."""
    is_xl = (pipeline / "text_encoder_2").is_dir()
    unet = load_file(pipeline / "unet" / "diffusion_pytorch_model.safetensors")
    tensors = {}
    for name, tensor in unet.items():
        own = _renamed(name, UNET)
        if "resnets" in name:
            own = re.sub(r"\.(\w+)\.(weight|bias)$", lambda found: f".{RESNET[found[1]]}.{found[2]}", own)
        tensors[f"model.diffusion_model.{own}"] = tensor
    for name, tensor in load_file(pipeline / "vae" / "diffusion_pytorch_model.safetensors").items():
        own = _renamed(name, VAE).replace("conv_shortcut", "nin_shortcut")
        is_attention = "attn_1" in own and own.endswith("weight") and "norm" not in own
        tensors[f"first_stage_model.{own}"] = tensor[..., None, None] if is_attention else tensor
    for name, tensor in load_file(pipeline / "text_encoder" / "model.safetensors").items():
        prefix = "" if name.startswith("text_model.") else "text_model."
        encoder = "conditioner.embedders.0" if is_xl else "cond_stage_model"
        tensors[f"{encoder}.transformer.{prefix}{name}"] = tensor
    if is_xl:
        second = _join_attention(load_file(pipeline / "text_encoder_2" / "model.safetensors"))
        for name, tensor in second.items():
            for theirs, own in OPEN_CLIP.items():
                name = name.replace(theirs, own)
            tensors[f"conditioner.embedders.1.model.{name}"] = tensor.T if name == "text_projection" else tensor
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, file)
    return file


def _join_attention(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join query, key and value of each layer, as OpenCLIP has them."""
    joined = {name: tensor for name, tensor in tensors.items() if not re.search(r"self_attn\.[qkv]_proj", name)}
    for name in tensors:
        if "self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            joined[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    return joined


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same tensors, in the dtype of the first."""
    (first,), (second,) = (list(folder.glob("*.safetensors")) for folder in (one, other))
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_whole_pipeline_in_one_file_is_what_it_was(tmp_path: Path) -> None:
    origin = make_pipeline(tmp_path / "sd", "sd")
    file = write_single_file(origin, tmp_path / "sd.safetensors")
    found = read_pipeline(str(file), ModelSection(pipeline=str(origin)))
    assert found.family.name == "sd" and found.folder is not None and found.base_model == str(file)
    assert all(same_weights(origin / part, found.folder / part) for part in ("unet", "vae", "text_encoder"))
    again = read_pipeline(str(file), ModelSection(pipeline=str(origin)))
    assert again.folder == found.folder, "converted once"


@pytest.mark.parametrize("family", ["flux", "sd3", "flux2"])
def test_a_denoiser_in_one_file_takes_the_rest_from_its_pipeline(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = make_pipeline(tmp_path / "origin", family)
    tuned = make_pipeline(tmp_path / "tuned", family, seed=1)
    file = tmp_path / "tuned.safetensors"
    weights = load_file(tuned / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file({name: tensor.half() for name, tensor in weights.items()}, file)
    found = read_pipeline(str(file), ModelSection(pipeline=str(origin)))
    assert found.folder is not None and found.family.name == family
    (kept,) = (load_file(each) for each in (found.folder / "transformer").glob("*.safetensors"))
    assert all(torch.equal(kept[name], tensor.half()) for name, tensor in weights.items()), "in the dtype of the file"
    build_sampling_pipeline(found.build_empty_denoiser(), found, torch.device("cpu"))
    config = RunConfig.model_validate(
        {"base_model": str(file), "model": {"pipeline": str(origin)}, "output_dir": "run", "dataset": {"path": "x"}}
    )
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"```python\n(.*?)```", ImageTask.build_model_card(config, Path("run"), [], str(tmp_path / "run")), re.S
    )
    compile(code, "card", "exec")
    model = re.escape(found.family.model)
    assert re.search(rf'transformer = {model}\.from_single_file\(\s+"\./tuned\.safetensors", config="\./origin"', code)
    assert 'from_pretrained(\n    "./origin", transformer=transformer' in code


def test_what_a_single_file_needs_is_said_where_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    file = write_single_file(make_pipeline(tmp_path / "sd", "sd"), tmp_path / "sd.safetensors")
    with pytest.raises(UserError, match=r"sd\.safetensors: contains only weights.*model\.pipeline"):
        read_pipeline(str(file), ModelSection())
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match="truncated"):
        read_pipeline(str(tmp_path / "cut.safetensors"), ModelSection())


def test_a_run_on_a_single_file_is_merged_with_that_file_alone(tmp_path: Path) -> None:
    origin = make_pipeline(tmp_path / "sd", "sd")
    file = write_single_file(origin, tmp_path / "sd.safetensors")
    other = write_single_file(make_pipeline(tmp_path / "sd2", "sd", seed=3), tmp_path / "other.safetensors")
    write_images(tmp_path / "images", 4)
    settings = {
        "base_model": str(file),
        "model": {"pipeline": str(origin)},
        "output_dir": str(tmp_path / "run"),
        "lora": {"r": 2},
        "image": {"resolution": 64},
        "dataset": {"path": str(tmp_path / "images"), "cache_dir": str(tmp_path / "cache")},
        "training": {"batch_size": 2, "max_steps": 1, "precision": "fp32"},
        "logging": {"report_to": "none", "progress": "off"},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(settings))
    train(tmp_path)
    assert merge.main([str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    with pytest.raises(UserError, match="its weight files differ from"):
        find_run(tmp_path / "run", str(other))
    renamed = file.rename(tmp_path / "renamed.safetensors")
    with pytest.raises(UserError, match=r"sd\.safetensors: does not exist; pass its new location"):
        find_run(tmp_path / "run")
    find_run(tmp_path / "run", str(renamed))


def make_xl(folder: Path) -> Path:
    """A tiny pipeline with a wider second text encoder of ten layers: diffusers recognizes an XL by both."""
    widths = {"cross_attention_dim": 32 + 48, "projection_class_embeddings_input_dim": 48 + 6 * 8}
    make_pipeline(folder, "sdxl", **widths)
    clip(projected=True, width=48, layers=10).save_pretrained(folder / "text_encoder_2")
    return folder


@pytest.mark.slow
def test_sdxl_in_one_file_trains_merges_and_draws_from_the_command_line(tmp_path: Path) -> None:
    """`base_model: sdxl.safetensors` is all there is to write; settings and tokenizers come from the Hub's cache."""
    origin = make_xl(tmp_path / "origin")
    write_single_file(origin, tmp_path / "sdxl.safetensors", torch.float16)
    cached, commit = tmp_path / "hf" / "hub" / "models--stabilityai--stable-diffusion-xl-base-1.0", "0" * 40
    shutil.copytree(origin, cached / "snapshots" / commit, ignore=shutil.ignore_patterns("*.safetensors"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    write_images(tmp_path / "images", 4)
    settings = {
        "base_model": "sdxl.safetensors",
        "output_dir": "run",
        "lora": {"r": 2},
        "image": {"resolution": 64},
        "dataset": {"path": "images"},
        "training": {"batch_size": 2, "max_steps": 1, "precision": "fp32"},
        "logging": {"report_to": "none", "sample_prompts": ["a red circle"]},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}

    def command(*arguments: str) -> str:
        program = [sys.executable, "-m", "launcher.cli", *arguments]
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    command("validate", "c.yaml")
    command("train", "c.yaml")
    assert {file.name for file in (tmp_path / "run" / "samples").iterdir()} >= {"00-before.png", "00-after.png"}
    (converted,) = (each for each in (tmp_path / "home/.cache/zerolora/pipelines").iterdir() if each.is_dir())
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        (own,), (wanted,) = (list((folder / part).glob("*.safetensors")) for folder in (converted, origin))
        stored, expected = load_file(own), load_file(wanted)
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[name], expected[name].half()) for name in stored), part
    loads = re.search(r"load it with (.*)", command("merge", "run"))
    assert loads is not None
    card = (tmp_path / "run" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)image = ", card, re.S)
    assert 'from_single_file(\n    "./sdxl.safetensors", config="stabilityai/stable-diffusion-xl-base-1.0"' in code
    on_cpu = code.replace('.to("cuda")', "").replace('"stabilityai/stable-diffusion-xl-base-1.0"', '"./origin"')
    for load in (f"from diffusers import DiffusionPipeline\npipeline = {loads[1]}", on_cpu):
        draw = 'pipeline("a red circle", num_inference_steps=2, height=64, width=64).images[0]'
        program = [sys.executable, "-c", f"import torch\n{load}\nprint({draw}.size)"]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout == "(64, 64)\n", done.stderr
