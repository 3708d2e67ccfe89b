"""Check that the stored weights have the names and shapes that config.json implies.

transformers initializes missing weights randomly and only logs a warning. Here its loading code, including renamings,
fused experts, tied weights and ignored names, runs on meta tensors before any weight is read.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.config import UserError
from trainer.model.model_kind import SCORE_WEIGHT, has_score_head, is_mxfp4
from trainer.model.mxfp4 import read_mxfp4_shapes, strip_quantization
from trainer.model.stored_four_bit import FourBitFiles, FourBitFormat
from trainer.model.stored_fp8 import SAME_MODEL_FIX, find_scales, read_fp8_shapes
from trainer.model.stored_layout import BLOCKS, SCALES
from trainer.model.stored_settings import find_stored_format
from trainer.model.tensor_files import SafetensorsFiles


def check_weights_fit(setting: str, model_class: Any, model_config: Any, files: SafetensorsFiles) -> list[str]:
    """Check the headers of the files against the model; return warnings about unused tensors.

    Raises UserError, prefixed with `setting`, if weights are missing or have the wrong shape, if config.json does not
    declare their quantization, or if entire layers are unused.
    """
    format_ = find_stored_format(model_config)
    if isinstance(format_, FourBitFormat):
        stored = FourBitFiles(files, format_, setting).read_shapes()
    elif format_ is not None:
        stored = read_fp8_shapes(setting, files, format_)
    else:
        _check_types(setting, files)
        stored = read_mxfp4_shapes(setting, files.read_shapes(), declared=is_mxfp4(model_config))
    model_config = strip_quantization(model_config)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in stored.items()}
    with suppress_loading_output():
        try:
            model, info = model_class.from_pretrained(
                None,
                config=model_config,
                state_dict=tensors,
                dtype=torch.float32,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except RuntimeError:  # per-expert tensors that cannot be merged
            raise UserError(
                f"{setting}: the stored tensors do not match config.json; {SAME_MODEL_FIX}, or download the model again"
            ) from None
    return check_loading_info(setting, model, info)


def check_loading_info(setting: str, model: Any, info: dict[str, Any]) -> list[str]:
    """Check transformers' `output_loading_info`; return warnings and raise UserError as `check_weights_fit` does."""
    name, expected = type(model).__name__, len(model.state_dict())
    if has_score_head(model.config):
        # A language model's checkpoint has an output head instead of a score head.
        info = info | {
            "missing_keys": set(info["missing_keys"]) - {SCORE_WEIGHT},
            "unexpected_keys": set(info["unexpected_keys"]) - {"lm_head.weight"},
        }
    extra = _describe_extra_layers(model, info["unexpected_keys"])
    if info["missing_keys"]:
        first, count = min(info["missing_keys"], key=_build_natural_sort_key), len(info["missing_keys"])
        if stored := next((key for key in info["unexpected_keys"] if key.endswith(f".{first}")), None):
            fix = f"remove {stored.removesuffix(first)} from the names of the tensors"
            raise UserError(f"{setting}: {first} is stored as {stored}; {fix}")
        raise UserError(
            f"{setting}: {count} of the {expected} weights that config.json describes for {name} are missing "
            f"(first: {first}) and would be random; {SAME_MODEL_FIX}, or download the model again"
        )
    if info["mismatched_keys"]:
        wrong = sorted(info["mismatched_keys"], key=lambda item: _build_natural_sort_key(item[0]))
        first, shape, expected_shape = wrong[0]
        raise UserError(
            f"{setting}: {len(wrong)} of {expected} weights do not match config.json (first: {first} has shape "
            f"{tuple(shape)}, config.json says {tuple(expected_shape)}); {SAME_MODEL_FIX}"
        )
    if extra:
        raise UserError(f"{setting}: config.json describes {extra}, which would not be loaded; {SAME_MODEL_FIX}")
    unused = sorted(info["unexpected_keys"], key=_build_natural_sort_key)
    return (
        [f"{len(unused)} stored tensors are not part of {name} and are ignored (first: {unused[0]})"] if unused else []
    )


def _describe_extra_layers(model: nn.Module, unexpected: set[str]) -> str:
    """Describe stored layers that the model lacks; return an empty string if there are none.

    Example: "2 layers in model.layers, but the files have 1 more". Extra layers for multi-token prediction are allowed.
    """
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    allowed = int(getattr(text, "num_nextn_predict_layers", 0) or 0)
    beyond: dict[str, set[int]] = defaultdict(set)
    lists = {path: len(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for name in unexpected:
        for match in re.finditer(r"\.(\d+)\.", name):
            path = name[: match.start()]
            for list_path, length in lists.items():
                if (list_path == path or list_path.endswith(f".{path}")) and int(match[1]) >= length:
                    beyond[list_path].add(int(match[1]))
    for path, indices in beyond.items():
        if len(indices) > allowed:
            return f"{lists[path]} layers in {path}, but the files have {len(indices)} more"
    return ""


def _check_types(setting: str, files: SafetensorsFiles) -> None:
    """Raise UserError if weights are stored in 8 bits or less, because they would be loaded without their scales."""
    if scales := find_scales(files):
        first = min(scales, key=_build_natural_sort_key)
        raise UserError(f"{setting}: {first} is stored in FP8, but config.json does not declare it; {SAME_MODEL_FIX}")
    for name, kind in sorted(files.read_types().items(), key=lambda item: _build_natural_sort_key(item[0])):
        is_packed = name.endswith((BLOCKS, SCALES))
        if kind.startswith("F8") or (kind in ("I8", "U8") and not is_packed and len(files.read_shapes()[name]) > 1):
            fix = "use the full-precision model it was made from"
            raise UserError(f"{setting}: {name} is stored in 8 bits or less ({kind}), unlike the other weights; {fix}")
        if name.endswith(".weight") and kind in ("BOOL", "I16", "I32", "I64", "U16", "U32", "U64"):
            raise UserError(f"{setting}: {name} is stored as integers ({kind}); {SAME_MODEL_FIX}")


def _build_natural_sort_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


@contextmanager
def suppress_loading_output() -> Iterator[None]:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
