"""Merge base model and adapter into one model that needs neither PEFT nor zerolora.

Each adapted weight becomes W + s B A, added in fp32 and rounded once to the model's dtype. The base is read in full
precision for QLoRA runs too, because requantizing the sum to 4 bits would lose most of the adapter. A base that is only
published in MXFP4 (gpt-oss) is requantized to MXFP4, and the error is printed. An FP8 base is dequantized to the
requested dtype, a 4-bit base (GPTQ, AWQ, W4A16, NVFP4) to 16 bits, or requantized to its own format (--dtype stored).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer.checkpoint.finished_run import (
    FinishedRun,
    attach_adapter,
    choose_default_device,
    load_full_base,
    load_saved_tokenizer,
)
from trainer.checkpoint.identity import ALLOW_MISMATCH_OPTION
from trainer.commands.atomic_output import check_output, move_into_place, temporary_output
from trainer.commands.integers import IntegerMerge
from trainer.config import RunConfig, UserError
from trainer.model import mxfp4
from trainer.model.base import load_model_config
from trainer.model.integer_weights import IntegerKind
from trainer.model.model_kind import is_mxfp4
from trainer.model.saved_adapter import check_separate_weights, scale_adapter
from trainer.model.stored_four_bit import FourBitFiles, FourBitFormat, parse_four_bit_format
from trainer.model.stored_fp8 import Fp8Format
from trainer.model.stored_layout import BLOCKS, SCALES, map_stored_tensors
from trainer.model.stored_settings import find_stored_format
from trainer.model.tensor_files import SafetensorsFiles
from trainer.model.tokenizer_files import read_tokenizer_files, write_files
from trainer.monitor.report.recorded import read_run
from trainer.parallel.engine.deepspeed_engine import DTYPES

SHARD_SIZE = "5GB"


def merge(
    run: FinishedRun, output: Path, *, dtype: str = "auto", scale: float = 1.0, quantize: IntegerKind | None = None
) -> Path:
    """Write the merged model and its tokenizer to `output`, and return `output`.

    `dtype`: `auto` is the stored base's dtype, or with `quantize` the training dtype; `stored` the base's 4-bit format.
    `scale`: factor for the adapter's update.
    `quantize`: integer format of the adapted layers (trainer/commands/integers.py).

    Raises UserError if `output` is not empty, or if the base's format cannot be merged; RuntimeError if the disk is
    full, or if the saved weights differ from those in memory or are not finite.
    """
    check_output(output)
    merged = build_merged_model(run, dtype=dtype, scale=scale, quantize=quantize)
    with temporary_output(output) as folder:
        save_merged_model(folder, *merged)
        move_into_place(folder, output)
    return output


def _prepare_integers(run: FinishedRun, kind: IntegerKind, dtype: str) -> IntegerMerge:
    """Return an IntegerMerge that quantizes the adapted layers to `kind`.

    A `dtype` of `auto` is the training dtype. Prints a note if the run was not trained for `kind`. Raises
    UserError if the base is in MXFP4 or a library is missing.
    """
    if is_mxfp4(load_model_config(run.config.base_model, run.config.model)):
        raise UserError(
            f"--quantize={kind}: the base is stored in MXFP4, and merging keeps that format; merge without --quantize"
        )
    qat = run.config.training.qat
    if qat != kind:
        how = "trained without QAT" if qat is None else f"trained for {qat}"
        print(f"note: the run was {how} (training.qat); quantizing after training loses more accuracy", file=sys.stderr)
    if dtype == "auto":
        dtype = read_run(run.run_dir).get("precision") or "auto"
    return IntegerMerge(kind, _choose_dtype(run, dtype), choose_default_device())


def build_merged_model(
    run: FinishedRun, *, dtype: str = "auto", scale: float = 1.0, quantize: IntegerKind | None = None
) -> tuple[Any, Any, dict[str, Tensor] | None]:
    """Return the merged model on the CPU, its tokenizer, and the state dict to save (None: the model's own).

    Raises UserError if the base's stored format cannot be merged in `dtype`.
    """
    tokenizer = load_saved_tokenizer(run)
    integers = None if quantize is None else _prepare_integers(run, quantize, dtype)
    torch_dtype = _choose_dtype(run, dtype)  # raises if the base cannot be merged
    torch_dtype = torch_dtype if integers is None else integers.dtype
    base = load_full_base(run, torch_dtype)
    types = {name: tensor.dtype for name, tensor in (*base.named_parameters(), *base.named_buffers())}
    # With an fp32 adapter only the sum is rounded.
    adapted = attach_adapter(base, tokenizer, run, in_fp32=True)
    scale_adapter(adapted, scale)
    _untie_head(adapted)
    check_separate_weights(adapted, "merge")
    if integers is not None:
        integers.quantize_adapted_layers(adapted)
    model = adapted.merge_and_unload()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(types.get(name, torch_dtype))
    model.config.use_cache = True  # disabled in training
    if integers is not None:
        return model, tokenizer, integers.build_state_dict(model)
    if dtype == "stored":
        return model, tokenizer, requantize_four_bit(model, run.config)
    return model, tokenizer, requantize_mxfp4(model, run.config) if dtype == "auto" else None


def save_merged_model(folder: Path, model: Any, tokenizer: Any, state_dict: dict[str, Tensor] | None) -> None:
    """Write the result of `build_merged_model` and verify the weights. Raises RuntimeError if they differ."""
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE, state_dict=state_dict)
    write_files(read_tokenizer_files(tokenizer), folder)
    verify_saved_weights(model, folder, state_dict)


def _untie_head(adapted: Any) -> None:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.other import TrainableTokensWrapper

    base = adapted.get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if not getattr(base.config, "tie_word_embeddings", False) or not any(
        isinstance(layer, LoraLayer | ModulesToSaveWrapper) for layer in (head, embedding)
    ):
        return
    original = head.original_module if isinstance(head, ModulesToSaveWrapper | TrainableTokensWrapper) else head
    original = original.get_base_layer() if isinstance(original, LoraLayer) else original
    original.weight = nn.Parameter(original.weight.detach().clone(), requires_grad=False)
    base.config.tie_word_embeddings = False
    base.all_tied_weights_keys = {}


def _choose_dtype(run: FinishedRun, dtype: str) -> torch.dtype:
    """Return the merged model's dtype; `auto` is the stored base's dtype (fp32 if none, bf16 if unsupported).

    Raises UserError if the base's quantized format cannot be merged; an FP8 base needs an explicit dtype.
    """
    config = load_model_config(run.config.base_model, run.config.model)
    stored_format = find_stored_format(config)
    if dtype == "stored" and not isinstance(stored_format, FourBitFormat):
        raise UserError(f"--dtype=stored: {run.config.base_model} is not stored as GPTQ, AWQ, W4A16 or NVFP4; use auto")
    if isinstance(stored_format, Fp8Format) and dtype == "auto":
        raise UserError(
            f"base_model={run.config.base_model}: is stored in FP8, which would round away most of the adapter; pass "
            f"the 16-bit model with --base-model and {ALLOW_MISMATCH_OPTION}, or use --dtype bf16"
        )
    if getattr(config, "quantization_config", None) is not None and not is_mxfp4(config) and stored_format is None:
        fix = f"pass the original model with --base-model and {ALLOW_MISMATCH_OPTION}"
        raise UserError(f"base_model={run.config.base_model}: is quantized, and merging needs full precision; {fix}")
    if dtype not in ("auto", "stored"):
        return DTYPES[dtype]
    stored = getattr(config.get_text_config(), "dtype", None) or torch.float32
    stored = getattr(torch, stored) if isinstance(stored, str) else stored
    return stored if stored in DTYPES.values() else torch.bfloat16


def verify_saved_weights(model: nn.Module, folder: Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Read the saved weights back. Raises RuntimeError if a tensor is missing, differs or is not finite.

    `state_dict` is the saved state dict if it is not the model's own.
    """
    expected = model.state_dict() if state_dict is None else state_dict
    stored_elements = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():
                value = handle.get_tensor(name)
                stored_elements += value.numel()
                if value.is_floating_point() and not torch.isfinite(value.float()).all():
                    raise RuntimeError(
                        f"{name}: merged weights are not finite in {value.dtype}; merge with --dtype bf16 or fp32"
                    )
                # transformers stores some layers (experts) under names that differ from those in memory.
                if name in expected and not torch.equal(value, expected[name]):
                    raise RuntimeError(f"{file.name}: {name} differs from the merged weight; check the disk")
    elements = sum(parameter.numel() for parameter in model.parameters())
    if state_dict is not None:
        elements = sum(value.numel() for value in {value.data_ptr(): value for value in state_dict.values()}.values())
    if stored_elements < elements:
        problem = f"has {stored_elements:,} of the model's {elements:,} weights"
        raise RuntimeError(f"{folder}: {problem}; check the disk")


def requantize_mxfp4(model: Any, config: RunConfig) -> dict[str, Tensor] | None:
    """Return the merged state dict in MXFP4 and set `quantization_config`; None if the base is not in MXFP4.

    Prints the rounding error and the adapter's change, both as root mean squares over all experts.
    """
    stored_config = load_model_config(config.base_model, config.model)
    if not is_mxfp4(stored_config):
        return None
    files = SafetensorsFiles(config.base_model, config.model)
    values: dict[str, Tensor] = dict(model.state_dict())
    size = changed = lost = 0.0
    for name, stored in map_stored_tensors(model, files, config.base_model).items():
        if not stored.is_mxfp4:
            continue
        merged = values.pop(name)
        parts: dict[str, list[Tensor]] = {BLOCKS: [], SCALES: []}
        for index in range(len(merged)):
            blocks, scales = (files.read(stored.names[part][0], index)[0] for part in (BLOCKS, SCALES))
            base = mxfp4.dequantize(blocks, scales, torch.float32).view(merged.shape[2], merged.shape[1])
            exact = merged[index].t().float()
            quantized = mxfp4.quantize(exact) if not torch.equal(exact, base) else (blocks, scales)
            written = mxfp4.dequantize(*quantized, torch.float32).view_as(exact)
            size += float(exact.square().sum())
            changed += float((exact - base).square().sum())
            lost += float((written - exact).square().sum())
            for part, value in zip((BLOCKS, SCALES), quantized, strict=True):
                parts[part].append(value)
        values |= {name + part: torch.stack(tensors) for part, tensors in parts.items()}
    model.config.quantization_config = stored_config.quantization_config
    print(_describe_requantization_error("experts", "MXFP4", changed, lost, size), file=sys.stderr)
    return values


def requantize_four_bit(model: Any, config: RunConfig) -> dict[str, Tensor]:
    """Return the merged state dict in the base's 4-bit format, with its scales, and set `quantization_config`."""
    from transformers.core_model_loading import revert_weight_conversion

    stored_config = load_model_config(config.base_model, config.model)
    format_ = parse_four_bit_format(stored_config)
    assert isinstance(format_, FourBitFormat)
    files = FourBitFiles(SafetensorsFiles(config.base_model, config.model), format_, f"base_model={config.base_model}")
    values: dict[str, Tensor] = revert_weight_conversion(model, dict(model.state_dict()))
    size = changed = lost = 0.0
    for name in files.layouts:
        merged, base = values.pop(name), files.read(name)
        parts, written = files.requantize(name, merged.float())
        values |= parts
        size += float(merged.float().square().sum())
        if not torch.equal(merged, base.to(merged.dtype)):
            changed += float((merged.float() - base).square().sum())
            lost += float((written - merged.float()).square().sum())
    model.config.quantization_config = stored_config.quantization_config
    print(_describe_requantization_error("linear layers", format_.name, changed, lost, size), file=sys.stderr)
    return values


def _describe_requantization_error(
    weights: str, format_: str, squared_change: float, squared_error: float, squared_norm: float
) -> str:
    if not squared_change:
        return f"{weights}: unchanged, in {format_}"
    return (
        f"{weights}: requantized to the base's {format_}; the merged weights changed by "
        f"{(squared_error / squared_norm) ** 0.5:.2%} (rounding) and {(squared_change / squared_norm) ** 0.5:.2%} "
        "(adapter); to write them unrounded, use --dtype bf16"
    )
