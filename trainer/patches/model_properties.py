"""Determine a model's properties by running its own code without weights, instead of from its name."""

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer.contract.known_versions import patch_objects, replaces, require
from trainer.model.model_kind import supports_sdpa
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.patches.attention_sinks import has_sinks
from trainer.patches.norm_mlp_rope import plan_elementwise
from trainer.patches.plain_head import describe_plain_head_problem, measure_head_factor

CAPPED = "the model caps its logits"
_PROBE_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class ModelProperties:
    """Model properties that decisions depend on; a reason is empty if the model supports the feature."""

    sdpa: bool
    """Whether the model supports torch's sdpa; otherwise its attention is eager."""
    registry: bool
    """Whether the model uses transformers' attention registry, where our attention can be registered."""
    masked: bool
    """Whether attention receives a mask even for a single text, where causal attention needs none."""
    sinks: bool
    """Whether the attention has sinks, which transformers supports for packs only with kernels from the Hub."""
    head: str | None
    """Why head and loss cannot be fused; None if this is only known on the device."""
    caps: bool
    """Whether the model does more than scale the head's output, such as apply a tanh."""
    elementwise: dict[str, str]
    """Why norms (`rms_norm`), SwiGLU (`swiglu`) and rotary embedding (`rope`) are not replaced everywhere."""


def inspect_base_model(model: Any, *, frozen_norms: bool) -> ModelProperties:
    model.float()  # the configuration may name another dtype
    return ModelProperties(
        sdpa=supports_sdpa(model),
        registry=bool(require(model, "_supports_attention_backend", "transformers")),
        masked=_attends_with_mask(model),
        sinks=has_sinks(model),
        head=None,
        caps=False,
        elementwise=plan_elementwise(model, frozen_norms=frozen_norms).explain_unreplaced_parts(),
    )


class _StopPass(Exception):
    """Raised to stop a forward pass early."""


class _FirstAttention(TorchFunctionMode):
    """Stops a forward pass at its first attention, and records whether the attention received a mask."""

    masked = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.masked = (args[3:4] or ((kwargs or {}).get("attn_mask"),))[0] is not None
            raise _StopPass
        return function(*args, **(kwargs or {}))


def _attends_with_mask(model: Any) -> bool:
    with torch.no_grad(), suppress(_StopPass, *_PROBE_ERRORS), _FirstAttention() as attention:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"), use_cache=False)
    return attention.masked


class _DecoderOutput(tuple[torch.Tensor]):
    """A decoder output with hidden states that can be read by index or by name."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


@replaces("the forward of everything below the head on the meta device")
def describe_head_problem(model: Any) -> str | None:
    """Return why the loss cannot be fused with the output head; "" if it can, None if that is unknown.

    The model must be on the meta device. All modules below the head return zeros, so only the head and later code run.
    """
    base = find_base_model(model)
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return describe_plain_head_problem(None)
    head = base.get_output_embeddings()
    if reason := describe_plain_head_problem(head):
        return reason
    below = [part for part in (base.base_model, base.get_decoder()) if part is not None and part is not base]
    if not below:
        return None
    states = _DecoderOutput((torch.zeros(1, 2, head.in_features),))
    try:
        with patch_objects(*((part, "forward", lambda *_, **__: states) for part in below)):
            factor = measure_head_factor(base, head, torch.zeros(1, 2, dtype=torch.long))
    except _PROBE_ERRORS:
        return None
    return "" if factor is not None else CAPPED
