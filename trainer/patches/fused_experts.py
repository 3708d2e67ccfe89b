"""Choose the forward of MoE experts: our operator, plain torch, or the model's own code."""

from collections import Counter
from functools import partial
from typing import Any

from torch import nn

from trainer.contract.known_versions import replaces
from trainer.model.expert_adapter import ParamWrapper
from trainer.model.expert_forward import detect_activation, run_adapted_experts
from trainer.model.expert_layers import find_expert_modules
from trainer.model.packed_experts import forward_frozen, list_packed_tensors
from trainer.parallel.engine.partitioned import is_partitioned
from trainer.patches.replace import replace


@replaces("the forward of experts without an adapter")
def install_expert_forwards(model: nn.Module, *, on_gpu: bool) -> list[str]:
    """Make experts without an adapter use our operator on GPUs; return lines for the console.

    Experts that keep the model's own code are recomputed in the backward pass if DeepSpeed gathers their
    weights, because the model's code would keep views of the gathered weights.
    """
    wrapped: dict[int, list[ParamWrapper]] = {}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            wrapped.setdefault(id(module.get_base_layer()), []).append(module)
    counts: Counter[tuple[str, str]] = Counter()
    for experts in find_expert_modules(model).values():
        is_supported = detect_activation(experts) is not None
        if id(experts) in wrapped:
            adapter = _describe_adapter(wrapped[id(experts)])
        elif is_supported and on_gpu:
            replace(experts, "forward", partial(run_adapted_experts, experts, {}))
            adapter = "without adapter"
        else:
            weights = experts.parameters(recurse=False)
            if not list_packed_tensors(experts) and all(is_partitioned(w) and not w.requires_grad for w in weights):
                # The model's own code would keep views of the gathered weights until the backward pass.
                replace(experts, "forward", partial(forward_frozen, experts, experts.forward))
            continue
        method = "by the operator" if is_supported else "in plain torch (activation not supported by the operator)"
        counts[adapter, method] += 1
    return [f"experts: {count} layers {adapter}, {method}" for (adapter, method), count in counts.items()]


def _describe_adapter(wrappers: list[Any]) -> str:
    ranks = sorted({rank for wrapper in wrappers for rank in wrapper.r.values()})
    names = ", ".join(sorted(wrapper.parameter_name for wrapper in wrappers))
    return f"with an adapter of r={', '.join(map(str, ranks))} for each expert ({names})"
