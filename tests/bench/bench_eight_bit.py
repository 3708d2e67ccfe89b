"""Times of the 8-bit operators' parts on a card: `python -m tests.bench.bench_eight_bit [--tokens 8192]`.

Microseconds, medians of 20 after 5. bf16: the product of cuBLAS. fast, exact: the scaled FP8 product with the sums of
the tensor cores alone, and with sums in float32 every 128 terms. torch: torch._scaled_mm by rows. int8: by
torch._int_mm and a pass over its sums. x, dY: quantising what goes in, forward and backward. all: the operator with the
adapter. linear dX: quantising dY, turning the weights, and the product.
"""
# ruff: noqa: B023 (what a timed call reads is what the loop has there)

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import ops
from ops import eight_bit

SHAPES = {
    "q,k,v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate,up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


def time_of(run: Callable[[], Any], repeats: int = 20) -> float:
    """Microseconds of one call."""
    times = []
    for _ in range(5 + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[5:])


def line(name: str, T: int, width: int, outs: tuple[int, ...]) -> dict[str, float]:
    """Return all times of one group of shared-input projections."""
    operators: Any = torch.ops.zerolora
    x = torch.randn(T, width, device="cuda", dtype=torch.bfloat16)
    grads = [torch.randn(T, out, device="cuda", dtype=torch.bfloat16) for out in outs]
    plain = [torch.randn(out, width, device="cuda", dtype=torch.bfloat16) / width**0.5 for out in outs]
    found: dict[str, float] = {}
    found["y bf16"] = time_of(lambda: [x @ weight.t() for weight in plain])
    found["dX bf16"] = time_of(lambda: [grad @ weight for grad, weight in zip(grads, plain, strict=True)])
    for kind in ("fp8", "int8"):
        weights = [eight_bit.quantize_rows(weight, kind) for weight in plain]
        storage = eight_bit.STORAGE[kind]
        q, scale = operators.quantize_rows([x], [], storage)
        factors = [weight[1] for weight in weights]
        g, u = operators.quantize_rows(grads, factors, storage)
        turned = torch.cat([weight[0] for weight in weights]).t().contiguous()
        if kind == "fp8":
            found["x"] = time_of(lambda: operators.quantize_rows([x], [], storage))
            found["dY"] = time_of(lambda: operators.quantize_rows(grads, factors, storage))
        for word, fast in (("fast", True), ("exact", False)) if kind == "fp8" else (("int8", True),):
            found[f"y {word}"] = time_of(
                lambda: [operators.eight_bit_product(q, scale, w, v, fast) for w, v in weights]
            )
            found[f"dX {word}"] = time_of(lambda: operators.eight_bit_product(g, u, turned, None, fast))
        if kind == "fp8":
            values = [tensor.view(torch.float8_e4m3fn) for tensor in (q, g, turned)]
            ones = torch.ones(1, width, device="cuda")
            mine = [(w.view(torch.float8_e4m3fn), v) for w, v in weights]

            def torch_product(left: Any, row: Any, right: Any, column: Any) -> Any:
                return torch._scaled_mm(
                    left, right.t(), row[:, None], column.reshape(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
                )

            found["y torch"] = time_of(lambda: [torch_product(values[0], scale, w, v) for w, v in mine])
            found["dX torch"] = time_of(lambda: torch_product(values[1], u, values[2], ones))
        downs = [torch.randn(16, width, device="cuda", dtype=torch.bfloat16) / 64 for _ in outs]
        ups = [torch.randn(out, 16, device="cuda", dtype=torch.bfloat16) / 64 for out in outs]
        arguments = ([weight[0] for weight in weights], factors)
        _, h = operators.eight_bit_forward(x, *arguments, [], downs, ups, [1.0] * len(outs), 0.0, None, None)
        tail = [1.0] * len(outs), 0.0, None
        found[f"all y {kind}"] = time_of(
            lambda: operators.eight_bit_forward(x, *arguments, [], downs, ups, *tail, None)
        )
        found[f"all dX {kind}"] = time_of(
            lambda: operators.eight_bit_backward(grads, x, *arguments, downs, ups, h, *tail, True, True, True)
        )
        found[f"linear dX {kind}"] = time_of(lambda: operators.eight_bit_linear_backward(grads, *arguments))
    _, h = operators.lora_forward(x, plain, [], downs, ups, *tail, None)
    found["all y bf16"] = time_of(lambda: operators.lora_forward(x, plain, [], downs, ups, *tail, None))
    found["all dX bf16"] = time_of(
        lambda: operators.lora_backward(grads, x, plain, downs, ups, h, *tail, True, True, True)
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, ops.load_backend("cuda"))
    totals: dict[str, float] = {}
    for name, (width, outs) in SHAPES.items():
        found = line(name, arguments.tokens, width, outs)
        print(f"{name:8} " + "  ".join(f"{what} {time:.1f}" for what, time in found.items()), flush=True)
        totals = {what: totals.get(what, 0.0) + time for what, time in found.items()}
    print("layer    " + "  ".join(f"{what} {time:.1f}" for what, time in totals.items()))


if __name__ == "__main__":
    main()
