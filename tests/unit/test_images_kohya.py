"""Adapters under kohya's names: a reader of our own and the converters of diffusers find every update again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.pipelines import vae
from trainer.config import ModelSection, UserError
from trainer.tasks.images.files import DIFFUSERS_FILE, convert_to_kohya, write_for_diffusers
from trainer.tasks.images.model import ImageModel
from trainer.tasks.images.pipeline import Pipeline, read_pipeline

RANK, ALPHA = 2, 6.0
SETTINGS = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
SMALL = {
    "flux-dev": "num_layers=1,num_single_layers=1",
    "flux2-klein-4b": "num_layers=1,num_single_layers=1",
    "sd3.5-medium": "num_layers=2",
}
# Rows of the checkpoints' own matrices, in order, as the inference code of each model splits them.
SPLITS: dict[str, list[tuple[str, list[str]]]] = {
    "sd3.5-medium": [
        ("joint_blocks_{i}_x_block_attn_qkv", ["attn.to_q", "attn.to_k", "attn.to_v"]),
        ("joint_blocks_{i}_x_block_attn2_qkv", ["attn2.to_q", "attn2.to_k", "attn2.to_v"]),
        ("joint_blocks_{i}_context_block_attn_qkv", ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]),
        ("joint_blocks_{i}_x_block_attn_proj", ["attn.to_out.0"]),
        ("joint_blocks_{i}_x_block_attn2_proj", ["attn2.to_out.0"]),
        ("joint_blocks_{i}_context_block_attn_proj", ["attn.to_add_out"]),
        ("joint_blocks_{i}_x_block_mlp_fc1", ["ff.net.0.proj"]),
        ("joint_blocks_{i}_x_block_mlp_fc2", ["ff.net.2"]),
        ("joint_blocks_{i}_context_block_mlp_fc1", ["ff_context.net.0.proj"]),
        ("joint_blocks_{i}_context_block_mlp_fc2", ["ff_context.net.2"]),
    ]
}


def adapter(folder: Path, shape: str, *, only: tuple[str, ...] = ("",)) -> tuple[Pipeline, dict[str, Tensor]]:
    """Write an adapter of random factors on the usual layers with names ending in one of `only`; return its updates."""
    pipeline = read_pipeline(f"random:{shape},{SMALL[shape]}", ModelSection())
    model = ImageModel(pipeline)
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    updates: dict[str, Tensor] = {}
    for path in model.list_default_targets():
        if not path.endswith(only):
            continue
        layer: Any = model.get_submodule(path)
        down = torch.randn(RANK, layer.in_features, generator=draw)
        up = torch.randn(layer.out_features, RANK, generator=draw)
        tensors |= {f"base_model.model.{path}.lora_A.weight": down, f"base_model.model.{path}.lora_B.weight": up}
        rows = torch.arange(0, layer.out_features, 97)
        updates[path.removeprefix("transformer.")] = ALPHA / RANK * up[rows] @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))
    return pipeline, updates


@pytest.mark.parametrize("shape", ["flux-dev", "flux2-klein-4b"])
@pytest.mark.parametrize("only", [("",), ("to_q", "to_v", "proj_mlp")])
def test_diffusers_reads_what_is_written(tmp_path: Path, shape: str, only: tuple[str, ...]) -> None:
    import diffusers

    pipeline, updates = adapter(tmp_path, shape, only=only)
    reader = getattr(diffusers, pipeline.family.pipeline)
    read = reader.lora_state_dict(convert_to_kohya(tmp_path, pipeline))
    read = read[0] if isinstance(read, tuple) else read
    for path, update in updates.items():
        down, up = (read[f"transformer.{path}.lora_{side}.weight"] for side in "AB")
        found = up[torch.arange(0, up.shape[0], 97)] @ down
        assert (found - update).abs().max() <= 1e-5 * update.abs().max(), path
    others = [name for name in read if name.endswith("lora_B.weight") and not _named(name, updates)]
    assert all(float(read[name].abs().max()) == 0 for name in others), "a layer without adapter is changed"


def _named(name: str, updates: dict[str, Tensor]) -> bool:
    return name.removeprefix("transformer.").removesuffix(".lora_B.weight") in updates


@pytest.mark.slow
def test_flux_draws_the_same_picture_with_either_file(tmp_path: Path) -> None:
    """At its published width, which diffusers' reader of kohya's names takes for granted; a block of each kind."""
    from PIL import ImageChops

    pipeline, _ = adapter(tmp_path, "flux-dev")
    write_for_diffusers(tmp_path)
    save_file(convert_to_kohya(tmp_path, pipeline), tmp_path / "kohya.safetensors")
    flux, pictures = _flux(pipeline), {}
    for name in (None, DIFFUSERS_FILE, "kohya.safetensors"):
        if name is not None:
            flux.load_lora_weights(tmp_path, weight_name=name)
        draw = torch.Generator().manual_seed(1)
        text, pooled = torch.randn(1, 8, 4096, generator=draw), torch.randn(1, 768, generator=draw)
        sizes = {"height": 32, "width": 32, "num_inference_steps": 2}
        pictures[name] = flux(prompt_embeds=text, pooled_prompt_embeds=pooled, generator=draw, **sizes).images[0]
        flux.unload_lora_weights()
    far = {
        name: np.abs(np.asarray(ImageChops.difference(picture, pictures[DIFFUSERS_FILE]))).max()
        for name, picture in pictures.items()
    }
    assert far["kohya.safetensors"] <= 1 and far[None] > 20, far


def _flux(pipeline: Pipeline) -> Any:
    """diffusers' pipeline around a transformer of these shapes, without text encoders."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    transformer = pipeline.build_empty_denoiser()
    values = np.random.default_rng(0).uniform(-0.02, 0.02, 2**20 + 7).astype(np.float32)
    own = {
        name: torch.from_numpy(np.resize(values, tuple(each.shape))) for name, each in transformer.named_parameters()
    }
    transformer.load_state_dict(own, assign=True)
    flux = FluxPipeline(
        transformer=transformer,
        vae=vae(16, shift_factor=0.1159, scaling_factor=0.3611),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        **dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")),
    )
    flux.set_progress_bar_config(disable=True)
    return flux


