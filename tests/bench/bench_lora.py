"""Times the LoRA operators against torch's separate products and against the frozen product alone; one line per shape.

    python -m tests.bench.bench_lora [--table passes|layer|frozen|small|nf4|host|all] [--tokens 8192]

Every figure is device time: calls are captured in a CUDA graph over several input sets (larger together than the L2)
and the median of replays is taken. GB/s counts the one read of the large matrix, nothing else.
"""

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ops
from tests.bench.host_time import table_host

LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}  # O, I
SMALL = [(4, 512, 768, 16), (8, 256, 1024, 32), (2, 1024, 2048, 16)]  # batch, sequence, hidden, rank
REPEATS = 9


def rounds_us(functions: Sequence[Callable[[int], object]], sets: int, loops: int = 4) -> list[list[float]]:
    """Microseconds of one call of each function(i) in each round, i rotating over the input sets.

    The functions take turns, so that the card's clock, which follows its power, is the same for all of them.
    """
    graphs = []
    for function in functions:
        for i in range(sets):
            function(i)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for i in range(sets * loops):
                function(i % sets)
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(REPEATS):
        for graph, taken in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # cycles: on an idle card the time until the graph is launched would count too
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1e3 / (sets * loops))
    return [taken[1:] for taken in times]


def device_us(functions: Sequence[Callable[[int], object]], sets: int) -> list[float]:
    """The medians of the rounds."""
    return [statistics.median(taken) for taken in rounds_us(functions, sets)]


def more_us(taken: Sequence[float], base: Sequence[float]) -> float:
    """How much longer one function takes than another: the median of what the rounds differ by."""
    return statistics.median(a - b for a, b in zip(taken, base, strict=True))


def copy_gbps() -> float:
    """Device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(2**30, device="cuda").bfloat16()
    target = torch.empty_like(source)
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return 2 * source.numel() * source.itemsize / statistics.median(times[1:]) / 1e6


class Case:
    """Tensors of one linear in bf16 (or another type), as many input sets as exceed the L2."""

    def __init__(self, T: int, out: int, width: int, rank: int, dtype: torch.dtype) -> None:
        self.T, self.out, self.width, self.rank, self.scale = T, out, width, rank, 2.0
        self.sets = max(2, min(6, int(2.5e8 // (T * min(out, width) * dtype.itemsize) + 1)))

        def normal(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(shape, device="cuda") * size).to(dtype)

        self.x = [normal(T, width) for _ in range(self.sets)]
        self.dy = [normal(T, out) for _ in range(self.sets)]
        self.weight = normal(out, width, size=width**-0.5)
        self.down, self.up = normal(rank, width, size=width**-0.5), normal(out, rank, size=rank**-0.5)
        self.h, self.dh = normal(T, rank), normal(T, rank)
        self.y, self.dx = torch.empty_like(self.dy[0]), torch.empty_like(self.x[0])
        self.seed = torch.tensor([1], device="cuda")

    def us(self, *functions: Callable[[int], object]) -> list[float]:
        return device_us(functions, self.sets)

    def forward(self, i: int, p: float = 0.0) -> tuple[list[Tensor], Tensor]:
        args: Any = self.x[i], [self.weight], [], [self.down], [self.up], [self.scale], p, self.seed if p else None
        return torch.ops.zerolora.lora_forward(*args, None)

    def backward(self, i: int, h: Tensor, p: float = 0.0, need_x: bool = True) -> object:
        args = [self.dy[i]], self.x[i], [self.weight], [self.down], [self.up], h, [self.scale], p
        return torch.ops.zerolora.lora_backward(*args, self.seed if p else None, need_x, True, True)

    def both(self, i: int, p: float = 0.0) -> None:
        self.backward(i, self.forward(i, p)[1], p)

    def torch_both(self, i: int) -> None:
        h = self.x[i] @ self.down.t()
        y = self.x[i] @ self.weight.t()
        y.addmm_(h, self.up.t(), alpha=self.scale)
        dh = self.scale * (self.dy[i] @ self.up)
        dx = self.dy[i] @ self.weight
        dx.addmm_(dh, self.down)
        _ = self.scale * (self.dy[i].t() @ h), dh.t() @ self.x[i]

    def torch_dy(self, i: int) -> None:
        _ = self.dy[i] @ self.up, self.dy[i].t() @ self.h

    def torch_gradients(self, i: int) -> None:
        dh = self.dy[i] @ self.up
        _ = self.dy[i].t() @ self.h, dh.t() @ self.x[i]

    def frozen_dx(self, i: int) -> None:
        torch.mm(self.dy[i], self.weight, out=self.dx)

    def torch_dx(self, i: int) -> None:
        torch.mm(self.dy[i], self.weight, out=self.dx).addmm_(self.dh, self.down)

    def our_dx(self, i: int) -> Tensor:
        """dX the way that `lora_backward` takes: in one kernel, or cuBLAS onto the adapter's term, or before it."""
        run = torch.ops.zerolora.frozen_product
        return run([self.dy[i]], [self.weight.t()], self.dh, self.down.t(), None, None, False)

    def frozen(self, i: int) -> None:
        torch.mm(self.x[i], self.weight.t(), out=self.y)
        torch.mm(self.dy[i], self.weight, out=self.dx)


