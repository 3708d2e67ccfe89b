"""Weights with a scale a block on a card: dequantised to the CPU's bits, products within those of the dense weight."""

import pytest
import torch

import ops
from ops import reference
from tests.numerics.test_scaled import GRIDS, drawn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("storage", [torch.uint8, torch.int8], ids=str)
def test_values_have_the_bits_of_the_cpu(grid, storage, dtype):
    shape, block = GRIDS[grid]
    torch.manual_seed(0)
    codes, scales = drawn(shape, block, storage)
    there = reference.dequantize_blocks(codes.cuda(), scales.cuda(), block, dtype)
    assert torch.equal(there.cpu(), reference.dequantize_blocks(codes, scales, block, dtype))


def test_a_group_is_that_of_the_dequantised_weights():
    torch.manual_seed(0)
    block = (128, 128)
    parts = [drawn(shape, block) for shape in ((1024, 512), (320, 512))]
    weights = [ops.ScaledWeight(codes.cuda(), scales.cuda(), block) for codes, scales in parts]
    dense = [reference.dequantize_blocks(each.values, each.scales, block, torch.bfloat16) for each in weights]
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    downs = [torch.randn(16, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in parts]
    ups = [torch.randn(len(w), 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for w in dense]
    settings = ([None, None], downs, ups, [2.0, 0.5])
    found = []
    for ys in (ops.scaled_group(x, weights, *settings), ops.lora_group(x, dense, *settings)):
        grads = torch.autograd.grad([y.float().square().mean() for y in ys], [x, *downs, *ups])
        found.append([*ys, *grads])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).float().norm()) <= 2**-7 * float(theirs.float().norm())
