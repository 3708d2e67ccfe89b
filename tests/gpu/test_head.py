"""The kernels of head and loss against plain torch in 64 bits, on rows of real vocabularies."""

import pytest
import torch
from torch import Tensor

import ops.head
from ops.head import LossKind, sum_divergences, sum_token_losses
from tests.token_losses import PARAMETERS, PUBLISHED

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN = 24, 64
VOCABULARIES = [37, 4096, 49152, 128256]
# Of the largest value. In 16 bits the other side has the same rounded logits, and rounds its gradient too.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def made(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of an adapted model, those of its base near them, and a head."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    generator = torch.Generator("cuda").manual_seed(vocabulary)
    base = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator)
    hidden = base + 0.3 * torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator)
    weight = 0.3 * torch.randn(vocabulary, HIDDEN, device="cuda", generator=generator)
    return hidden.to(dtype), base.to(dtype), weight.to(dtype)


def largest_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_rows_of_a_divergence(dtype: torch.dtype, vocabulary: int) -> None:
    hidden, base, weight = made(vocabulary, dtype)
    logits, base_logits = hidden @ weight.t(), base @ weight.t()
    log_p, log_q = (each.double().log_softmax(-1) for each in (logits, base_logits))
    divergences = (log_p.exp() * (log_p - log_q)).sum(1)
    gradient = log_p.exp() * (log_p - log_q - divergences[:, None])
    got = torch.empty(TOKENS, device="cuda")
    ops.head._compute_divergences_on_gpu(logits, base_logits, got, 2.0)
    assert largest_error(got, divergences) < 1e-5
    assert largest_error(logits / 2, gradient) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_measures_of_rows(dtype: torch.dtype, vocabulary: int) -> None:
    hidden, base, weight = made(vocabulary, dtype)
    logits, base_logits = hidden @ weight.t(), base @ weight.t()
    targets = torch.randint(0, vocabulary, (TOKENS,), device="cuda")
    got = ops.head.measure_logits(logits, targets, base_logits)
    wanted = torch.zeros(len(ops.head.MEASURES), TOKENS, device="cuda", dtype=torch.double)
    ops.head._measure_in_torch(logits, targets, base_logits, wanted)
    for one, other in zip(got, wanted, strict=True):
        assert largest_error(one, other) < 1e-5


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("rows_at_once", [7, 10**6])
def test_divergence_and_its_gradient_are_those_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocabulary: int, rows_at_once: int
) -> None:
    hidden, base, weight = made(vocabulary, dtype)
    monkeypatch.setattr(ops.head, "MAX_LOGITS_PER_CHUNK", 2 * vocabulary * rows_at_once)
    found = []
    for rows in (ops.head._compute_divergences_on_gpu, ops.head._compute_divergences_in_torch):
        monkeypatch.setattr(ops.head, "_compute_divergences_on_gpu", rows)
        ours = hidden.clone().requires_grad_()
        divergence = sum_divergences(ours, base, weight)
        (3.0 * divergence).backward()
        assert ours.grad is not None
        assert sum_divergences(hidden, base, weight).item() == pytest.approx(divergence.item(), rel=1e-6)
        found.append((divergence, ours.grad))
    (got, gradient), (wanted, wanted_gradient) = found
    assert got.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert largest_error(gradient, wanted_gradient.double()) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED)
def test_equal_hidden_states_diverge_by_nothing(dtype: torch.dtype) -> None:
    hidden, _, weight = made(49152, dtype)
    rows = hidden.clone().requires_grad_()
    divergence = sum_divergences(rows, hidden, weight)
    divergence.backward()
    assert abs(divergence.item()) < 1e-6 * TOKENS
    assert rows.grad is not None and rows.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_token_loss_and_its_gradient(dtype: torch.dtype, vocabulary: int) -> None:
    hidden, _, weight = made(vocabulary, dtype)
    targets = torch.randint(vocabulary, (TOKENS,), device="cuda")
    targets[3] = -100
    ours = hidden.clone().requires_grad_()
    logits = (hidden @ weight.t()).double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    wanted.backward()
    got = sum_token_losses(ours, weight, targets)
    got.backward()
    assert ours.grad is not None and logits.grad is not None
    assert got.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert largest_error(ours.grad, logits.grad @ weight.double()) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_of_tokens_are_the_published_ones(dtype: torch.dtype, vocabulary: int, name: str) -> None:
    """From launched kernels, and from a replayed CUDA graph."""
    hidden, _, weight = made(vocabulary, dtype)
    logits = (hidden @ weight.t()).double().requires_grad_()
    targets = logits.argmax(1).where(torch.arange(TOKENS, device="cuda") % 2 == 0, 5)
    targets[3], drawn = -100, torch.rand(TOKENS, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    counted, kind = targets >= 0, LossKind(name, PARAMETERS[name])
    wanted = (PUBLISHED[name](logits[counted], targets[counted]) * drawn[counted]).sum()
    (of_logits,) = torch.autograd.grad(wanted, logits)

    def compute() -> tuple[Tensor, Tensor]:
        ours = hidden.clone().requires_grad_()  # on the stream that captures
        loss = sum_token_losses(ours, weight, targets, kind=kind, token_weights=drawn)
        return loss, torch.autograd.grad(loss, ours)[0]

    found = [compute()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(compute())
    graph.replay()
    for loss, gradient in found:
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert largest_error(gradient, of_logits @ weight.double()) < 2 * ALLOWED[dtype]
