"""Checkpoints in each form of FP8 that is published, made of tiny models that were saved in full precision."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK = 32
"""Rows and columns of a block here; 128 in published checkpoints, which would be one block for a tiny matrix."""
FORMS = ("blocks", "tensor", "channel")
LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def store_in_fp8(folder: Path, form: str, *, leave_out: Sequence[str] = ("lm_head",), block: int = BLOCK) -> Path:
    """Store the linear layers of a saved model in FP8, under the names and in config.json as they are published.

    blocks: Qwen3-FP8, DeepSeek-V3; tensor: Ministral 3, with static scales of inputs; channel: compressed-tensors.
    """
    import torch
    from safetensors.torch import load_file, save_file

    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if not name.endswith(LINEAR) or path.endswith(tuple(leave_out)):
            stored[name] = value
        elif form == "blocks":
            stored[name], stored[f"{name}_scale_inv"] = quantized_blocks(value, block)
        elif form == "tensor":
            scale = value.abs().max() / 448
            stored[name] = (value / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.bfloat16().clone()
            stored[f"{path}.activation_scale"] = torch.tensor(0.02, dtype=torch.bfloat16)
        else:
            scale = value.abs().amax(1, keepdim=True) / 448
            stored[name] = (value / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale.bfloat16()
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = announced(form, leave_out, block)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantized_blocks(value: Any, block: int) -> tuple[Any, Any]:
    """Codes [O, I] and a scale for each block, of which the last may be short."""
    import torch

    rows, cols = value.shape
    grid = (-(-rows // block), -(-cols // block))
    padded = torch.nn.functional.pad(value, (0, grid[1] * block - cols, 0, grid[0] * block - rows))
    blocks = padded.view(grid[0], block, grid[1], block)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :cols].contiguous(), scales


def announced(form: str, leave_out: Sequence[str], block: int) -> dict[str, Any]:
    """config.json's quantization_config."""
    if form == "channel":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(leave_out),
        }
    static = form == "tensor"
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if static else "dynamic",
        "weight_block_size": None if static else [block, block],
        "modules_to_not_convert": list(leave_out),
    }


def write_dequantized(folder: Path, target: Path) -> Path:
    """The same model in 32 bits, by the definition of each form and nothing of ours."""
    import torch
    from safetensors.torch import load_file, save_file

    stored, plain = load_file(folder / "model.safetensors"), {}
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config").get("weight_block_size") or [1, 1]
    for name, value in stored.items():
        if value.dtype == torch.float8_e4m3fn:
            scale = stored[f"{name}_scale_inv" if f"{name}_scale_inv" in stored else f"{name}_scale"].float()
            if scale.dim() == 2 and scale.shape[-1] * block[1] >= value.shape[1] > 1 and block[1] > 1:
                scale = scale.repeat_interleave(block[0], 0)[: len(value)]
                scale = scale.repeat_interleave(block[1], 1)[:, : value.shape[1]]
            plain[name] = value.float() * scale
        elif not name.endswith("_scale") and not name.endswith("_scale_inv"):
            plain[name] = value
    target.mkdir(parents=True)
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    for file in folder.iterdir():
        if file.name.startswith(("token", "chat", "special", "generation")):
            (target / file.name).write_bytes(file.read_bytes())
    return target
