"""Where the time of a step goes: categories of kernels, time counted once, and a real trace of a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench.trace import (
    ADAPTER,
    ATTENTION,
    CATEGORIES,
    COMMUNICATION,
    CONVOLUTIONS,
    COPIES,
    DEQUANTIZATION,
    ELEMENTWISE,
    ENGINE,
    FROZEN,
    GROUP_NORM,
    HEAD,
    IDLE,
    INFORMATION,
    NORMS,
    OF_SOME,
    Shape,
    Work,
    breakdown,
    categorise,
    categorise_kernels,
    longest,
    read_trace,
)
from trainer.monitor.profiler import STEP, StepProfiler

SHAPE = Shape(vocabulary=128256, rank=16)


@pytest.mark.parametrize(
    ("name", "context", "sizes", "category"),
    [
        ("nvjet_sm90_tst_128x256", ("aten::linear", "aten::mm"), {8192, 4096, 14336}, FROZEN),
        ("sm90_xmma_gemm_bf16", ("zerolora::lora_forward", "zerolora::frozen_product"), set(), FROZEN),
        ("sm90_xmma_gemm_bf16", ("zerolora::lora_forward",), {4, 2048, 4096}, ADAPTER),
        ("sm90_xmma_gemm_bf16", ("zerolora::lora_forward", "zerolora::lora_backward"), {8192, 4096}, ADAPTER),
        ("sm90_xmma_gemm_bf16", ("zerolora::nf4_backward", "zerolora::frozen_product"), set(), FROZEN),
        ("void zerolora::frozen_kernel<1>", ("zerolora::lora_backward", "zerolora::frozen_product"), set(), FROZEN),
        ("void cutlass::device_kernel<GemmGrouped>", ("zerolora::experts_forward", "aten::_grouped_mm"), {8}, FROZEN),
        ("void zerolora::(anonymous namespace)::grouped_kernel<0>", ("zerolora::frozen_product",), set(), FROZEN),
        ("void zerolora::(anonymous namespace)::mxfp4_kernel", ("zerolora::expert_mxfp4",), set(), DEQUANTIZATION),
        ("void zerolora::(anonymous namespace)::gate_kernel<1>", ("zerolora::expert_gate",), set(), NORMS),
        ("void zerolora::(anonymous namespace)::combine_kernel", ("zerolora::expert_combine",), set(), NORMS),
        ("void zerolora::(anonymous namespace)::project_kernel", ("zerolora::expert_project",), set(), ADAPTER),
        ("nvjet_sm90_tst_64x16", ("aten::linear", "aten::mm"), {8192, 4096, 16}, ADAPTER),
        ("void zerolora::(anonymous namespace)::rank_kernel<16>", ("zerolora::lora_backward",), set(), ADAPTER),
        ("void zerolora::(anonymous namespace)::nf4_kernel<bf16>", ("zerolora::nf4_forward",), set(), DEQUANTIZATION),
        ("void kDequantizeBlockwise<bf16>", ("bitsandbytes::dequantize_4bit",), set(), DEQUANTIZATION),
        ("nvjet_sm90_tst_128x256", ("_TokenLossSum", "aten::mm"), {8192, 4096, 128256}, HEAD),
        ("_cross_entropy_row", ("_TokenLossSum",), set(), HEAD),
        ("cudnn_generated_fort_native_sdpa_sm90", ("aten::_scaled_dot_product_cudnn_attention",), set(), ATTENTION),
        ("void flash::flash_bwd_kernel", ("torch_attn::_varlen_attn_backward",), set(), ATTENTION),
        ("_rms_norm_forward_kernel", ("LigerRMSNormFunction",), set(), NORMS),
        ("void zerolora::(anonymous namespace)::rms_norm_kernel<8>", ("zerolora::rms_norm_forward",), set(), NORMS),
        ("void zerolora::(anonymous namespace)::silu_mul_backward_kernel<8>", ("zerolora::silu_mul",), set(), NORMS),
        ("_swiglu_backward_kernel", ("LigerSiLUMulFunctionBackward",), set(), NORMS),
        (
            "void at::native::RowwiseMomentsCUDAKernel",
            ("aten::group_norm", "aten::native_group_norm"),
            {320},
            GROUP_NORM,
        ),
        ("void at::native::vectorized_elementwise_kernel", ("aten::native_group_norm_backward",), {320}, GROUP_NORM),
        ("sm90_xmma_fprop_implicit_gemm", ("aten::conv2d", "aten::cudnn_convolution"), {320, 3}, CONVOLUTIONS),
        ("void nchwToNhwcKernel", ("aten::conv2d", "aten::convolution_backward"), {320, 3}, CONVOLUTIONS),
        ("_triton_rope", ("LigerRopeFunction",), set(), NORMS),
        ("void at::native::vectorized_elementwise_kernel<8, add>", ("aten::add",), {8192, 4096}, ELEMENTWISE),
        ("void at::native::multi_tensor_apply_kernel", ("zerolora: optimizer", "aten::_fused_adamw_"), set(), ENGINE),
        ("void at::native::vectorized_elementwise_kernel", ("torch::autograd::AccumulateGrad", "x"), set(), ENGINE),
        ("void cutlass::gemm", ("zerolora: scu", "aten::bmm"), {32, 4096, 16}, INFORMATION),
        ("ncclDevKernel_AllReduce_Sum_f32", ("zerolora: optimizer", "nccl:all_reduce"), set(), COMMUNICATION),
    ],
)
def test_a_kernel_has_one_category(name: str, context: tuple[str, ...], sizes: set[int], category: str) -> None:
    assert categorise(name, context, frozenset(sizes), SHAPE) == category


def test_copies_over_the_bus_are_apart_from_those_on_the_card() -> None:
    arguments = ((), frozenset[int](), SHAPE)
    assert categorise("Memcpy HtoD (Pinned -> Device)", *arguments, memcpy=True) == COPIES
    assert categorise("Memcpy DtoD (Device -> Device)", *arguments, memcpy=True) == ELEMENTWISE


def test_time_is_counted_once_and_adds_up() -> None:
    """From the end of the first step: what hides behind computing is free, gaps are idle."""
    works = [
        Work("gemm", FROZEN, 0, 1000, step=0),
        Work("gemm", FROZEN, 1000, 4000, step=1),
        Work("reduce", COMMUNICATION, 3000, 6000, step=1),
        Work("add", ELEMENTWISE, 7000, 8000, step=1),
        Work("gemm", FROZEN, 8000, 11000, step=2),
    ]
    by_category, step_ms, steps = breakdown(works)
    assert (step_ms, steps) == (5.0, 2)
    assert {name: value for name, value in by_category.items() if value} == {
        FROZEN: 3.0,
        COMMUNICATION: 1.0,
        ELEMENTWISE: 0.5,
        IDLE: 0.5,
    }
    assert longest(works, FROZEN) == [("gemm", 3, 7.0)]


def test_one_step_is_too_few() -> None:
    with pytest.raises(ValueError, match="1 recorded steps"):
        breakdown([Work("gemm", FROZEN, 0, 1, step=0)])


def test_the_device_runs_behind_the_host_and_no_step_counts_twice() -> None:
    """Kernels belong to the step that launched them; the range that the profiler repeats on the device is no step."""
    events: list[dict[str, Any]] = []
    for step in range(3):
        host, device = 100.0 * step, 100.0 * step + 150.0
        name = f"{STEP} {step + 1}"
        events += [
            {"ph": "X", "cat": "user_annotation", "name": name, "ts": host, "dur": 100.0, "tid": 1},
            {"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": device, "dur": 80.0, "tid": 7},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": host + 10, "dur": 80.0, "tid": 1},
        ]
        for half in range(2):
            launched, ran, which = host + 15 + 50 * half, device + 40 * half, {"correlation": 2 * step + half}
            events += [
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "launch",
                    "ts": launched,
                    "dur": 5.0,
                    "tid": 1,
                    "args": which,
                },
                {"ph": "X", "cat": "kernel", "name": "gemm", "ts": ran, "dur": 40.0, "args": which},
            ]
    by_category, step_ms, steps = breakdown(categorise_kernels(events, SHAPE))
    assert (step_ms, steps) == (pytest.approx(0.1), 2)
    assert by_category[FROZEN] == pytest.approx(0.08) and by_category[IDLE] == pytest.approx(0.02)


class Engine:
    """Three layers of what a step is made of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.frozen = torch.randn(512, 512)
        self.down, self.up = torch.randn(4, 512, requires_grad=True), torch.zeros(512, 4, requires_grad=True)
        self.head = torch.randn(1000, 512)
        self.optimizer = torch.optim.AdamW([self.down, self.up])

    def loss(self) -> torch.Tensor:
        x = torch.randn(256, 512)
        y = x @ self.frozen.t() + (x @ self.down.t()) @ self.up.t()
        return torch.nn.functional.cross_entropy(torch.nn.functional.silu(y) @ self.head.t(), torch.zeros(256).long())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def recorded(engine: Engine, folder: Path, *, first_step: int, steps: int) -> list[Work]:
    """What the kernels of some steps did, recorded by the trainer's own profiler."""
    profiler = StepProfiler(folder, rank=0, first_step=first_step, engine=engine, scu_controller=None)
    for step in range(1, steps + 1):
        profiler.before_step(step)
        engine.backward(engine.loss())
        engine.step()
    profiler.finish()
    return categorise_kernels(read_trace(folder / "profile" / "rank-0.json.gz"), Shape(vocabulary=1000, rank=4))


