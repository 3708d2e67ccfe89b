"""Our norms, SwiGLU and rotary embedding in loaded models: what is replaced, and that the models compute the same."""

import copy
import sys

import pytest
import torch
from torch import nn

from ops.elementwise import silu_mul
from trainer.patches import norm_mlp_rope as elementwise
from trainer.patches.norm_mlp_rope import install_input_recomputation, replace_elementwise

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
HALF_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
MODELS = [  # architecture, further settings, norms, gated MLPs
    ("llama", {}, 5, 2),
    ("qwen2", {}, 5, 2),
    ("qwen3", {}, 9, 2),
    ("gemma", {}, 5, 2),
    ("phi3", HALF_ROTARY, 5, 2),
    ("granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.1}, 5, 2),
]


def build(architecture, monkeypatch, **settings):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[architecture](**SHAPE, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight)
    namespace = sys.modules[type(model).__module__]
    # Replaced for the whole process: put back when the test ends.
    monkeypatch.setattr(namespace, elementwise.ROTARY, getattr(namespace, elementwise.ROTARY))
    return model


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def loss_and_gradients(model):
    ids = torch.arange(24).view(2, 12) % 60
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("architecture", "settings", "norms", "mlps"), MODELS, ids=[model[0] for model in MODELS])
def test_the_model_computes_the_same(architecture, settings, norms, mlps, monkeypatch):
    monkeypatch.setattr(elementwise, "RECOMPUTE_FROM_BYTES", 0)
    model = build(architecture, monkeypatch, **settings)
    loss, gradients = loss_and_gradients(adapted(copy.deepcopy(model)))
    replaced = replace_elementwise(model, recompute="activations")
    assert (replaced.norm_count, replaced.mlp_count, len(replaced.functions)) == (norms, mlps, 1)
    model = adapted(model)
    assert install_input_recomputation(model) == sum("lora_A" in name for name in gradients)
    again, others = loss_and_gradients(model)
    torch.testing.assert_close(again, loss, rtol=2.5e-7, atol=0)  # in 32 bits, two roundings
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # In 32 bits; the norms and the sums over tokens take their terms in another order.
        torch.testing.assert_close(others[name], gradient, rtol=5e-6, atol=1e-6 * float(gradient.abs().max()))


def test_activations_are_computed_again_in_the_backward(monkeypatch):
    model = adapted(build("llama", monkeypatch))
    calls = []
    monkeypatch.setattr(elementwise, "RECOMPUTE_FROM_BYTES", 0)
    monkeypatch.setattr(elementwise, "silu_mul", lambda *a, real=silu_mul: (calls.append(1), real(*a))[1])
    replace_elementwise(model.get_base_model(), recompute="activations")
    install_input_recomputation(model)
    calls.clear()
    loss_and_gradients(model)
    assert len(calls) == 4  # two layers, forward and backward


@pytest.mark.parametrize("multipliers", [[1.0, 1.0], [0.7, 0.3]])
def test_an_mlp_with_multipliers_computes_the_same(multipliers):
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Config, FalconH1MLP

    torch.manual_seed(0)
    config = FalconH1Config(hidden_size=16, intermediate_size=32, mlp_multipliers=multipliers)
    model, x = nn.Sequential(FalconH1MLP(config)), torch.randn(3, 16, requires_grad=True)
    y = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert replace_elementwise(model).mlp_count == 1
    again = model(x)
    torch.testing.assert_close(again, y, rtol=2.5e-7, atol=1e-8)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), x)[0], grad, rtol=5e-6, atol=1e-8)


class _OtherNorm(nn.Module):
    """Norm by name, with another formula."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class _ScaledMLP(nn.Module):
    """A gated MLP that does one thing more."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return 0.5 * self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def test_what_computes_something_else_keeps_its_own_forward():
    _OtherNorm.__name__ = "OtherRMSNorm"
    model = nn.Sequential(_OtherNorm(), _ScaledMLP())
    replaced = replace_elementwise(model)
    assert not replaced.norm_count and not replaced.mlp_count
    assert [name for name, _ in replaced.rejected] == ["OtherRMSNorm", "_ScaledMLP"]
    assert "differs from our operator" in replaced.rejected[0][1] and "more than project" in replaced.rejected[1][1]
    assert all(replaced.explain_unreplaced_parts().values())
    assert all("forward" not in vars(module) for module in model)


def test_a_copy_of_a_norm_uses_its_own_weight(monkeypatch):
    """PEFT copies a module that is trained in full: the copy must read the copy's weight, and train it."""
    model = build("llama", monkeypatch)
    replace_elementwise(model)
    twin = copy.deepcopy(model.model.norm)
    x = torch.randn(2, 64)
    with torch.no_grad():
        twin.weight.zero_()
    assert not twin(x).any() and model.model.norm(x).any()
    twin(x).sum().backward()
    assert twin.weight.grad is not None


def test_trained_norms_stay_the_models_own(monkeypatch):
    replaced = replace_elementwise(build("llama", monkeypatch), frozen_norms=False)
    assert replaced.norm_count == 0 and replaced.mlp_count == 2
    assert [part for part, reason in replaced.explain_unreplaced_parts().items() if not reason] == ["swiglu", "rope"]
    assert "5 x LlamaRMSNorm: the weight is trained" in replaced.format_summary()[1]
