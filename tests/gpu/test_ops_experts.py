"""The experts' kernels against float64, on a card: values, edges, determinism, packed weights, no wait for the host."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ops import experts_kernels, experts_plain
from ops.experts import ExpertMatrix
from tests.numerics import expert_cases
from tests.numerics.expert_cases import Problem, draw_packed, make, moved, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
HALVES = [torch.bfloat16, torch.float16]


def on_card(dtype: torch.dtype, *shape: int, **more: Any) -> Problem:
    return make(*shape, dtype, **more).to(dtype, "cuda")  # type: ignore[arg-type, call-arg]


def results(problem: Problem, monkeypatch: pytest.MonkeyPatch, plain: bool = False) -> dict[str, torch.Tensor]:
    with monkeypatch.context() as patch:
        if plain:
            patch.setattr(experts_kernels, "is_supported", lambda x, shape: False)
        y, grads = run(problem)
    return {"y": y} | grads


def pooled(problems: list[Problem], monkeypatch: pytest.MonkeyPatch, plain: bool = False) -> dict[str, torch.Tensor]:
    found = [results(problem, monkeypatch, plain) for problem in problems]
    return {name: torch.cat([each[name].reshape(-1) for each in found]) for name in found[0]}


def check(problem: Problem, monkeypatch: pytest.MonkeyPatch, *alike: Problem) -> dict[str, torch.Tensor]:
    """Errors against float64 are not above those of plain torch in the same type, expert by expert.

    `alike`: more problems of the shape; their errors count together if one has too few values to compare.
    """
    assert experts_kernels.is_supported(
        problem.hidden, [*problem.down.shape[:1], problem.down.shape[2], problem.down.shape[1], 0, 0]
    )
    problems = [problem, *alike]
    ours, plain = pooled(problems, monkeypatch), pooled(problems, monkeypatch, plain=True)
    truth = pooled([each.to(torch.float64, "cuda") for each in problems], monkeypatch)
    for name, true in truth.items():
        mine, theirs = ours[name].double() - true, plain[name].double() - true
        assert ours[name].dtype == plain[name].dtype and torch.isfinite(mine).all(), name
        floor = 1e-3 * float(true.square().mean().sqrt())
        rms, other = float(mine.square().mean().sqrt()), float(theirs.square().mean().sqrt())
        assert rms <= 1.1 * other + floor, f"{name}: rms error {rms:.3e}, plain torch {other:.3e}"
        top, other = float(mine.abs().max()), float(theirs.abs().max())
        assert top <= 2 * other + 10 * floor, f"{name}: largest error {top:.3e}, plain torch {other:.3e}"
    return results(problem, monkeypatch)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("routing", expert_cases.ROUTINGS)
def test_routings(routing, dtype, monkeypatch):
    check(on_card(dtype, 700, 4, 12, 256, 128, 16, routing=routing), monkeypatch)


@pytest.mark.parametrize("rank", [1, 8, 16, 24, 64, 80, 256])
def test_ranks(rank, monkeypatch):
    check(on_card(torch.bfloat16, 300, 2, 5, 256, 128, rank, p=0.1 if rank > 16 else 0.0), monkeypatch)


@pytest.mark.parametrize(("T", "H", "inner"), [(1, 8, 8), (65, 264, 72), (513, 1032, 136), (2000, 520, 264)])
def test_shapes(T, H, inner, monkeypatch):
    # A token has two weights: which of two roundings comes closer to two numbers is chance.
    seeds = range(64 if T == 1 else 1)
    problem, *alike = (on_card(torch.bfloat16, T, 2, 7, H, inner, 16, seed=seed) for seed in seeds)
    check(problem, monkeypatch, *alike)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped"])
def test_activations_biases_and_layouts(activation, dtype, monkeypatch):
    for interleaved, transposed in ((False, True), (True, False), (True, True)):
        layout = {"interleaved": interleaved, "transposed": transposed}
        check(on_card(dtype, 130, 3, 6, 128, 72, 16, bias=True, activation=activation, **layout), monkeypatch)


@pytest.mark.parametrize("adapted", ["gate_up", "down", "none"])
def test_part_of_an_adapter(adapted, monkeypatch):
    check(on_card(torch.bfloat16, 200, 2, 4, 128, 64, 16, adapted=adapted, bias=adapted == "none"), monkeypatch)


@pytest.mark.parametrize("interleaved", [False, True])
def test_dropout(interleaved, monkeypatch):
    problem = on_card(torch.bfloat16, 400, 3, 6, 264, 136, 16, p=0.3, interleaved=interleaved)
    check(problem, monkeypatch)


def test_pairs_of_no_expert_give_nothing(monkeypatch):
    problem = on_card(torch.bfloat16, 300, 2, 4, 128, 64, 16, bias=True)
    problem.index[7:90, 1], problem.index[100:140] = 4, -1
    check(problem, monkeypatch)


def test_adapters_in_fp32(monkeypatch):
    problem = on_card(torch.bfloat16, 300, 2, 4, 128, 64, 16)
    problem.gate_up_factors = [factor.float() for factor in problem.gate_up_factors]
    got = check(problem, monkeypatch)
    assert got["gate_up.A"].dtype == got["gate_up.B"].dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rank", [8, 24, 64])
@pytest.mark.parametrize("routing", ["ragged", "one", "doubled"])
def test_products_of_torch(routing, rank, dtype, monkeypatch):
    """As on every card but Hopper: torch's grouped products, behind which our kernel adds the adapter's term."""
    monkeypatch.setattr(experts_kernels, "USE_PRODUCT_KERNEL", False)
    layout = {"interleaved": rank == 24, "transposed": rank == 64, "p": 0.1 if rank == 24 else 0.0}
    problem = on_card(dtype, 300, 3, 7, 264, 136, rank, routing=routing, bias=rank == 64, **layout)
    if routing == "ragged":
        problem.index[7:90, 1], problem.index[100:140] = 7, -1
    first = check(problem, monkeypatch)
    assert all(torch.equal(value, first[name]) for name, value in results(problem, monkeypatch).items())


def test_products_of_torch_with_packed_weights(monkeypatch):
    monkeypatch.setattr(experts_kernels, "USE_PRODUCT_KERNEL", False)
    for storage in ("nf4", "nested", "mxfp4"):
        check_packed(storage, torch.bfloat16, monkeypatch)


def test_no_tokens(monkeypatch):
    got = results(on_card(torch.bfloat16, 0, 2, 4, 128, 64, 16, routing="one"), monkeypatch)
    assert got["y"].shape == (0, 128) and not got["gate_up.A"].any() and not got["down.B"].any()


@pytest.mark.parametrize(("T", "K", "E"), [(1, 1, 1), (513, 2, 3), (8192, 8, 128), (1000, 3, 1024), (77, 4, 500)])
def test_sorting(T, K, E):
    index = torch.randint(-1, E + 1, (T, K), generator=torch.Generator().manual_seed(T)).cuda()
    order, ends = torch.ops.zerolora.expert_sort(index, E)
    expected, expected_ends = experts_plain.sort_rows(index, E)
    assert torch.equal(order, expected) and torch.equal(ends, expected_ends)
    place, tiles, pairs = torch.ops.zerolora.expert_plan(order, ends)
    assert torch.equal(place[order.long()], torch.arange(T * K, device="cuda", dtype=torch.int32))
    begins = [0, *ends.tolist()]
    for found, rows in ((tiles.tolist(), 64), (pairs.tolist()[:-1], 256)):
        wanted = [[e, row] for e in range(E) for row in range(begins[e], begins[e + 1], rows)]
        assert found[: len(wanted)] == wanted and all(tile[0] == -1 for tile in found[len(wanted) :])
    assert pairs[-1, 0] == len(wanted)


def test_twenty_runs_give_the_same_bits(monkeypatch):
    problem = on_card(torch.bfloat16, 2048, 8, 32, 512, 256, 16, p=0.1, routing="skewed")
    first = results(problem, monkeypatch)
    for _ in range(19):
        for name, value in results(problem, monkeypatch).items():
            assert torch.equal(value, first[name]), name


def test_nothing_waits_for_the_host(monkeypatch):
    problem = on_card(torch.bfloat16, 512, 4, 16, 256, 128, 16, p=0.1, bias=True, activation="clamped")
    results(problem, monkeypatch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(problem, monkeypatch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_packed_weights_are_dequantised_to_the_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    E, rows, cols = 3, 64, 96
    packed = torch.randint(0, 256, (E, rows * cols // 2), generator=generator, dtype=torch.uint8)
    blocks, code = rows * cols // 64, torch.linspace(-1, 1, 16)
    plain = [torch.rand(E, blocks, generator=generator), code]
    nested = [
        torch.randint(0, 256, (E, blocks), generator=generator, dtype=torch.uint8),
        code,
        torch.rand(E, -(-blocks // 64), generator=generator),
        torch.linspace(-1, 1, 256),
        torch.rand(E, generator=generator),
    ]
    for state in (plain, nested):
        matrix = ExpertMatrix.from_nf4(packed, state, rows, cols, 64, 64)
        here = experts_kernels.build_dense_weight(
            [packed.cuda(), *(s.cuda() for s in state)], "nf4", [E, rows, cols, 64, 64], dtype
        )
        assert torch.equal(here.cpu(), matrix.dequantize(dtype))
    codes = torch.randint(0, 256, (E, rows, cols // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 135, (E, rows, cols // 32), generator=generator, dtype=torch.uint8)
    here = experts_kernels.build_dense_weight([codes.cuda(), scales.cuda()], "mxfp4", [E, rows, cols, 0, 0], dtype)
    assert torch.equal(here.cpu(), ExpertMatrix.from_mxfp4(codes, scales).dequantize(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("storage", ["nf4", "nested", "mxfp4"])
def test_packed_weights_give_what_dense_ones_do(storage, dtype, monkeypatch):
    check_packed(storage, dtype, monkeypatch)


def check_packed(storage: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gpt-oss's gate, to the bit."""
    problem = on_card(dtype, 300, 2, 4, 128, 64, 16, interleaved=True, activation="clamped")
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 128, 128), (4, 128, 64)
    gate_up, down = (draw_packed(storage, shape, generator) for shape in shapes)
    packed = replace(problem.frozen(), gate_up=moved(gate_up, "cuda"), down=moved(down, "cuda"))
    dense = replace(problem, gate_up=gate_up.dequantize(dtype).cuda(), down=down.dequantize(dtype).cuda())
    y, grads = run(problem, packed)
    expected = results(dense, monkeypatch)
    assert torch.equal(y, expected.pop("y")) and all(torch.equal(grads[name], expected[name]) for name in expected)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is Hopper's (sm_90a)"
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize(
    ("T", "E", "K", "D", "rank", "routing"),
    [
        (1, 3, 8, 8, 16, "one"),
        (300, 5, 200, 520, 0, "ragged"),
        (700, 12, 264, 1032, 16, "ragged"),
        (900, 4, 136, 264, 80, "skewed"),
        (4096, 32, 768, 2048, 16, "skewed"),
        (2048, 3, 2048, 1536, 64, "one"),
    ],
)
def test_product_with_the_adapter_inside(T, E, K, D, rank, routing, by_column, dtype):
    generator = torch.Generator().manual_seed(0)
    index = expert_cases.route(routing, T, 2, E, generator).cuda()
    order, ends = torch.ops.zerolora.expert_sort(index, E)
    pairs = torch.ops.zerolora.expert_plan(order, ends)[2]

    def normal(*shape, size=1.0):
        return (torch.randn(shape, generator=generator) * size).to(dtype).cuda()

    x, h = normal(2 * T, K), normal(2 * T, rank)
    w, q = normal(E, K, D, size=K**-0.5), normal(E, rank, D)
    laid = [t.transpose(1, 2).contiguous() if by_column else t for t in (w, q)]
    given = (h, laid[1]) if rank else (None, None)
    got = torch.ops.zerolora.expert_product(x, laid[0], *given, ends, pairs, by_column)
    begin = 0
    for e, end in enumerate(ends.tolist()):
        rows = slice(begin, end)
        truth = x[rows].double() @ w[e].double() + h[rows].double() @ q[e].double()
        terms = x[rows].double().abs() @ w[e].double().abs() + h[rows].double().abs() @ q[e].double().abs()
        bound = (2.0**-8 if dtype == torch.bfloat16 else 2.0**-11) * truth.abs() + 2 * (K + rank) * 2.0**-24 * terms
        assert bool(((got[rows].double() - truth).abs() <= bound + 1e-30).all()), e
        begin = end
