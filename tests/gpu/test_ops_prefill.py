"""The adapter's share of y and dX from 4096 tokens on, on a card: in the frozen product, or written before it."""

import pytest
import torch

import ops
from tests.numerics import cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
T = 4133  # no multiple of a tile's rows
NOT_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [8, 16, 24, 32, 64, 72])
@pytest.mark.parametrize(("width", "out", "bias"), [(1032, 648, True), (264, 2056, False)])
def test_stays_in_the_budget_and_repeats_its_bits(width, out, bias, rank, dtype):
    problem = cases.make(T, width, out, rank, dtype, "cuda", bias=bias)
    first, again = cases.run_operator(problem), cases.run_operator(problem)
    truth, budget = cases.truth_and_budget(problem)
    spent = cases.overspent(first, truth, budget)
    assert not spent, f"error over budget: {spent}"
    for name, value in first.named().items():
        assert torch.equal(value, again.named()[name]), name


@pytest.mark.parametrize("rank", [16, 64])
def test_nothing_is_written_outside_a_strided_output(rank):
    problem = cases.make(T, 520, 384, rank, torch.bfloat16, "cuda")
    run = torch.ops.zerolora.adapter_backward_
    args = problem.grad, problem.x, problem.down, problem.up, problem.scale
    expected, *others = (torch.empty_like(t) for t in (problem.x, problem.down, problem.up))
    run(*args, expected, *others, False)
    wide = torch.full((T, 1048), 7.0, device="cuda").bfloat16()
    for begin in (0, 528):
        run(*args, wide[:, begin : begin + 520], *others, False)
        assert torch.equal(wide[:, begin : begin + 520], expected)
    assert bool((wide[:, 520:528] == 7.0).all())


@pytest.mark.skipif(NOT_HOPPER, reason="the kernel is Hopper's (sm_90a)")
@pytest.mark.parametrize(("rank", "kernels_run"), [(16, 1), (64, 1), (72, 0)])  # above 64: cuBLAS
def test_hopper_runs_its_own_kernel_up_to_rank_64(rank, kernels_run):
    """Where there is no frozen product: the plain call's dX."""
    problem = cases.make(T, 512, 384, rank, torch.bfloat16, "cuda")
    args = problem.grad, problem.x, problem.down, problem.up, problem.scale
    ops.lora_backward(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.lora_backward(*args)
        torch.cuda.synchronize()
    assert sum("expand_wgmma_kernel" in event.name for event in profile.events()) == kernels_run
