"""The experts' operator on a CPU against its truth: autograd over every pair of a token and an expert by itself."""

from typing import Any

import pytest
import torch

from ops.experts import ExpertAdapter, ExpertMatrix, ExpertWeights, experts_mlp
from tests.numerics import expert_cases
from tests.numerics.expert_cases import Problem, make, run, truth


def assert_true(problem: Problem, tolerance: float = 1e-12) -> None:
    y, grads = run(problem)
    expected_y, expected = truth(problem)
    torch.testing.assert_close(y.double(), expected_y, rtol=tolerance, atol=tolerance)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad.double(), expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("routing", expert_cases.ROUTINGS)
def test_against_truth(routing: str) -> None:
    assert_true(make(13, 3, 9, 24, 10, 5, routing=routing))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped"])
def test_activations_biases_and_layouts(activation: str) -> None:
    for interleaved, transposed in ((False, True), (True, False), (True, True)):
        layout: dict[str, Any] = {"interleaved": interleaved, "transposed": transposed}
        assert_true(make(11, 2, 5, 16, 12, 3, bias=True, activation=activation, **layout))


@pytest.mark.parametrize("adapted", ["gate_up", "down", "none"])
def test_part_of_an_adapter(adapted: str) -> None:
    assert_true(make(7, 2, 4, 16, 8, 4, adapted=adapted, bias=True))


def test_dropout_masks_every_pair_by_itself() -> None:
    assert_true(make(9, 2, 4, 24, 16, 4, p=0.4))


def test_pairs_of_no_expert_give_nothing() -> None:
    problem = make(9, 2, 4, 16, 8, 4, bias=True)
    problem.index[3, 1], problem.index[5, 0], problem.index[5, 1] = 4, 4, -1
    assert_true(problem)


def test_no_tokens() -> None:
    y, grads = run(make(0, 2, 4, 16, 8, 4, routing="one"))
    assert y.shape == (0, 16) and all(not grad.any() for grad in grads.values())


def test_what_is_kept_does_not_depend_on_the_routing() -> None:
    kept: dict[str, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[routing] = kept.get(routing, 0) + tensor.nbytes
        return tensor

    for routing in expert_cases.ROUTINGS:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(make(64, 2, 16, 24, 10, 4, torch.float32, routing=routing))
    assert kept["even"] > 0 and len(set(kept.values())) == 1


def test_gradcheck() -> None:
    problem = make(5, 2, 3, 6, 4, 2, bias=True, activation="gelu_tanh")
    inputs = [tensor.requires_grad_() for tensor in problem.trained().values()]
    frozen = problem.frozen()

    def function(x: torch.Tensor, w: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        a_gu, b_gu, a_d, b_d = factors
        return experts_mlp(x, problem.index, w, frozen, ExpertAdapter(a_gu, b_gu, a_d, b_d, 1.3, 0.7))

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("adapted", ["both", "down", "none"])
def test_opcheck(adapted: str) -> None:
    problem = make(5, 2, 3, 8, 4, 2, torch.float32, bias=True, p=0.25, adapted=adapted)
    for tensor in problem.trained().values():
        tensor.requires_grad_()
    factors = problem.gate_up_factors, problem.down_factors
    shape, form, numbers = [3, 4, 8, 0, 0], ["plain", "plain", "silu", "halves"], [1.0, 0.5, 0.25, 1.7, 7.0]
    args = (
        *(problem.hidden, problem.index, problem.weights, [problem.gate_up], [problem.down], problem.biases),
        *(*factors, shape, form, numbers, problem.seed, None, None),
    )
    torch.library.opcheck(torch.ops.zerolora.experts_forward.default, args)


def test_frozen_weights_refuse_a_gradient() -> None:
    problem = make(5, 2, 3, 8, 4, 2)
    problem.gate_up.requires_grad_()
    y = experts_mlp(problem.hidden, problem.index, problem.weights, problem.frozen(), problem.adapter())
    with pytest.raises(ValueError, match="requires a gradient"):
        y.sum().backward()


def test_adapters_in_fp32_get_gradients_in_fp32() -> None:
    problem = make(5, 2, 3, 8, 4, 2, torch.bfloat16)
    problem.gate_up_factors = [factor.float() for factor in problem.gate_up_factors]
    _, grads = run(problem)
    assert grads["gate_up.A"].dtype == torch.float32 and grads["down.A"].dtype == torch.bfloat16
    assert grads["hidden"].dtype == torch.bfloat16


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_as_bitsandbytes_has_it(nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    problem = make(7, 2, 3, 64, 64, 4, torch.float32)  # bitsandbytes on a CPU errs with rows shorter than a block

    def matrix(weight: torch.Tensor) -> tuple[ExpertMatrix, torch.Tensor]:
        packed, states = zip(
            *(functional.quantize_4bit(w.contiguous(), quant_type="nf4", compress_statistics=nested) for w in weight),
            strict=True,
        )
        state = [torch.stack([s.absmax for s in states]), states[0].code]
        if nested:
            state.append(torch.stack([s.state2.absmax for s in states]))
            state += [states[0].state2.code, torch.stack([s.offset for s in states])]
        dense = [functional.dequantize_4bit(q, s) for q, s in zip(packed, states, strict=True)]
        blocks = states[0].blocksize, states[0].state2.blocksize if nested else 0
        _, rows, cols = weight.shape
        return ExpertMatrix.from_nf4(torch.stack(packed), state, rows, cols, *blocks), torch.stack(dense)

    (gate_up, problem.gate_up), (down, problem.down) = matrix(problem.gate_up), matrix(problem.down)
    assert torch.equal(gate_up.dequantize(torch.float32), problem.gate_up)
    packed, dense = run(problem, ExpertWeights(gate_up, down)), run(problem)
    assert torch.equal(packed[0], dense[0])
    assert all(torch.equal(packed[1][name], dense[1][name]) for name in dense[1])


def test_mxfp4_as_transformers_reads_it() -> None:
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 6, 2), generator=generator, dtype=torch.uint8)
    ours = ExpertMatrix.from_mxfp4(blocks, scales).dequantize(torch.bfloat16)
    assert torch.equal(ours.transpose(1, 2), convert(blocks, scales, dtype=torch.bfloat16))


def test_bad_inputs_name_their_values() -> None:
    problem = make(5, 2, 3, 8, 4, 2)
    args = problem.index, problem.weights, problem.frozen(), problem.adapter()
    a, b = problem.gate_up_factors
    with pytest.raises(ValueError, match=r"hidden states have shape \(5, 6\), but the experts expect \[T, 8\]"):
        experts_mlp(problem.hidden[:, :6], *args)
    with pytest.raises(ValueError, match="one factor"):
        experts_mlp(problem.hidden, *args[:3], ExpertAdapter(gate_up_down=problem.gate_up_factors[0]))
    with pytest.raises(ValueError, match="dropout"):
        experts_mlp(problem.hidden, *args[:3], ExpertAdapter(a, b, dropout=1.0))
    with pytest.raises(ValueError, match=r"A .* B"):
        experts_mlp(problem.hidden, *args[:3], ExpertAdapter(b, a))
    with pytest.raises(ValueError, match="a block must not cross"):
        ExpertMatrix.from_nf4(torch.zeros(1), [torch.zeros(3, 1)], 3, 5, 64)
