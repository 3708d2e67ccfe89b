"""Export a merged model as one GGUF file for llama.cpp, written with the `gguf` package.

File format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Supports Llama, Mistral, Qwen2 and Qwen3 with
the tokenizers of gguf_vocabulary.py; llama.cpp's convert_hf_to_gguf.py converts others. Like that script, this module
stores matrices in the requested format and vectors in fp32.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, RopeScalingType
from safetensors import safe_open

from trainer.commands.export.gguf_vocabulary import USE_SCRIPT, add_vocabulary
from trainer.config import UserError

# Architecture -> GGUF name, and whether llama.cpp's RoPE rotates adjacent pairs where transformers rotates halves.
ARCHITECTURES = {
    "LlamaForCausalLM": (MODEL_ARCH.LLAMA, True),
    "MistralForCausalLM": (MODEL_ARCH.LLAMA, True),
    "Qwen2ForCausalLM": (MODEL_ARCH.QWEN2, False),
    "Qwen3ForCausalLM": (MODEL_ARCH.QWEN3, False),
}
FORMATS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
# Formats with a numpy dtype; all other formats are written as bytes.
NUMPY_TYPES = {GGMLQuantizationType.F32: numpy.float32, GGMLQuantizationType.F16: numpy.float16}
# safetensors' dtype names -> keys of FORMATS.
FORMAT_BY_DTYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
Array = numpy.ndarray[Any, Any]


def check_architecture(config: Any, format_: str = "gguf") -> None:
    """Raise UserError unless the model, or for formats other than `gguf` its adapter, can be exported."""
    name = (config.architectures or ["unknown"])[0]
    fix = USE_SCRIPT
    if format_ != "gguf":
        fix = "use --format vllm, and convert the output with llama.cpp's convert_lora_to_gguf.py"
    if name not in ARCHITECTURES:
        raise UserError(f"--format {format_}: {name} is not supported (only {', '.join(ARCHITECTURES)}); {fix}")
    if format_ != "gguf":
        return  # adapter files contain no positional encoding
    kind = config.rope_parameters.get("rope_type", "default")
    # llama.cpp reads frequency divisors only for this architecture.
    known = ("default", "linear", "llama3") if ARCHITECTURES[name][0] == MODEL_ARCH.LLAMA else ("default", "linear")
    if kind not in known:
        raise UserError(f"--format gguf: rotary embedding of type {kind} is not supported for {name}; {fix}")
    if config.hidden_act not in ("silu", "swish"):
        raise UserError(
            f"--format gguf: llama.cpp uses SiLU for {name}, but the model uses {config.hidden_act}; use --format hf"
        )


def compute_max_context_length(config: Any) -> int:
    """Return the longest context for which llama.cpp is correct, given that it ignores sliding-window attention."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    context: int = config.max_position_embeddings
    return min(context, window) if window and "sliding_attention" in layers else context


def write_gguf(model_folder: Path, output: Path, *, dtype: str, name: str | None = None) -> str:
    """Write a saved model and its tokenizer to `output`; return the format (for `auto`, the stored weights' format).

    `name` is the model's name in llama.cpp (default: the folder's name). Raises UserError for an unsupported
    architecture or tokenizer, RuntimeError if tensors are missing or have other shapes when read back.
    """
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model_folder)
    check_architecture(config)
    architecture = ARCHITECTURES[config.architectures[0]][0]
    stored = _list_stored_tensors(model_folder, config, dtype)
    dtype = stored[0].dtype if dtype == "auto" else dtype
    writer = GGUFWriter(output, MODEL_ARCH_NAMES[architecture])
    writer.add_name(name or model_folder.name)
    _add_settings(writer, config, FORMATS[dtype][1])
    add_vocabulary(writer, AutoTokenizer.from_pretrained(model_folder), rows=config.vocab_size)
    factors = _compute_frequency_factors(config)
    # Declare all tensors first, then write them one by one: the full model is never in memory.
    for tensor in stored:
        tensor.declare(writer)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in stored:
        writer.write_tensor_data(quants.quantize(tensor.read(), tensor.kind))
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()
    written = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in GGUFReader(output).tensors}
    if any(written.get(tensor.name) != tensor.shape for tensor in stored):
        problem = f"contains {len(written)} tensors (expected {len(stored)}), or tensors of the wrong shape"
        raise RuntimeError(f"{output}: {problem}; check the disk")
    return dtype


@dataclass(frozen=True)
class _SavedTensor:
    file: Path
    original: str
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    dtype: str
    """Stored format, a key of FORMATS."""
    rotary_heads: int | None
    """Number of heads, if rows must be permuted to llama.cpp's order."""

    def declare(self, writer: Any) -> None:
        """Declare name, shape and size, which GGUF stores before all data."""
        if self.kind in NUMPY_TYPES:
            dtype = numpy.dtype(NUMPY_TYPES[self.kind])
            size = math.prod(self.shape) * dtype.itemsize
            writer.add_tensor_info(self.name, self.shape, dtype, size, raw_dtype=self.kind)
        else:
            shape = quants.quant_shape_to_byte_shape(self.shape, self.kind)
            writer.add_tensor_info(self.name, shape, numpy.dtype("uint8"), math.prod(shape), raw_dtype=self.kind)

    def read(self) -> Array:
        """Return the values as fp32, with rotary rows in llama.cpp's order."""
        with safe_open(str(self.file), framework="pt") as handle:
            tensor = handle.get_tensor(self.original)
        if self.rotary_heads:
            tensor = pair_rotary_rows(tensor, self.rotary_heads)
        return tensor.float().numpy()


def _list_stored_tensors(folder: Path, config: Any, dtype: str) -> list[_SavedTensor]:
    architecture, rotates = ARCHITECTURES[config.architectures[0]]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads} if rotates else {}
    stored = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as handle:
            for original in handle.keys():
                part = handle.get_slice(original)
                name = names.get_name(original, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise UserError(f"--format gguf: {original} has no GGUF tensor name; {USE_SCRIPT}")
                current = FORMAT_BY_DTYPE.get(part.get_dtype(), "f32")
                shape = tuple(part.get_shape())
                kind = FORMATS[current if dtype == "auto" else dtype][0] if len(shape) > 1 else GGMLQuantizationType.F32
                if kind == GGMLQuantizationType.Q8_0 and shape[-1] % 32:  # Q8_0 uses blocks of 32 elements
                    kind = GGMLQuantizationType.F16
                rotary_heads = next((count for pattern, count in heads.items() if pattern in name), None)
                stored.append(_SavedTensor(file, original, name, shape, kind, current, rotary_heads))
    return stored


def pair_rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's n rows from [first half, second half] to pairs (0, n/2), (1, n/2 + 1), ..."""
    head = weight.shape[0] // heads
    halves = weight.reshape(heads, 2, head // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def _add_settings(writer: Any, config: Any, file_type: LlamaFileType) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(compute_max_context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _compute_frequency_factors(config: Any) -> Array | None:
    """Return Llama 3.1's scaling of low frequencies as one divisor per frequency [head/2]; None for other models.

    With L the original context: wavelengths above L / low_freq_factor are stretched by `factor`, wavelengths below
    L / high_freq_factor are unchanged, and in between the frequency is interpolated.
    """
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = rope["rope_theta"] ** -(numpy.arange(0, head, 2, dtype=numpy.float64) / head)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    periods = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    unscaled = numpy.clip((periods - low) / (high - low), 0.0, 1.0)
    return (1 / (unscaled + (1 - unscaled) / rope["factor"])).astype(numpy.float32)