def line_of_passes(name: str, c: Case, copy: float) -> str:
    run = torch.ops.zerolora.rank_pass
    h, t_h = c.us(lambda i: run(c.x[i], c.down, None, 0.0, None), lambda i: c.x[i] @ c.down.t())
    dy, t_dy = c.us(lambda i: run(c.dy[i], c.up, c.h, 0.0, None), c.torch_dy)
    da, t_da = c.us(lambda i: run(c.x[i], None, c.dh, 0.0, None), lambda i: c.dh.t() @ c.x[i])
    gradients, t_gradients = c.us(lambda i: c.backward(i, c.h, need_x=False), c.torch_gradients)
    dx = rounds_us((c.frozen_dx, c.our_dx, c.torch_dx), c.sets)
    frozen, with_adapter, t_with = map(statistics.median, dx)
    mine, theirs = gradients + more_us(dx[1], dx[0]), t_gradients + more_us(dx[2], dx[0])
    gb = [c.T * d * 2 / us / 1e3 for d, us in ((c.width, h), (c.out, dy), (c.width, da))]
    return (
        f"{name:<9}{c.T:>6}{c.rank:>4} | {h:7.1f}{gb[0]:6.0f}{100 * gb[0] / copy:6.0f}{t_h:7.1f} |"
        f" {dy:9.1f}{gb[1]:6.0f}{100 * gb[1] / copy:6.0f}{t_dy:7.1f} | {da:7.1f}{gb[2]:6.0f}{100 * gb[2] / copy:6.0f}"
        f"{t_da:7.1f} | {frozen:8.1f}{with_adapter:8.1f}{t_with:8.1f} | {mine:9.1f}{theirs:7.1f}{theirs / mine:6.2f}"
    )


def table_passes(tokens: Sequence[int], ranks: Sequence[int], copy: float) -> None:
    """Time the three passes versus torch's products; dX; and the adapter's part of the backward as a whole.

    That part is dh, dB, dA and what the adapter adds to dX: dX with it less the frozen product (cuBLAS's, alone), three
    products in turns, for torch likewise. A frozen product of ours that is slower than cuBLAS's counts against it.
    """
    rate = f"{'GB/s':>6}{'%copy':>6}{'torch':>7}"
    print(f"{'shape':<9}{'T':>6}{'R':>4} | {'x->h':>7}{rate} | {'dY->dh,dB':>9}{rate} | {'x->dA':>7}{rate} |", end="")
    print(f" {'dX alone':>8}{'with':>8}{'torch':>8} | {'backward':>9}{'torch':>7}{'ratio':>6}")
    for T in tokens:
        for name, (out, width) in LLAMA_8B.items():
            for rank in ranks:
                print(line_of_passes(name, Case(T, out, width, rank, torch.bfloat16), copy), flush=True)


