"""Export of an adapter in the format of kohya's scripts, which ComfyUI and others read.

A layer is named after its path in the model's original implementation, with underscores for dots. Next to the factors
`lora_down` and `lora_up` it has a tensor `alpha`; the adapter is scaled by alpha / rank. Where the original has one
matrix for several of diffusers (queries, keys, values), their factors are combined without loss: downs are stacked,
ups are placed along the diagonal, and ranks and alphas add up.

Sources: tensor names in the checkpoints of SD3.5, FLUX.1 and FLUX.2; kohya-ss/sd-scripts, networks/lora_flux.py and
lora_sd3.py.
"""

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from trainer.config import UserError
from trainer.config.adapter_settings import read_adapter_settings
from trainer.tasks.images.files import tensors_by_part
from trainer.tasks.images.pipeline import Pipeline

QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
QKV_2 = ("attn2.to_q", "attn2.to_k", "attn2.to_v")
ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
Layers = dict[tuple[str, ...], str]
"""{layers of a block in diffusers: the layer of the original implementation that combines them in this order}."""

_STREAMS: Layers = {
    QKV: "img_attn.qkv",
    ADDED: "txt_attn.qkv",
    ("attn.to_out.0",): "img_attn.proj",
    ("attn.to_add_out",): "txt_attn.proj",
}
_FLUX: Layers = {
    ("ff.net.0.proj",): "img_mlp.0",
    ("ff.net.2",): "img_mlp.2",
    ("ff_context.net.0.proj",): "txt_mlp.0",
    ("ff_context.net.2",): "txt_mlp.2",
}
_FLUX_2: Layers = {
    ("ff.linear_in",): "img_mlp.0",
    ("ff.linear_out",): "img_mlp.2",
    ("ff_context.linear_in",): "txt_mlp.0",
    ("ff_context.linear_out",): "txt_mlp.2",
}
_SD3: Layers = {
    QKV: "x_block.attn.qkv",
    QKV_2: "x_block.attn2.qkv",
    ADDED: "context_block.attn.qkv",
    ("attn.to_out.0",): "x_block.attn.proj",
    ("attn2.to_out.0",): "x_block.attn2.proj",
    ("attn.to_add_out",): "context_block.attn.proj",
    ("ff.net.0.proj",): "x_block.mlp.fc1",
    ("ff.net.2",): "x_block.mlp.fc2",
    ("ff_context.net.0.proj",): "context_block.mlp.fc1",
    ("ff_context.net.2",): "context_block.mlp.fc2",
}
BLOCKS: dict[str, dict[str, tuple[str, Layers]]] = {
    "sd3": {"transformer_blocks": ("joint_blocks", _SD3)},
    "flux": {
        "transformer_blocks": ("double_blocks", _STREAMS | _FLUX),
        "single_transformer_blocks": ("single_blocks", {(*QKV, "proj_mlp"): "linear1", ("proj_out",): "linear2"}),
    },
    "flux2": {
        "transformer_blocks": ("double_blocks", _STREAMS | _FLUX_2),
        "single_transformer_blocks": (
            "single_blocks",
            {("attn.to_qkv_mlp_proj",): "linear1", ("attn.to_out",): "linear2"},
        ),
    },
}
"""{family: {list of blocks: (its original name, its layers)}}. UNets keep diffusers' names."""


def convert_to_kohya(folder: Path, pipeline: Pipeline) -> dict[str, Tensor]:
    """Return the adapter in `folder` as kohya tensors. Raises UserError for DoRA or a layer without a kohya name."""
    settings, factors = read_adapter_settings(folder), defaultdict[str, dict[str, Tensor]](dict)
    if settings.get("use_dora"):
        raise UserError(
            "lora.dora=true: programs that read kohya's format do not agree on DoRA's magnitudes; export with --format "
            "peft, which diffusers loads, or --format hf, the whole pipeline"
        )
    for name, tensor in tensors_by_part(folder).items():
        path, _, side = name.partition(".lora_")
        factors[path]["down" if side[0] == "A" else "up"] = tensor
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    members: dict[str, tuple[str, ...]] = {}
    for path in factors:
        name, at, layers = _locate(path, pipeline)
        groups[name][at] = path
        members[name] = layers
    found: dict[str, Tensor] = {}
    for name, paths in groups.items():
        downs = [factors[path]["down"] for _, path in sorted(paths.items())]
        ups = {at: factors[path]["up"] for at, path in paths.items()}
        rank = downs[0].shape[0]
        scale = float(settings["lora_alpha"]) * (rank**0.5 if settings.get("use_rslora") else 1.0)
        key = name.replace(".", "_")
        if len(members[name]) == 1:
            down, up = downs[0], ups[0]
        else:
            down, up = torch.cat(downs), _build_block_diagonal(ups, members[name], pipeline)
        found[f"{key}.lora_down.weight"], found[f"{key}.lora_up.weight"] = down.contiguous(), up.contiguous()
        found[f"{key}.alpha"] = torch.tensor(scale * len(downs))
    return found


def _locate(path: str, pipeline: Pipeline) -> tuple[str, int, tuple[str, ...]]:
    """Return the layer's kohya name, its index among the layers combined under this name, and all of these."""
    part, _, own = path.partition(".")
    if part.startswith("text_encoder"):
        number = part.removeprefix("text_encoder").lstrip("_") or ("" if pipeline.family.name == "sd" else "1")
        return f"lora_te{number}.{own}", 0, (own,)
    if pipeline.family.name not in BLOCKS:
        return f"lora_unet.{own}", 0, (own,)
    pieces = own.split(".", 2)
    blocks, layers = BLOCKS[pipeline.family.name].get(pieces[0], ("", {}))
    for together, name in layers.items():
        if pieces[-1] in together:
            return f"lora_unet.{blocks}.{pieces[1]}.{name}", together.index(pieces[-1]), together
    raise UserError(
        f"{own}: an adapted layer without a name in kohya's format; export with --format peft, which diffusers loads, "
        "or train attention and feed-forward alone (lora.target_modules: all-linear)"
    )


def _build_block_diagonal(ups: dict[int, Tensor], together: tuple[str, ...], pipeline: Pipeline) -> Tensor:
    """Combine factors into one of [sum of widths, sum of ranks], with zeros for layers without an adapter."""
    settings = pipeline.settings
    inner = int(settings["num_attention_heads"]) * int(settings["attention_head_dim"])
    widths = [4 * inner if name == "proj_mlp" else inner for name in together]
    up = torch.zeros(sum(widths), sum(each.shape[1] for each in ups.values()), dtype=next(iter(ups.values())).dtype)
    column = 0
    for at, each in sorted(ups.items()):
        row = sum(widths[:at])
        up[row : row + widths[at], column : column + each.shape[1]] = each
        column += each.shape[1]
    return up
