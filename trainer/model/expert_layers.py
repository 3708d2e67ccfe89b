"""Find the fused experts of MoE models in transformers: one module per layer, one tensor for all experts' matrices.

Tensors: `gate_up_proj` [E, 2 I, H] (or `up_proj` without gate) and `down_proj` [E, H, I]; some models transpose them.
Legend: E experts, H hidden, I width of an expert.
"""

import inspect
import re
from typing import Any

from torch import Tensor, nn

from trainer.parallel.engine.linear_layers import find_expert_weights, get_logical_shape

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
USUAL_NAMES = {GATE_UP: ("gate_proj", "up_proj", "w1", "w3"), UP: ("w1",), DOWN: ("w2",)}
"""Names that checkpoints and settings use for the parts of each tensor."""
TOP_K_NAMES = (
    "num_experts_per_tok",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "num_experts_per_token",
    "moe_top_k",
    "top_k",
)
"""Names that configurations use for the number of experts per token."""


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if has_fused_experts(module)}


def has_fused_experts(module: nn.Module) -> bool:
    names = list_expert_tensors(module)
    if DOWN not in names or len(names) < 2 or _find_unknown_parts(module):
        return False
    if takes_all_tokens(module):
        return True
    activation = "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"
    return hasattr(module, activation) and len(inspect.signature(type(module).forward).parameters) > 2


def _find_unknown_parts(experts: nn.Module) -> set[str]:
    """Return the names of parameters and submodules that our forward pass would ignore."""
    parameters = {name for name, _ in experts.named_parameters(recurse=False)}
    submodules = {name for name, part in experts.named_children() if any(True for _ in part.parameters())}
    supported = {name + end for name in (GATE_UP, UP, DOWN) for end in ("", "_bias")}
    supported |= {"post_expert_norm"} if getattr(experts, "has_post_expert_norm", False) else set()
    return (parameters | submodules) - supported


def list_expert_tensors(module: nn.Module) -> list[str]:
    parameters = dict(module.named_parameters(recurse=False))
    return [name for name in (GATE_UP, UP, DOWN) if name in parameters and len(get_expert_shape(module, name)) == 3]


def get_expert_shape(module: Any, name: str) -> tuple[int, ...]:
    """Return the unpacked, unpartitioned shape of an expert tensor: [E, out, in], or [E, in, out] if transposed."""
    return tuple(get_logical_shape(getattr(module, name)))


def takes_all_tokens(module: Any) -> bool:
    """Return whether each expert receives all tokens (zeros if not routed to it), as in Llama 4."""
    return type(module).__name__ == "Llama4TextExperts"


def is_transposed(module: Any) -> bool:
    """Return whether the matrices are stored as [E, in, out]."""
    return bool(getattr(module, "is_transposed", False)) or takes_all_tokens(module)


def get_expert_width(module: Any) -> int:
    """Return an expert's intermediate size I, which is also the largest useful rank of its adapter."""
    shape = get_expert_shape(module, DOWN)
    return shape[1] if is_transposed(module) else shape[2]


def count_experts_per_token(config: Any) -> int:
    text = config.get_text_config()
    values = (getattr(text, name, None) for name in TOP_K_NAMES)
    return next((number for number in values if isinstance(number, int) and number > 0), 1)


def find_router_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the router weights by name: matrices in the experts' parent module with one row per expert.

    Routers that are small networks are recognized by the name `router`.
    """
    routers: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        for experts in list(find_expert_weights(module).values())[:1]:
            parent = path.replace(".base_layer", "").rpartition(".")[0]  # adapted models have base layers
            count = get_logical_shape(experts)[0]
            for name, weight in model.get_submodule(parent).named_parameters(prefix=parent):
                shape = get_logical_shape(weight)
                if len(shape) == 2 and (shape[0] == count or re.search(r"\.router(_\w+)?\.", name)):
                    routers[name] = weight
    return routers


class ExpertFactor(nn.Module):
    """Stores the LoRA factor A [E, R, I] or B [E, O, R] of all experts as one parameter.

    PEFT's matrices [E R, I] and [O, R E] are converted when they are passed or loaded. `to_peft` converts them back.
    """

    def __init__(self, weight: Tensor, experts: int, *, down: bool) -> None:
        """Convert PEFT's matrix `weight`. `down` is True for A, which projects down to the rank."""
        super().__init__()
        self.down, self.experts = down, experts
        self.weight = nn.Parameter(self.from_peft(weight).contiguous())
        self.register_load_state_dict_pre_hook(self._convert_loaded_state)

    def to_peft(self, weight: Tensor) -> Tensor:
        """Return the factor in PEFT's shape: [E R, I] for A, [O, R E] for B."""
        if self.down:
            return weight.flatten(0, 1)
        return weight.permute(1, 2, 0).flatten(1)

    def from_peft(self, weight: Tensor) -> Tensor:
        if self.down:
            return weight.unflatten(0, (self.experts, -1))
        return weight.unflatten(1, (-1, self.experts)).permute(2, 0, 1)

    def _convert_loaded_state(self, module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        name = f"{prefix}weight"
        if name in state and state[name].dim() == 2:
            state[name] = self.from_peft(state[name])