def line_of_layer(name: str, c: Case) -> str:
    frozen, ours, separate, dropped = c.us(c.frozen, c.both, c.torch_both, lambda i: c.both(i, 0.1))
    flops = 4 * c.T * c.out * c.width + 6 * c.T * c.rank * (c.out + c.width)
    return (
        f"{name:<9}{c.T:>6}{c.rank:>4} | {frozen:8.1f}{ours:8.1f}{100 * (ours / frozen - 1):6.1f}{separate:8.1f}"
        f"{100 * (separate / frozen - 1):6.1f} | {dropped:8.1f}{100 * (dropped / ours - 1):6.1f} |"
        f" {flops / ours / 1e6:8.0f}"
    )


def table_layer(tokens: Sequence[int], ranks: Sequence[int]) -> None:
    """Time forward and backward of one adapted linear, versus its frozen products and torch's separate products."""
    print(f"{'shape':<9}{'T':>6}{'R':>4} | {'frozen':>8}{'ours':>8}{'+%':>6}{'torch':>8}{'+%':>6} |", end="")
    print(f" {'p=0.1':>8}{'+%':>6} | {'TFLOP/s':>8}")
    for T in tokens:
        for name, (out, width) in LLAMA_8B.items():
            for rank in ranks:
                print(line_of_layer(name, Case(T, out, width, rank, torch.bfloat16)), flush=True)


SIBLINGS = {  # O of each, I
    "q,k,v": ((4096, 1024, 1024), 4096),
    "k": ((1024,), 4096),
    "o": ((4096,), 4096),
    "gate,up": ((14336, 14336), 4096),
    "gate": ((14336,), 4096),
    "down": ((4096,), 14336),
}


def line_of_frozen(name: str, T: int, outs: Sequence[int], width: int, ranks: Sequence[int], forward: bool) -> str:
    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * size).bfloat16()

    depths, cols = ((width,), outs[0]) if forward else (outs, width)
    sets = [[normal(T, depth) for depth in depths] for _ in range(2)]
    stored = [normal(out, width, size=width**-0.5) for out in outs]
    weights = stored if forward else [weight.t() for weight in stored]  # [D,K]
    y = torch.empty(T, cols, device="cuda", dtype=torch.bfloat16)

    def add(target: Tensor, i: int, first: int = 0) -> None:
        for x, weight in zip(sets[i][first:], weights[first:], strict=True):
            target.addmm_(x, weight.t())

    def alone(i: int) -> None:
        torch.mm(sets[i][0], weights[0].t(), out=y)
        add(y, i, 1)

    def ways(rank: int) -> list[Callable[[int], object]]:
        h, factor = normal(T, rank), normal(cols, rank) if forward else normal(rank, cols).t()
        before, inside = torch.ops.zerolora.rank_expand, torch.ops.zerolora.frozen_product
        return [
            lambda i: add(before(h, factor, 0.0, None), i),
            lambda i: inside(sets[i], weights, h, factor, None, None),
        ]

    functions = [alone, ways(0)[1], *(way for rank in ranks for way in ways(rank))]
    frozen, *times = device_us(functions, 2)
    rate = 2 * T * cols * sum(depths) / frozen / 1e6
    cells = [f"{times[0]:8.1f}{100 * (times[0] / frozen - 1):6.1f}"]
    for before, inside in zip(times[1::2], times[2::2], strict=True):
        cells.append(f"{before:8.1f}{inside:8.1f}{100 * (inside / frozen - 1):6.1f}{before - inside:7.1f}")
    return f"{name:<9}{T:>6} {'dX' if not forward else 'y':<3}| {frozen:8.1f}{rate:8.0f} | " + " | ".join(cells)


def table_frozen(tokens: Sequence[int], ranks: Sequence[int]) -> None:
    """The frozen product: cuBLAS alone, ours alone, and for each rank cuBLAS onto the adapter's term, and ours with it.

    "+%" is relative to cuBLAS only, "saved" is in us. Forward of one projection, backward of the whole group.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        print("frozen: our kernel needs compute capability 9.0")
        return
    print(f"{'shape':<9}{'T':>6}    | {'cuBLAS':>8}{'TFLOP/s':>8} | {'ours':>8}{'+%':>6}", end="")
    print("".join(f" | R={rank:<5}{'':>1}{'with':>8}{'+%':>6}{'saved':>7}" for rank in ranks))
    for T in tokens:
        for name, (outs, width) in SIBLINGS.items():
            for forward in (True, False) if len(outs) == 1 else (False,):
                print(line_of_frozen(name, T, outs, width, ranks, forward), flush=True)


def products(x: Tensor, dy: Tensor, down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dA, dB of the adapter alone, product by product."""
    h, dh = x @ down.t() * scale, dy @ up * scale
    return dh @ down, dh.t() @ x, dy.t() @ h


