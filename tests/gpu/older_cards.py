"""The operators as they are built for an older card, on whatever card is here, part by part.

python -m tests.gpu.older_cards compute_80      prints `compute_80 PART agrees`, `skipped: WHY` or `failed: ERROR`
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

import ops
from ops.builder import LoraOpBuilder
from ops.toolkit import PTX_PREFIX
from tests.gpu import test_elementwise, test_ops_eight_bit, test_ops_experts, test_ops_lora
from tests.numerics import cases

FP8_FROM = (8, 9)
HALVES = torch.float16, torch.bfloat16
TYPES = torch.float32, *HALVES
Checks = Iterator[partial[None]]
Capability = tuple[int, int]
ADAPTERS = [  # T, I, O, R, dropout
    (300, 512, 384, 16, 0.0),
    (1000, 1000, 2056, 16, 0.1),
    (513, 2048, 640, 64, 0.1),
    (129, 264, 4104, 24, 0.0),
    (4096, 1024, 4096, 128, 0.0),
    (1, 8, 8, 8, 0.0),
]


def adapter(dtype: torch.dtype, T: int, width: int, out: int, rank: int, p: float) -> None:
    """Results within the budget of their truth, and the same bits again."""
    problem = cases.make(T, width, out, rank, dtype, "cuda", p=p)
    first, again = cases.check(problem).named(), cases.run_operator(problem).named()
    assert all(torch.equal(first[name], again[name]) for name in first)


def half(_: Capability) -> Checks:
    yield from (partial(adapter, dtype, *shape) for dtype in HALVES for shape in ADAPTERS)


def fp32(_: Capability) -> Checks:
    yield from (partial(adapter, torch.float32, *shape) for shape in ADAPTERS)
    yield from (partial(test_ops_lora.test_fp32_adapters_on_a_16_bit_base, dtype) for dtype in HALVES)


def elementwise(_: Capability) -> Checks:
    for dtype in TYPES:
        for T, D in [(127, 64), (300, 1000), (1000, 4096), (17, 8192), (9, 4097)]:
            yield from (partial(test_elementwise.test_norm, T, D, offset, dtype) for offset in (0.0, 1.0))
        for gated in test_elementwise.GATED:
            for shape in [(2, 129, 64), (257, 14336), (7, 77)]:
                yield partial(test_elementwise.test_gated_product, *gated, shape, dtype)
            yield partial(test_elementwise.test_gated_product_at_the_ends_of_its_range, *gated, dtype)
            yield partial(test_elementwise.test_gated_product_of_two_halves_of_one_matrix, *gated, dtype)
        for heads in [(2, 65, 32, 8, 128, 128), (3, 7, 4, 1, 96, 48), (1, 5, 2, 2, 10, 6)]:
            for layout in ("projection", "heads first"):
                yield partial(test_elementwise.test_rope, *heads, layout, dtype)


def nf4(_: Capability) -> Checks:
    yield from (partial(test_ops_lora.test_nf4, dtype, nested) for dtype in TYPES for nested in (False, True))


def experts(capability: Capability) -> Checks:
    if capability < (8, 0):
        pytest.skip("cards before 8.0 go expert by expert in plain torch")
    of = test_ops_experts
    with pytest.MonkeyPatch.context() as patch:
        for dtype in HALVES:
            yield from (partial(of.test_routings, routing, dtype, patch) for routing in ("ragged", "one", "skewed"))
            yield partial(of.test_activations_biases_and_layouts, "silu", dtype, patch)
            yield partial(of.test_activations_biases_and_layouts, "clamped", dtype, patch)
        yield from (partial(of.test_ranks, rank, patch) for rank in (1, 24, 80))
        yield from (partial(of.test_shapes, *shape, patch) for shape in [(65, 264, 72), (513, 1032, 136)])
        yield from (partial(of.test_part_of_an_adapter, adapted, patch) for adapted in ("gate_up", "down", "none"))
        yield from (partial(of.test_dropout, interleaved, patch) for interleaved in (False, True))
        yield partial(of.test_pairs_of_no_expert_give_nothing, patch)
        yield partial(of.test_sorting, 1000, 3, 1024)
        yield from (partial(of.test_packed_weights_are_dequantised_to_the_bit, dtype) for dtype in TYPES)
        for dtype in HALVES:
            yield from (partial(of.check_packed, storage, dtype, patch) for storage in ("nf4", "nested", "mxfp4"))


def eight_bit(capability: Capability) -> Checks:
    of = test_ops_eight_bit
    for kind in of.KINDS:
        for dtype in TYPES:
            for widths in [(4096,), (4096, 1024, 1024), (57344,), (40, 13)]:
                yield partial(of.test_quantised_rows_have_the_references_bits, kind, dtype, widths)
    for kind in of.KINDS if capability >= FP8_FROM else ("int8",):
        for shape in [(300, 512, 384), (333, 1008, 272), (65, 77, 129), (5, 64, 32), (4096, 1024, 1024)]:
            yield from (partial(of.test_errors_stay_in_the_budget, kind, *shape, p) for p in (0.0, 0.1))
        yield partial(of.test_a_group_and_the_derivative_in_cpp, kind)
    yield from (partial(of.test_other_types, dtype) for dtype in (torch.float16, torch.float32))
    yield from (partial(of.test_a_layer_without_an_adapter, *shape) for shape in [(144, 272), (77, 129)])


PARTS: dict[str, Callable[[Capability], Checks]] = {
    "half": half,
    "fp32": fp32,
    "elementwise": elementwise,
    "nf4": nf4,
    "experts": experts,
    "eight-bit": eight_bit,
}


def outcome(part: str, capability: Capability) -> str:
    """Return the report of a part; its first failure ends it and is reported with what was tried."""
    last: object = None
    try:
        for check in PARTS[part](capability):
            last = check
            check()
    except pytest.skip.Exception as reason:
        return f"skipped: {reason}"
    except Exception as error:  # of any kind: reported and printed, so that the other parts still run
        traceback.print_exc()
        return f"failed: {last}: {type(error).__name__}: {error}"
    return "agrees"


def main(name: str) -> None:
    LoraOpBuilder([name]).load()
    assert ops.load_backend("cuda").name == "cuda"
    number = int(name.removeprefix(PTX_PREFIX))
    capability = number // 10, number % 10
    # The operators in C++ know for which card they were built. Those in Python ask the card, which is another one.
    torch.cuda.get_device_capability = lambda device=None: capability
    # As tests/gpu/conftest.py has it: unwritten memory is NaN, and cuBLAS adds in fp32.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for part in PARTS:
        print(f"{name} {part} {outcome(part, capability)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
