"""The table `host` of bench_lora: the processor's time for the groups of a small model."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import ops

HOST_COPIES = 8
HOST_GROUPS = {  # I, each O
    "qkv": (576, (576, 192, 192)),
    "o": (576, (576,)),
    "gate+up": (576, (1536, 1536)),
    "down": (1536, (576,)),
}


def kernels_of(function: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call puts on the card."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return sum(event.device_type == cuda for event in profile.events())


def host_us(function: Callable[[], None], calls: int = 40) -> float:
    """Best of six batches of calls: what else the machine does only adds."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return min(times)


def host_case(width: int, outs: Sequence[int], flat: bool, separate: bool) -> Callable[[], None]:
    """HOST_COPIES equal groups, forward one by one and then one backward pass over them all."""
    n = len(outs)
    weights = [torch.randn(out, width, device="cuda").bfloat16() for out in outs]
    grads = [torch.randn(64, out, device="cuda").bfloat16() for out in outs] * HOST_COPIES
    shapes = [(16, width)] * n + [(out, 16) for out in outs]
    xs, factors = [], []
    for _ in range(HOST_COPIES):
        xs.append(torch.randn(64, width, device="cuda").bfloat16().requires_grad_())
        leaves = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
        if flat:
            buffer = torch.cat([leaf.detach().view(-1) for leaf in leaves]).requires_grad_()
            pieces = buffer.split([leaf.numel() for leaf in leaves])
            leaves = [piece.view(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]
        factors.append(leaves)
    wanted = [*xs, *(leaf for leaves in factors for leaf in leaves)]

    def run() -> None:
        ys: list[Tensor] = []
        for x, given in zip(xs, factors, strict=True):
            if separate:
                pairs = zip(weights, given[:n], given[n:], strict=True)
                ys += [x @ weight.t() + (x @ down.t() @ up.t()) * 2.0 for weight, down, up in pairs]
            else:
                ys += ops.lora_group(x, weights, [None] * n, given[:n], given[n:], [2.0] * n)
        torch.autograd.grad(ys, wanted, grads)

    return run


def table_host() -> None:
    """Time the processor spends on one group, forward and backward through autograd, at sizes the card does at once.

    The groups of SmolLM2-135M at 64 tokens and rank 16, eight of each in one backward pass; "flat": the adapters are
    views of one buffer.
    """
    both = f"{'host us':>8}{'kernels':>8}"
    print(f"{'group':<9} | {'ours:':>6}{both} | {'flat:':>6}{both} | {'separate products:':>18}{both}")
    for name, (width, outs) in HOST_GROUPS.items():
        cells = []
        for flat, separate in ((False, False), (True, False), (False, True)):
            run = host_case(width, outs, flat, separate)
            cells += [host_us(run) / HOST_COPIES, kernels_of(run) / HOST_COPIES]
        a, ka, b, kb, c, kc = cells
        print(f"{name:<9} | {a:14.0f}{ka:8.1f} | {b:14.0f}{kb:8.1f} | {c:26.0f}{kc:8.1f}", flush=True)
