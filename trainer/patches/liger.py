"""Liger's kernels instead of the model's own norms, SwiGLU and rotary embedding, for every architecture it knows.

Of Liger's loss nothing is used: ops/head.py computes head and loss together without waiting for the device.
"""

import importlib.util
import inspect
from collections.abc import Collection
from typing import Any

PARTS = {"rms_norm": "norms", "swiglu": "activation", "rope": "rotary embedding"}


KNOWN = frozenset((
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3",
    "granite", "olmo2", "olmo3", "glm4", "smollm3", "falcon_h1", "llama4_text", "gpt_oss", "hunyuan_v1_dense",
))  # fmt: skip
"""The model types of liger-kernel 0.8.5, for machines that need not have it: where an estimate is made for others."""


def known_models(*, on_gpu: bool) -> frozenset[str]:
    """The model types that the installed package knows; none where there is no GPU or no package."""
    if not on_gpu or importlib.util.find_spec("liger_kernel") is None:
        return frozenset()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return frozenset(MODEL_TYPE_TO_APPLY_LIGER_FN)


def why_not_liger(model_type: str, known: Collection[str], *, on_gpu: bool, compiled: bool) -> str:
    """Why Liger's kernels are not for this run; empty if they are. `compiled`: torch.compile fuses these itself."""
    if not on_gpu:
        return "there is no GPU"
    if compiled:
        return "torch.compile fuses them"
    if not known:
        return "liger-kernel is not installed; pip install liger-kernel"
    return "" if model_type in known else f"liger-kernel does not know {model_type}"


def apply_liger(model: Any, done: Collection[str] = ()) -> None:
    """Patch a model that Liger knows, in place. `done`: names of the parts (of PARTS) that are ours already."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    patch = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(patch).parameters
    wanted: dict[str, Any] = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    if has_experts(model):
        wanted |= {"swiglu": False, "geglu": False}  # its experts are computed in another way, past the adapters
    wanted |= dict.fromkeys(done, False)
    patch(model=model, **{name: value for name, value in wanted.items() if name in known})


def has_experts(model: Any) -> bool:
    """Whether the model's feed-forward parts are experts."""
    return any("experts" in name for name, _ in model.named_modules())


def line_of(done: Collection[str], refusal: str) -> str:
    """For the console: what Liger computes, or why the model's own code computes what is not ours."""
    what = ", ".join(name for part, name in PARTS.items() if part not in done)
    if not what:
        return "Liger's kernels: nothing left for them"
    return f"{what}: the model's own ({refusal})" if refusal else f"{what}: Liger's kernels"
