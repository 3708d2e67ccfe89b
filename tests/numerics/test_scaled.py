"""Frozen weights in 8 bits with a scale a block: dequantised to the bit, and products of the dequantised weight."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ops
from ops import reference

GRIDS = {
    "short last blocks": ((300, 200), (128, 128)),
    "less than a block": ((64, 50), (128, 128)),
    "whole blocks": ((256, 128), (64, 32)),
    "rows": ((96, 50), (1, 50)),
}


def drawn(shape: tuple[int, int], block: tuple[int, int], storage: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    scales = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 0.1
    if storage == torch.int8:
        return torch.randint(-127, 128, shape, dtype=torch.int8), scales
    return torch.randn(shape).to(torch.float8_e4m3fn).view(torch.uint8), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("storage", [torch.uint8, torch.int8])
def test_each_value_is_rounded_once(grid: str, storage: torch.dtype, dtype: torch.dtype) -> None:
    shape, block = GRIDS[grid]
    torch.manual_seed(0)
    codes, scales = drawn(shape, block, storage)
    of_each = scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    values = (codes.view(torch.float8_e4m3fn) if storage == torch.uint8 else codes).float()
    expected = (values * of_each).to(dtype)
    assert torch.equal(reference.dequantize_blocks(codes, scales, block, dtype), expected)
    turned = torch.full((2, shape[1], shape[0]), torch.nan, dtype=dtype)
    stack = codes.expand(2, *shape), scales.expand(2, *scales.shape)
    reference.dequantize_blocks(*stack, block, dtype, turned.mT)
    assert torch.equal(turned, expected.t().expand_as(turned))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_group_is_that_of_the_dequantised_weights(p: float) -> None:
    torch.manual_seed(0)
    block = (128, 128)
    parts = [drawn((300, 200), block), drawn((120, 200), block)]
    dense = [reference.dequantize_blocks(*part, block, torch.float32) for part in parts]
    x = torch.randn(3, 7, 200, requires_grad=True)
    downs = [torch.randn(rank, 200, requires_grad=True) for rank in (4, 12)]
    ups = [torch.randn(out, rank, requires_grad=True) for out, rank in ((300, 4), (120, 12))]
    settings = ([None, torch.ones(120)], downs, ups, [2.0, 0.5], p)
    weights = [ops.ScaledWeight(*part, block) for part in parts]
    results = []
    for group in (lambda: ops.scaled_group(x, weights, *settings), lambda: ops.lora_group(x, dense, *settings)):
        torch.manual_seed(1)
        ys = group()
        total = torch.stack([(y * torch.linspace(-1, 1, y.shape[-1])).sum() for y in ys]).sum()
        results.append([*ys, *torch.autograd.grad(total, [x, *downs, *ups])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_frozen_layer_has_the_gradient_of_its_input_alone() -> None:
    torch.manual_seed(0)
    codes, scales = drawn((96, 64), (32, 32))
    weight, bias = ops.ScaledWeight(codes, scales, (32, 32)), torch.randn(96)
    x, dense = (
        torch.randn(5, 64, requires_grad=True),
        reference.dequantize_blocks(codes, scales, (32, 32), torch.float32),
    )
    y, wanted = ops.scaled_linear(x, weight, bias), torch.nn.functional.linear(x, dense, bias)
    assert torch.equal(y, wanted)
    assert torch.equal(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (y, wanted)))


def test_the_operator_keeps_to_its_schema() -> None:
    torch.manual_seed(0)
    codes, scales = drawn((24, 16), (8, 8))
    factors = torch.randn(4, 16, requires_grad=True), torch.randn(24, 4, requires_grad=True)
    x = torch.randn(5, 16, requires_grad=True)
    arguments: Any = (x, [codes], [scales], [8, 8], [], [factors[0]], [factors[1]], [2.0], 0.0, None, None)
    torch.library.opcheck(torch.ops.zerolora.scaled_forward.default, arguments)


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    codes, scales = drawn((64, 64), (32, 32))
    x, down, up = torch.randn(3, 64), torch.randn(4, 64), torch.randn(64, 4)
    cases = {
        r"scales per 16 x 32 block .* \(2, 2\) .* expected \(4, 2\)": (
            x,
            ops.ScaledWeight(codes, scales, (16, 32)),
        ),
        r"8-bit weight \(64, 64\) for x \(3, 32\)": (x[:, :32], ops.ScaledWeight(codes, scales, (32, 32))),
        "expected all uint8 .e4m3. or all int8": (x, ops.ScaledWeight(codes.float(), scales, (32, 32))),
    }
    for message, (tokens, weight) in cases.items():
        with pytest.raises(ValueError, match=message):
            ops.scaled_group(tokens, [weight], [None], [down[:, : tokens.shape[1]]], [up], [1.0])
    with pytest.raises(ValueError, match="different block sizes"):
        pair = [ops.ScaledWeight(codes, scales, block) for block in ((32, 32), (64, 64))]
        ops.scaled_group(x, pair, [None, None], [down, down], [up, up], [1.0, 1.0])


@pytest.mark.parametrize("block", [None, (16, 32)])
@pytest.mark.parametrize("storage", [torch.uint8, torch.int8])
def test_experts_in_8_bits_are_those_of_the_dequantised_weights(
    storage: torch.dtype, block: tuple[int, int] | None
) -> None:
    torch.manual_seed(0)
    E, H, inner = 3, 48, 40
    packed, plain = [], []
    for rows, cols in ((2 * inner, H), (H, inner)):
        each = [drawn((rows, cols), block or (1, cols), storage) for _ in range(E)]
        codes, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
        packed.append(ops.ExpertMatrix.from_8bit(codes, scales, block))
        plain.append(ops.ExpertMatrix.from_plain(packed[-1].dequantize(torch.float32)))
        of_one = reference.dequantize_blocks(*each[1], block or (1, cols), torch.float32)
        assert torch.equal(plain[-1].tensors[0][1], of_one)
    x = torch.randn(9, H, requires_grad=True)
    index, weights = torch.randint(0, E, (9, 2)), torch.rand(9, 2)
    found = []
    for gate_up, down in (packed, plain):
        y = ops.experts_mlp(x, index, weights, ops.ExpertWeights(gate_up, down))
        found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
