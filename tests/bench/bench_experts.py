"""Time the experts' operator on one layer of Qwen3-30B-A3B's shape and its frozen products only, kernel by kernel.

python -m tests.bench.bench_experts [--tokens 8192] [--rank 16] [--routing ragged|skewed|even]
"""

import argparse
from collections.abc import Callable

import torch

import ops
from ops import experts_kernels
from ops.experts import ExpertAdapter, ExpertMatrix, ExpertWeights, experts_mlp
from tests.numerics.expert_cases import route

E, K, H, INNER = 128, 8, 2048, 768


def milliseconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The median of single calls."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--routing", default="ragged")
    parser.add_argument("--products", choices=["own", "torch"], default="own", help="who adds the adapter's term")
    options = parser.parse_args()
    experts_kernels.USE_PRODUCT_KERNEL = options.products == "own"
    ops.load_backend("cuda")
    T, rank = options.tokens, options.rank
    torch.manual_seed(0)

    def normal(*shape: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * size).bfloat16()

    x, grad = normal(T, H).requires_grad_(), normal(T, H)
    index = route(options.routing, T, K, E, torch.Generator().manual_seed(0)).cuda()
    weights = torch.rand(T, K, device="cuda").bfloat16().requires_grad_()
    gate_up, down = normal(E, 2 * INNER, H, size=H**-0.5), normal(E, H, INNER, size=INNER**-0.5)
    frozen = ExpertWeights(ExpertMatrix.from_plain(gate_up), ExpertMatrix.from_plain(down))
    shapes = [(E, rank, H), (E, 2 * INNER, rank), (E, rank, INNER), (E, H, rank)]
    factors = [normal(*shape, size=0.05).requires_grad_() for shape in shapes]
    a_gu, b_gu, a_d, b_d = factors
    adapter = ExpertAdapter(a_gu, b_gu, a_d, b_d, gate_up_scale=2.0, down_scale=2.0)
    order, ends = torch.ops.zerolora.expert_sort(index, E)
    pairs = torch.ops.zerolora.expert_plan(order, ends)[2]
    product = torch.ops.zerolora.expert_product
    h = normal(T * K, rank)
    a_gu, b_gu, a_d, b_d = (normal(*shape) for shape in shapes)
    rows, wide, act = (normal(T * K, width) for width in (H, 2 * INNER, INNER))
    floor = {
        "gate_up": lambda: experts_kernels._grouped(rows, gate_up.transpose(1, 2), offs=ends),
        "down": lambda: experts_kernels._grouped(act, down.transpose(1, 2), offs=ends),
        "down dX": lambda: experts_kernels._grouped(rows, down, offs=ends),
        "gate_up dX": lambda: experts_kernels._grouped(wide, gate_up, offs=ends),
    }
    ours = {
        "gate_up": lambda: product(rows, gate_up, h, b_gu, ends, pairs, True),
        "gate_up, no adapter": lambda: product(rows, gate_up, None, None, ends, pairs, True),
        "down": lambda: product(act, down, h, b_d, ends, pairs, True),
        "down dX": lambda: product(rows, down, h, a_d, ends, pairs, False),
        "gate_up dX": lambda: product(wide, gate_up, h, a_gu, ends, pairs, False),
    }
    taken = {name: milliseconds(product) for name, product in floor.items()}
    with torch.no_grad():
        forward = milliseconds(lambda: experts_mlp(x, index, weights, frozen, adapter))

    def both() -> None:
        torch.autograd.grad(experts_mlp(x, index, weights, frozen, adapter), [x, weights, *factors], grad)

    whole = milliseconds(both)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both()
        torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"T={T} r={rank} {options.routing}, {options.products} products")
    for event in sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:24]:
        print(f"  {event.device_time_total:8.0f} us {event.count:3}  {event.key[:90]}")
    print(
        "frozen products:",
        ", ".join(f"{name} {ms:.3f}" for name, ms in taken.items()),
        f"= {sum(taken.values()):.3f} ms",
    )
    if options.products == "own" and torch.cuda.get_device_capability() == (9, 0):
        own = {name: milliseconds(call) for name, call in ours.items()}
        print("with adapters inside:", ", ".join(f"{name} {ms:.3f}" for name, ms in own.items()))
    print(f"experts: forward {forward:.3f} ms, both {whole:.3f} ms, more memory at the peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