def test_a_real_trace(tmp_path: Path) -> None:
    """Recorded by the profiler of a run."""
    engine = Engine()
    works = recorded(engine, tmp_path, first_step=2, steps=5)
    by_category, step_ms, steps = breakdown(works)
    assert steps == 3
    assert sum(by_category.values()) == pytest.approx(step_ms)
    assert set(by_category) == set(CATEGORIES) - set(OF_SOME), "what this engine has none of is not named"
    for category in (FROZEN, ADAPTER, HEAD, NORMS, ENGINE):
        assert by_category[category] > 0, category
    assert by_category[HEAD] > by_category[ADAPTER]
    assert by_category[ATTENTION] == by_category[COMMUNICATION] == 0


class Residual(Engine):
    """Run what else a UNet has: group norm and convolutions, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = torch.nn.GroupNorm(8, 32), torch.nn.Conv2d(32, 32, 3, padding=1)

    def loss(self) -> torch.Tensor:
        x = torch.randn(2, 32, 32, 32, requires_grad=True)
        return super().loss() + self.convolution(torch.nn.functional.silu(self.norm(x))).square().mean()


def test_group_norm_and_convolutions_are_named_where_there_are_any(tmp_path: Path) -> None:
    works = recorded(Residual(), tmp_path, first_step=1, steps=3)
    by_category, step_ms, _ = breakdown(works)
    assert sum(by_category.values()) == pytest.approx(step_ms) and set(by_category) == set(CATEGORIES)
    for category, backward in ((GROUP_NORM, "native_group_norm_backward"), (CONVOLUTIONS, "convolution_backward")):
        names = {name.removeprefix("aten::") for name, _, _ in longest(works, category, 50)}
        assert by_category[category] > 0 and backward in names, names


def test_a_run_that_ends_before_its_profile_writes_none(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, rank=0, first_step=10, engine=Engine(), scu_controller=None)
    profiler.before_step(1)
    profiler.finish()
    assert not (tmp_path / "profile").exists()
