"""Liger's kernels in the place of the model's own norms, SwiGLU and rotary embedding, for every architecture it knows.

Of Liger's loss nothing is used: ops/head.py computes head and loss together without waiting for the device.
"""

import importlib.util
import inspect
from collections.abc import Collection
from typing import Any, Literal

import torch

from trainer.config import UserError

PARTS = {"rms_norm": "norms", "swiglu": "activation", "rope": "rotary embedding"}


def apply_liger(
    model: Any,
    setting: Literal["auto", "on", "off"],
    device: torch.device,
    *,
    compiled: bool,
    done: Collection[str] = (),
) -> str:
    """Patch the model in place; returns a line for the console.

    `compiled`: torch.compile fuses these operations itself. `done`: Liger's names of the parts (rms_norm, swiglu, rope)
    that are ours already. Raises UserError if `on` cannot be.
    """
    what = ", ".join(name for part, name in PARTS.items() if part not in done)
    if not what:
        return "Liger's kernels: nothing left for them"
    reason = _why_not(model, device, compiled=compiled) if setting != "off" else "ops.liger: off"
    if reason is not None:
        if setting == "on":
            raise UserError(f"ops.liger=on: {reason}; use ops.liger: auto")
        return f"{what}: the model's own ({reason})"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    patch = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(patch).parameters
    wanted: dict[str, Any] = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    if any("experts" in name for name, _ in model.named_modules()):
        wanted |= {"swiglu": False, "geglu": False}  # its experts are computed in another way, past the adapters
    wanted |= dict.fromkeys(done, False)
    patch(model=model, **{name: value for name, value in wanted.items() if name in known})
    return f"{what}: Liger's kernels"


def _why_not(model: Any, device: torch.device, *, compiled: bool) -> str | None:
    if device.type != "cuda":
        return "there is no GPU"
    if compiled:
        return "torch.compile fuses them"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed; pip install liger-kernel"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"liger-kernel does not know {model.config.model_type}"
    return None