def processor_us(c: Case) -> float:
    x, dy, down, up = (t.cpu() for t in (c.x[0], c.dy[0], c.down, c.up))
    laps = []
    for _ in range(12):
        begin = time.perf_counter()
        products(x, dy, down, up, c.scale)
        laps.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(laps[2:])


def line_of_small(c: Case) -> str:
    targets = c.dx, torch.empty_like(c.down), torch.empty_like(c.up)
    run = torch.ops.zerolora.adapter_backward_
    ours, theirs = c.us(
        lambda i: run(c.dy[i], c.x[i], c.down, c.up, c.scale, *targets, False),
        lambda i: products(c.x[i], c.dy[i], c.down, c.up, c.scale),
    )
    cpu = processor_us(c)
    return f"{ours:8.1f}{theirs:9.1f}{theirs / ours:6.2f} | {cpu:9.0f}{cpu / ours:7.1f}"


def table_small() -> None:
    """The plain adapter backward (dX, dA, dB) on small shapes against torch on the same card and on the processor."""
    print(f"{'batch':>5}{'seq':>6}{'hidden':>7}{'R':>4}{'type':>10} | {'ours':>8}{'torch':>9}{'ratio':>6} |", end="")
    print(f" {'cpu':>9}{'ratio':>7}")
    for batch, seq, hidden, rank in SMALL:
        for dtype in (torch.float32, torch.bfloat16):
            line = line_of_small(Case(batch * seq, hidden, hidden, rank, dtype))
            print(f"{batch:>5}{seq:>6}{hidden:>7}{rank:>4}{str(dtype)[6:]:>10} | {line}", flush=True)


def line_of_nf4(name: str, out: int, width: int, copy: float) -> str:
    from bitsandbytes import functional

    sets = []
    for _ in range(3):
        weight = torch.randn(out, width, device="cuda", dtype=torch.bfloat16)
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        packed.quant_state = state
        sets.append((ops.Nf4Weight.from_parameter(packed), packed, state))
    block, nested = sets[0][0].block, sets[0][0].nested_block
    run = torch.ops.zerolora.dequantize_nf4
    mine, theirs = device_us(
        [
            lambda i: run(sets[i][1], list(sets[i][0].state), out, width, block, nested, torch.bfloat16),
            lambda i: functional.dequantize_4bit(sets[i][1], sets[i][2]),
        ],
        3,
    )
    rate = out * width * 2.516 / mine / 1e3  # 0.5 packed, 1/64 of a byte of block maxima, 2 written
    return f"{name:<9}{mine:8.1f}{rate:6.0f}{100 * rate / copy:6.0f}{theirs:8.1f}{theirs / mine:6.2f}"


def table_nf4(copy: float) -> None:
    """Time dequantisation of double-quantised NF4 weights to bf16, versus bitsandbytes."""
    print(f"{'shape':<9}{'nf4':>8}{'GB/s':>6}{'%copy':>6}{'bnb':>8}{'ratio':>6}")
    for name, (out, width) in LLAMA_8B.items():
        print(line_of_nf4(name, out, width, copy), flush=True)


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--table", default="all", choices=["passes", "layer", "frozen", "small", "nf4", "host", "all"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    options = parser.parse_args()
    ops.load_backend("cuda")
    copy = copy_gbps()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit()},"
          f" copy {copy:.0f} GB/s, bf16 unless said, microseconds")  # fmt: skip
    wanted = options.table
    if wanted in ("passes", "all"):
        table_passes(options.tokens, options.ranks, copy)
    if wanted in ("layer", "all"):
        table_layer(options.tokens, options.ranks)
    if wanted in ("frozen", "all"):
        table_frozen(options.tokens, options.ranks)
    if wanted in ("small", "all"):
        table_small()
    if wanted in ("nf4", "all"):
        table_nf4(copy)
    if wanted in ("host", "all"):
        table_host()


if __name__ == "__main__":
    main()
