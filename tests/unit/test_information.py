"""DataBPT, ParamBPT and its gradient on one process; the ZeRO stages are in tests/distributed."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.config import LoraSection, UserError
from trainer.model.adapter import apply_adapter
from trainer.parallel.engine.flat_adapter import flatten_adapter
from trainer.scu import information as information_module
from trainer.scu.information import AdapterInformation, compute_data_bpt, find_pairs

MEASURES = ("delta", "factors")
TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def adapted(dtype: torch.dtype = torch.float64, *, filled: bool = True, **options: object) -> nn.Module:
    """A tiny Llama with a LoRA adapter on every linear layer; `filled` gives B values as after some training."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 6.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(LlamaForCausalLM(TINY), LoraConfig(**options), autocast_adapter_dtype=False).to(dtype)
    if filled:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name or "lora_embedding" in name:
                    parameter.normal_(0, 0.05)
    return model


def measured(model: nn.Module, measure: Any, *, sigma: float = 0.01, tokens: int = 1000) -> AdapterInformation:
    return AdapterInformation(find_pairs(model), measure, sigma=sigma, tokens=tokens)


def naive_squares(model: nn.Module, measure: str) -> torch.Tensor:
    """Q by PEFT's own merged update, or by a plain sum; autograd gives its gradient."""

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if measure == "delta":
        return sum(
            (layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight).square().sum()
            for layer in layers
        )
    return sum(factor["default"].weight.square().sum() for layer in layers for factor in (layer.lora_A, layer.lora_B))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_value_and_gradient_equal_those_of_the_merged_update(measure: str, options: dict[str, Any]) -> None:
    model = adapted(**options)
    reference = naive_squares(model, measure)
    adapter = [p for n, p in model.named_parameters() if "lora_A" in n or "lora_B" in n]
    expected = torch.autograd.grad(reference, adapter)
    squares = measured(model, measure).compute_sum_of_squares()
    torch.testing.assert_close(squares, reference, rtol=2e-15, atol=0)  # in 64 bits, sums of thousands of terms
    for got, want in zip(torch.autograd.grad(squares, adapter), expected, strict=True):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, rtol=2e-14, atol=2e-16)  # likewise, and terms cancel: near 0 absolute


