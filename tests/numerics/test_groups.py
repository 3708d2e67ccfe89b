"""Groups are found by observing a forward: shared-input projections together, all else alone."""

import pytest
import torch
from torch import nn

from ops.groups import find_groups


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.o(self.q(x) + self.k(x) + self.v(x))


class Mixed(nn.Module):
    """Shared layer, a copy of the input, an unused layer: none of these may be grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.twice, self.copy_a, self.copy_b, self.unused = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.attention(x)
        x = self.twice(self.twice(x))
        return self.copy_a(x) + self.copy_b(x.clone())


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_groups_are_found_and_the_rest_is_alone():
    model = Mixed()
    groups = find_groups(linears(model), lambda: model(torch.randn(2, 8)))
    assert groups[0] == ("attention.q", "attention.k", "attention.v")
    assert sorted(groups[1:]) == [("attention.o",), ("copy_a",), ("copy_b",), ("twice",), ("unused",)]
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_group_has_a_limit(monkeypatch):
    model = Attention()
    monkeypatch.setattr("ops.groups.MAX_GROUP_SIZE", 2)
    groups = find_groups(linears(model), lambda: model(torch.randn(2, 8)))
    assert groups == [("q", "k"), ("v",), ("o",)]


def test_hooks_go_when_the_forward_fails():
    model = Attention()
    with pytest.raises(RuntimeError):
        find_groups(linears(model), lambda: model(torch.randn(2, 9)))
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_llama_groups_come_from_the_forward():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    modules = {name: m for name, m in linears(model).items() if name != "lm_head"}
    groups = find_groups(modules, lambda: model(torch.randint(0, 64, (1, 8))))
    short = [tuple(name.rpartition(".")[2] for name in group) for group in groups if len(group) > 1]
    assert short == [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")] * 2
