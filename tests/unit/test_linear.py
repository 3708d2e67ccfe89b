"""What is a linear layer is seen in what it computes, not in its name or its ancestors."""

import importlib

import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.pytorch_utils import Conv1D

from trainer.parallel.engine.linear_layers import _computes_linear, is_linear


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Transposed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).T


class Named(nn.Linear):
    def __init__(self, width: int, *, name: str) -> None:
        super().__init__(width, width)


@pytest.mark.parametrize("module", [nn.Linear(4, 3), nn.Linear(4, 3, bias=False), FalconLinear(4, 3, bias=False)])
def test_linear_layers(module: nn.Module) -> None:
    state = torch.get_rng_state()
    assert is_linear(module)
    assert torch.equal(torch.get_rng_state(), state)  # what is looked at draws nothing from the run's numbers


OTHERS = [Doubled(4, 3), Transposed(4, 3), Named(4, name="x"), Conv1D(3, 4), nn.Embedding(4, 3)]


@pytest.mark.parametrize("module", OTHERS)
def test_others(module: nn.Module) -> None:
    assert not is_linear(module)


class Faulty(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a missing name")


def test_a_fault_of_a_class_is_shown_and_not_taken_for_an_answer() -> None:
    with pytest.raises(KeyError, match="a missing name"):
        is_linear(Faulty(4, 3))


# Linear layers by class that refuse a small example each in its own way, and those that compute it.
SUBCLASSES = {
    "transformers.models.llama4.modeling_llama4.Llama4Router": False,
    "transformers.models.falcon.modeling_falcon.FalconLinear": True,
    "transformers.integrations.bitnet.AutoBitLinear": False,
    "transformers.integrations.finegrained_fp8.FP8Linear": False,
    "peft.tuners.vblora.layer.Linear": False,
    "bitsandbytes.nn.modules.Linear4bit": False,
    "bitsandbytes.nn.modules.Linear8bitLt": False,
    "bitsandbytes.nn.modules.OutlierAwareLinear": False,
    "deepspeed.linear.quantization.QuantizedLinear": False,
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses_of_the_libraries(name: str) -> None:
    module, _, kind = name.rpartition(".")
    assert _computes_linear(getattr(importlib.import_module(module), kind)) is SUBCLASSES[name]


def test_a_router_of_experts_is_none() -> None:
    from transformers import PhimoeConfig

    router = PhimoeTopKRouter(PhimoeConfig(hidden_size=8, num_local_experts=4))
    assert isinstance(router, nn.Linear) and not is_linear(router)
