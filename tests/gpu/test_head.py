"""The kernels of head and loss against plain torch in 64 bits, on rows of real vocabularies."""

import pytest
import torch
from torch import Tensor

import ops.head
from ops.head import divergence_sum, token_loss_sum

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN = 24, 64
# Of the largest value: logits and gradients are rounded to the type.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def made(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of an adapted model, those of its base near them, and a head."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    generator = torch.Generator("cuda").manual_seed(vocabulary)
    base = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator)
    hidden = base + 0.3 * torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator)
    weight = 0.3 * torch.randn(vocabulary, HIDDEN, device="cuda", generator=generator)
    return hidden.to(dtype), base.to(dtype), weight.to(dtype)


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """In 64 bits."""
    return hidden @ weight.double().t()


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("vocabulary", [37, 4096, 49152, 128256])
@pytest.mark.parametrize("rows_at_once", [7, 10**6])
def test_divergence_and_its_gradient(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocabulary: int, rows_at_once: int
) -> None:
    hidden, base, weight = made(vocabulary, dtype)
    monkeypatch.setattr(ops.head, "LOGITS_AT_ONCE", 2 * vocabulary * rows_at_once)
    ours, theirs = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    log_p, log_q = (logits_of(rows, weight).log_softmax(-1) for rows in (theirs, base.double()))
    wanted = (log_p.exp() * (log_p - log_q)).sum()
    wanted.backward()
    got = divergence_sum(ours, base, weight)
    (3.0 * got).backward()
    assert ours.grad is not None and theirs.grad is not None
    assert got.item() == pytest.approx(wanted.item(), rel=ALLOWED[dtype])
    error = (ours.grad.double() / 3.0 - theirs.grad).abs().max() / theirs.grad.abs().max()
    assert error < ALLOWED[dtype]
    assert divergence_sum(hidden, base, weight).item() == got.item()


@pytest.mark.parametrize("dtype", ALLOWED)
def test_equal_hidden_states_diverge_by_nothing(dtype: torch.dtype) -> None:
    hidden, _, weight = made(49152, dtype)
    rows = hidden.clone().requires_grad_()
    divergence = divergence_sum(rows, hidden, weight)
    divergence.backward()
    assert abs(divergence.item()) < 1e-6 * TOKENS
    assert rows.grad is not None and rows.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("vocabulary", [37, 128256])
def test_token_loss_and_its_gradient(dtype: torch.dtype, vocabulary: int) -> None:
    hidden, _, weight = made(vocabulary, dtype)
    targets = torch.randint(vocabulary, (TOKENS,), device="cuda")
    targets[3] = -100
    ours, theirs = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logits = logits_of(theirs, weight)
    wanted = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    wanted.backward()
    got = token_loss_sum(ours, weight, targets)
    got.backward()
    assert ours.grad is not None and theirs.grad is not None
    assert got.item() == pytest.approx(wanted.item(), rel=ALLOWED[dtype])
    error = (ours.grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max()
    assert error < ALLOWED[dtype]
