"""Adapt fused experts through PEFT's wrapper, with factors per expert and a forward pass that never forms W + B A.

PEFT stores A of all experts as one matrix [E R, I] and B as [O, R E], and adds B A to all expert weights in every
forward pass, which rules out dropout. Our factors A [E, R, I] and B [E, O, R] act on the tokens routed to each
expert. Files contain PEFT's matrices, so that `PeftModel.from_pretrained` can read them.
Legend: E experts, R rank, I in, O out.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from peft.tuners import lora
from torch import Tensor, nn

from trainer.contract.known_versions import patch_objects, replaces, require
from trainer.model.expert_forward import Adapter, run_adapted_experts
from trainer.model.expert_layers import ExpertFactor, find_expert_modules, get_expert_shape
from trainer.model.older_names import keep_target_names


@replaces("the adapter of a tensor of experts")
class ParamWrapper(lora.ParamWrapper):
    """Adapts one expert tensor; if wrappers are nested, the outermost one runs the experts.

    PEFT recognizes the class by its name.
    """

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().update_layer(adapter_name, *args, **kwargs)
        for factors, down in ((self.lora_A, True), (self.lora_B, False)):
            weight = factors[adapter_name].weight.detach()
            factors[adapter_name] = ExpertFactor(weight, self.num_experts, down=down)
        self.set_adapter(self.active_adapters, inference_mode=kwargs["config"].inference_mode)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int] | tuple[None, None]:
        self.num_experts, first, second = get_expert_shape(self.get_base_layer(), self.parameter_name)
        self._param_ndim = 3
        return first, second

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return s B A (s: the adapter's scale) for all experts, in the layout and dtype of the weight."""
        a_ERI, b_EOR = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        delta = (b_EOR @ a_ERI) * self.scaling[adapter_name]
        return (delta if self._did_swap_in_out_features else delta.mT).to(self.get_param().dtype)

    def adapter(self) -> Adapter | None:
        """Return the active adapter; None while it is disabled or merged into the weight."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not names:
            return None
        [name] = names
        dropout = self.lora_dropout[name]
        rate = float(dropout.p) if dropout.training and isinstance(dropout, nn.Dropout) else 0.0
        return Adapter(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name], rate)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapters: dict[str, Adapter] = {}
        layer: Any = self
        while isinstance(layer, ParamWrapper):
            if (adapter := layer.adapter()) is not None:
                adapters[layer.parameter_name] = adapter
            layer = layer.base_layer
        if not adapters:
            return layer(x, *args, **kwargs)
        # Call `layer` as a module, so that ZeRO-3's hooks gather its parameters.
        with patch_objects((layer, "forward", partial(run_adapted_experts, layer, adapters))):
            return layer(x, *args, **kwargs)


def use_expert_adapters(model: nn.Module, config: Any) -> AbstractContextManager[None]:
    """Make PEFT use our wrapper for experts, and keep target names unchanged (`keep_target_names`)."""
    modules = find_expert_modules(model).values()
    require(config, "_register_custom_module", "peft")({type(experts): ParamWrapper for experts in modules})
    return keep_target_names()


def set_dropout(adapted: nn.Module, rate: float) -> None:
    """Set the dropout of all adapters in place, since PEFT's settings reject dropout if a target is a parameter."""
    for layer in adapted.modules():
        is_peft_wrapper = isinstance(layer, lora.ParamWrapper) and not isinstance(layer, ParamWrapper)
        if rate and isinstance(layer, lora.LoraLayer) and not is_peft_wrapper:
            for name in layer.lora_dropout:
                layer.lora_dropout[name] = nn.Dropout(rate)