def test_peft_merges_the_update_that_delta_measures() -> None:
    model = adapted(use_rslora=True)
    pair = find_pairs(model)[0]
    assert pair.scale == pytest.approx(6.0 / math.sqrt(4))
    layer: Any = next(module for module in model.modules() if isinstance(module, LoraLayer))
    merged = layer.get_delta_weight("default")
    # In 64 bits: PEFT scales the product, this the first factor.
    torch.testing.assert_close(pair.scale * pair.b @ pair.a, merged, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("measure", MEASURES)
def test_gradcheck(measure: str) -> None:
    information = measured(adapted(target_modules=["k_proj", "o_proj"]), measure)
    leaves = tuple(tensor for chunk in information.chunks for side in chunk.get_leaves() for tensor in side)
    assert torch.autograd.gradcheck(lambda *_: information.compute_sum_of_squares(), leaves)


@pytest.mark.parametrize("chunk_elements", [1, 700, 2**24])
def test_batching_changes_nothing(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(information_module, "CHUNK_ELEMENTS", chunk_elements)
    model = adapted()
    information = measured(model, "delta")
    assert (len(information.chunks) == len(find_pairs(model))) == (chunk_elements == 1)
    # In 64 bits, sums of thousands of terms in chunks of another size.
    torch.testing.assert_close(information.compute_sum_of_squares(), naive_squares(model, "delta"), rtol=2e-15, atol=0)


def test_delta_starts_at_zero_with_a_zero_gradient_for_a_and_factors_at_a_third_of_the_rank() -> None:
    model = adapted(filled=False)
    layers = len(find_pairs(model))
    assert measured(model, "delta").compute_sum_of_squares().item() == 0.0
    assert measured(model, "factors").compute_sum_of_squares().item() == pytest.approx(layers * 4 / 3, rel=0.1)


def test_delta_does_not_change_when_a_matrix_moves_from_b_to_a() -> None:
    model = adapted()
    before = (
        measured(model, "delta").compute_sum_of_squares().item(),
        measured(model, "factors").compute_sum_of_squares().item(),
    )
    mix = torch.eye(4, dtype=torch.float64) * 3 + torch.rand(4, 4, dtype=torch.float64)
    with torch.no_grad():
        for pair in find_pairs(model):
            pair.b.copy_(pair.b @ mix)
            pair.a.copy_(torch.linalg.solve(mix, pair.a))
    assert measured(model, "delta").compute_sum_of_squares().item() == pytest.approx(before[0], rel=1e-10)
    assert measured(model, "factors").compute_sum_of_squares().item() != pytest.approx(before[1], rel=0.01)


def test_bits_and_nats_are_those_of_a_gaussian_prior() -> None:
    information = measured(adapted(), "factors", sigma=0.02, tokens=500)
    squares = information.compute_sum_of_squares().item()
    assert information.compute_bits(squares) == pytest.approx(squares / (2 * 0.02**2 * 500 * math.log(2)))
    assert information.nats_per_square * squares == pytest.approx(information.compute_bits(squares) * math.log(2))
    assert compute_data_bpt(3.0 * math.log(2), 2) == pytest.approx(1.5)


@pytest.mark.parametrize("measure", MEASURES)
def test_16_bit_parameters_are_summed_in_fp32(measure: str) -> None:
    model = adapted(torch.bfloat16)
    squares = measured(model, measure).compute_sum_of_squares()
    assert squares.dtype == torch.float32
    expected = naive_squares(model.double(), measure).item()
    assert squares.item() == pytest.approx(expected, rel=1e-5)


def test_gradients_of_16_bit_parameters_come_in_their_own_dtype_and_scale_before_narrowing() -> None:
    model = adapted(torch.float16)
    b = find_pairs(model)[0].b
    # Without the loss scale, 1e-7 of these gradients is at most the smallest number of fp16.
    factor, loss_scale = 1e-7, 2.0**16
    (gradient,) = torch.autograd.grad(measured(model, "delta").compute_sum_of_squares() * factor * loss_scale, [b])
    assert gradient.dtype == torch.float16
    model = model.double()
    (expected,) = torch.autograd.grad(naive_squares(model, "delta"), [find_pairs(model)[0].b])
    assert (expected * factor).to(torch.float16).abs().max() < 1e-6
    # The gradient has the 11 bits of fp16, 5e-4; beyond that 2.5e-8 are seen, of a product of two such factors.
    torch.testing.assert_close(gradient.double(), expected * factor * loss_scale, rtol=1e-3, atol=1e-7)


def test_frozen_factor_gets_no_gradient() -> None:
    model = adapted()
    pairs = find_pairs(model)
    pairs[0].a.requires_grad_(False)
    measured(model, "delta").compute_sum_of_squares().backward()
    assert pairs[0].a.grad is None
    assert pairs[0].b.grad is not None and pairs[0].b.grad.abs().max() > 0


def test_embedding_adapter_counts() -> None:
    model = adapted(target_modules=["embed_tokens"])
    (pair,) = find_pairs(model)
    expected = (pair.scale * pair.b @ pair.a).square().sum()
    torch.testing.assert_close(measured(model, "delta").compute_sum_of_squares(), expected, rtol=2e-15, atol=0)


def adapted_experts() -> nn.Module:
    """A tiny mixture of experts with adapters on attention and experts, after some training."""
    torch.manual_seed(0)
    shape = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**TINY.to_dict(), "model_type": "qwen3_moe"} | shape)).double()
    model: nn.Module = apply_adapter(base, LoraSection(r=4, alpha=6.0), torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("measure", MEASURES)
def test_each_expert_counts_as_a_layer(measure: Any, flattened: bool) -> None:
    model = adapted_experts()
    pairs = find_pairs(model)
    assert {pair.a.dim() for pair in pairs} == {2, 3}
    factors = [factor for pair in pairs for factor in (pair.a, pair.b)]
    squares = (
        [pair.scale**2 * (pair.b @ pair.a).square().sum() for pair in pairs]
        if measure == "delta"
        else [factor.square().sum() for factor in factors]
    )
    reference = torch.stack(squares).sum()
    expected = torch.autograd.grad(reference, factors)
    flat = flatten_adapter(model, separate_up=False) if flattened else None
    information = AdapterInformation(pairs, measure, sigma=0.01, tokens=1000, flat=flat)
    if flat is None:
        got = torch.autograd.grad(information.compute_sum_of_squares(), factors)
    else:
        flat.create_weight_views()
        (whole,) = torch.autograd.grad(information.compute_sum_of_squares(), flat.buffers)
        spans, names = flat.list_spans(), {id(parameter): name for name, parameter in model.named_parameters()}
        places = [spans[names[id(factor)]] for factor in factors]
        got = tuple(whole[start : start + size].view_as(f) for (_, start, size), f in zip(places, factors, strict=True))
    torch.testing.assert_close(information.compute_sum_of_squares(), reference, rtol=2e-15, atol=0)
    for gradient, want in zip(got, expected, strict=True):
        assert want.abs().max() > 0
        torch.testing.assert_close(gradient, want, rtol=2e-14, atol=2e-16)
    assert information.compute_reachable_bounds(0.0, 0.0) == pytest.approx((reference.item(),) * 2, rel=1e-9)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("filled", [False, True])
def test_no_walk_within_the_learning_rates_leaves_the_reachable_range(measure: str, filled: bool) -> None:
    model = adapted(filled=filled)
    information = measured(model, measure)
    low, high = information.compute_reachable_bounds(0.01, 0.04)
    now = information.compute_sum_of_squares().item()
    assert low <= now <= high
    pairs = find_pairs(model)
    start = [(pair.a.detach().clone(), pair.b.detach().clone()) for pair in pairs]
    for walk in range(6):
        with torch.no_grad():
            for pair, (a, b) in zip(pairs, start, strict=True):
                for parameter, origin, reach in ((pair.a, a, 0.01), (pair.b, b, 0.04)):
                    outward = {0: origin.sign(), 1: -origin.sign(), 2: torch.ones_like(origin)}
                    direction = outward.get(walk, torch.rand_like(origin).mul(2).sub(1))
                    parameter.copy_(origin + reach * direction)
        assert low <= information.compute_sum_of_squares().item() <= high
    if measure == "factors":
        assert low > 0


def test_reach_of_zero_is_the_value_itself() -> None:
    information = measured(adapted(), "delta")
    assert information.compute_reachable_bounds(0.0, 0.0) == pytest.approx(
        (information.compute_sum_of_squares().item(),) * 2, rel=1e-9
    )


def test_model_without_adapter() -> None:
    with pytest.raises(UserError, match="no LoRA layer"):
        find_pairs(LlamaForCausalLM(TINY))