def test_a_reader_of_the_names_of_sd3_finds_every_update(tmp_path: Path) -> None:
    pipeline, updates = adapter(tmp_path, "sd3.5-medium")
    written = convert_to_kohya(tmp_path, pipeline)
    found = {}
    for number in range(2):
        for name, layers in SPLITS["sd3.5-medium"]:
            key = f"lora_unet_{name.format(i=number)}"
            if f"{key}.alpha" not in written:
                continue
            down, up = (written.pop(f"{key}.lora_{side}.weight") for side in ("down", "up"))
            scale = float(written.pop(f"{key}.alpha")) / down.shape[0]
            for layer, rows in zip(layers, up.chunk(len(layers)), strict=True):
                picked = rows[torch.arange(0, rows.shape[0], 97)]
                found[f"transformer_blocks.{number}.{layer}"] = scale * picked @ down
    assert not written and found.keys() == updates.keys()
    for path, update in updates.items():
        assert (found[path] - update).abs().max() <= 1e-5 * update.abs().max(), path


def test_magnitudes_of_dora_are_refused(tmp_path: Path) -> None:
    pipeline, _ = adapter(tmp_path, "flux-dev", only=("to_q",))
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS | {"use_dora": True}))
    with pytest.raises(UserError, match=r"^lora\.dora=true: .*--format peft"):
        convert_to_kohya(tmp_path, pipeline)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_patterns_of_a_foreign_adapter_are_refused(key: str, tmp_path: Path) -> None:
    pipeline, _ = adapter(tmp_path, "flux-dev", only=("to_q",))
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS | {key: {"to_q": 4}}))
    with pytest.raises(UserError, match=rf"adapter_config\.json {key}={{'to_q': 4}}: .*--format peft"):
        convert_to_kohya(tmp_path, pipeline)


def test_a_layer_without_such_a_name_is_refused(tmp_path: Path) -> None:
    pipeline, _ = adapter(tmp_path, "flux-dev")
    names = {f"base_model.model.transformer.x_embedder.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"}
    save_file(names, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"^x_embedder: this adapted layer has no name in kohya's format"):
        convert_to_kohya(tmp_path, pipeline)
