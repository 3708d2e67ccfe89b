"""Checkpoints in each published 4-bit format, made of tiny models that were saved in full precision.

GPTQ and AWQ are written and read here in numpy, after the layouts of AutoGPTQ and AutoAWQ. W4A16 and NVFP4 are written
and read by compressed-tensors.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GROUP = 32
FORMS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "act-order": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "gptq-rows": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "w4a16": {"strategy": "group", "group_size": GROUP, "symmetric": True},
    "w4a16-zeros": {"strategy": "group", "group_size": GROUP, "symmetric": False},
    "w4a16-rows": {"strategy": "channel", "symmetric": True},
    "nvfp4": {"type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
}  # fmt: skip
LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Any]


def store_in_four_bits(folder: Path, form: str, *, leave_out: Sequence[str] = ("lm_head",)) -> Path:
    """Store the linear layers of a saved model in 4 bits, with the names and the config.json of published models."""
    from safetensors.torch import load_file, save_file

    stored: Tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if not name.endswith(LINEAR) or path.endswith(tuple(leave_out)):
            stored[name] = value
        else:
            parts = _compress(value, form) if _is_compressed(form) else _pack_integers(value, form)
            stored |= {f"{path}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = announced(form, leave_out)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _is_compressed(form: str) -> bool:
    return "quant_method" not in FORMS[form]


def announced(form: str, leave_out: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """config.json's quantization_config."""
    if not _is_compressed(form):
        return FORMS[form] | ({"modules_to_not_convert": list(leave_out)} if form == "awq" else {"lm_head": False})
    group = {"targets": ["Linear"], "weights": _arguments(form), "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized" if form == "nvfp4" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(leave_out),
    }


def _arguments(form: str) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "dynamic": False} | FORMS[form]


def _scheme(form: str) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**_arguments(form)))


def _compressor(form: str) -> Any:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    return NVFP4PackedCompressor if form == "nvfp4" else PackedQuantizationCompressor


def _compress(value: Any, form: str) -> Tensors:
    import torch
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = _scheme(form)
    wide = value.float().unflatten(-1, (-1, scheme.weights.group_size or value.shape[-1]))
    low, high = wide.amin(-1), wide.amax(-1)
    state = {"weight": value.float()}
    if form == "nvfp4":
        state["weight_global_scale"] = generate_gparam(value.min(), value.max())
    scale, zero = calculate_qparams(low, high, scheme.weights, state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    if form == "nvfp4":
        state["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
        del state["weight_zero_point"]
    packed: Tensors = _compressor(form).compress(state, scheme)
    return packed


def _pack_integers(value: Any, form: str) -> Tensors:
    """GPTQ: 8 neighboring inputs in a word; AWQ: 8 interleaved outputs. Zero points: 8 neighboring outputs."""
    import numpy as np
    import torch

    settings, w_IO = FORMS[form], value.float().numpy().T
    size = settings["group_size"] if settings["group_size"] > 0 else len(w_IO)
    g_idx = np.arange(len(w_IO)) // size
    if settings.get("desc_act"):
        g_idx = np.random.default_rng(len(w_IO)).permutation(g_idx)
    low, high = (np.stack([pick(w_IO[g_idx == g], 0) for g in range(g_idx.max() + 1)]) for pick in (np.min, np.max))
    if settings.get("sym"):
        scale = np.maximum(np.maximum(high, -low) / 7, 1e-6)
        zero = np.full_like(scale, 8)
    else:
        scale = np.maximum((high - low) / 15, 1e-6)
        zero = np.clip(np.round(-low / scale), 0, 15)
        zero[:, 0] = 0  # as version 1 of GPTQ stores 15
    scale = scale.astype(np.float16)
    codes = np.clip(np.round(w_IO / scale.astype(np.float32)[g_idx]) + zero[g_idx], 0, 15).astype(np.uint32)
    is_v1, zero = settings["quant_method"] == "gptq" and "checkpoint_format" not in settings, zero.astype(np.uint32)
    if form == "awq":
        parts = {"qweight": _pack_words(codes, AWQ_ORDER), "qzeros": _pack_words(zero, AWQ_ORDER)}
    else:
        parts = {"qweight": _pack_words(codes.T).T, "qzeros": _pack_words(zero - is_v1 & np.uint32(15))}
        parts["g_idx"] = g_idx.astype(np.int32)
    return {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in (parts | {"scales": scale}).items()}


def _pack_words(codes: Any, order: Sequence[int] = range(8)) -> Any:
    import numpy as np

    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for place, column in enumerate(order):
        words |= codes[:, column::8] << np.uint32(4 * place)
    return words.view(np.int32)


def _unpack_words(words: Any, order: Sequence[int] = range(8)) -> Any:
    import numpy as np

    codes = np.zeros((len(words), 8 * words.shape[1]), np.float32)
    for place, column in enumerate(order):
        codes[:, column::8] = words.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15)
    return codes


def _read(parts: Tensors, form: str) -> Any:
    import numpy as np
    import torch

    if form == "nvfp4":  # `decompress` rounds to bf16
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        rows, half = parts["weight_packed"].shape
        codes, scale = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half), parts["weight_scale"].float()
        divisor, wide = parts["weight_global_scale"], torch.float32
        return dequantize(codes.float(), scale, args=_scheme(form).weights, dtype=wide, global_scale=divisor)
    if _is_compressed(form):
        return _compressor(form).decompress(dict(parts), _scheme(form))["weight"].float()
    settings = FORMS[form]
    qweight, qzeros, scale = (parts[name].numpy() for name in ("qweight", "qzeros", "scales"))
    if form == "awq":
        codes, zero = _unpack_words(qweight, AWQ_ORDER), _unpack_words(qzeros, AWQ_ORDER)
        g_idx = np.arange(len(codes)) // settings["group_size"]
    else:
        codes = _unpack_words(np.ascontiguousarray(qweight.T)).T
        zero = (_unpack_words(qzeros) + ("checkpoint_format" not in settings)) % 16
        g_idx = parts["g_idx"].numpy()
    return torch.from_numpy(((codes - zero[g_idx]) * scale.astype(np.float32)[g_idx]).T.copy())


def write_dequantized(folder: Path, target: Path, form: str) -> Path:
    """Write the same model in 32 bits, read by the libraries' definitions and none of our code."""
    from safetensors.torch import load_file, save_file

    stored, plain = load_file(folder / "model.safetensors"), {}
    codes = ".weight_packed" if _is_compressed(form) else ".qweight"
    paths = [name.removesuffix(codes) for name in stored if name.endswith(codes)]
    for path in paths:
        names = [name for name in stored if name.startswith(f"{path}.")]
        plain[f"{path}.weight"] = _read({name.removeprefix(f"{path}."): stored.pop(name) for name in names}, form)
    target.mkdir(parents=True)
    save_file(plain | stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    for file in folder.iterdir():
        if file.name.startswith(("token", "chat", "special", "generation")):
            (target / file.name).write_bytes(file.read_bytes())
    return target
