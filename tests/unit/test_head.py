"""Head and loss in chunks: numbers and gradients of the plain computation, whatever the chunk, observed per model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ops.head
from ops.head import sum_token_losses
from tests.tiny import make_model
from trainer.data.batches import MicroBatch, collate_samples
from trainer.data.samples import Sample
from trainer.patches.loss_head import TokenLoss

TOKENS, HIDDEN, VOCABULARY = 37, 16, 101


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


@pytest.mark.parametrize("chunk_elements", [1, 5 * VOCABULARY, 10**9])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_equals_cross_entropy_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, factor: float
) -> None:
    monkeypatch.setattr(ops.head, "MAX_LOGITS_PER_CHUNK", chunk_elements)
    hidden, weight, targets = problem(torch.float32)
    loss = sum_token_losses(hidden, weight, targets, factor=factor)
    (grad,) = torch.autograd.grad(3 * loss, hidden)
    truth = F.cross_entropy(factor * hidden @ weight.t(), targets, reduction="sum")
    (expected,) = torch.autograd.grad(3 * truth, hidden)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(grad, expected)


def test_bf16_errs_no_more_than_torch_in_bf16() -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    (grad,) = torch.autograd.grad(sum_token_losses(hidden, weight, targets), hidden)
    plain = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    (torch_grad,) = torch.autograd.grad(plain, hidden)
    exact = hidden.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(exact @ weight.double().t(), targets, reduction="sum"), exact)
    assert (grad - truth).norm() <= 2 * (torch_grad - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.parametrize("loss_scale", [2.0**-4, 2.0**20])
def test_fp16_keeps_gradients_of_a_large_vocabulary_under_any_loss_scale(loss_scale: float) -> None:
    """Nearly even probabilities of 2e-6 would be subnormal in fp16, and 2^20 is beyond it."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = 400_000
    hidden = (torch.randn(4, 8, generator=generator) * 0.1).half().requires_grad_()
    weight, targets = torch.randn(vocabulary, 8, generator=generator).half(), torch.tensor([1, 2, 3, 4])
    (grad,) = torch.autograd.grad(loss_scale / vocabulary * sum_token_losses(hidden, weight, targets), hidden)
    exact = hidden.detach().double().requires_grad_()
    loss = F.cross_entropy(exact @ weight.double().t(), targets, reduction="sum")
    (truth,) = torch.autograd.grad(loss_scale / vocabulary * loss, exact)
    floor = 2.0**-24 if loss_scale < 1 else 0.0
    assert (grad - truth).norm() <= 1e-3 * truth.norm() + floor * grad.numel() ** 0.5


def test_nothing_is_differentiated_without_a_gradient_and_bad_input_is_refused() -> None:
    hidden, weight, targets = problem(torch.float32)
    with torch.no_grad():
        assert not sum_token_losses(hidden, weight, targets).requires_grad
    with pytest.raises(ValueError, match="expected"):
        sum_token_losses(hidden, weight[:, :-1], targets)
    with pytest.raises(ValueError, match="freeze it"):
        sum_token_losses(hidden, weight.requires_grad_(), targets)


def _batch() -> MicroBatch:
    samples = [Sample([5, 9, 31, 77, 12], [False, True, True, False, True], [5]), Sample([7] * 3, [True] * 3, [3])]
    return collate_samples(samples, 0, packed=False, flat=False)


def _model(folder: Path, kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind == "llama":
        return AutoModelForCausalLM.from_pretrained(make_model(folder))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    extra = {"granite": {"logits_scaling": 8.0}, "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 16}}[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **heads, **extra))


@pytest.mark.parametrize(("kind", "together"), [("llama", True), ("granite", True), ("gemma2", False)])
def test_what_a_model_does_to_its_logits_is_observed(tmp_path: Path, kind: str, together: bool) -> None:
    """Granite divides them, which is undone; Gemma 2 bends them, so that the logits themselves are needed."""
    model = _model(tmp_path / "model", kind)
    model.get_output_embeddings().weight.requires_grad_(False)
    loss = TokenLoss(model)
    batch = _batch()
    got = loss(model, batch, torch.device("cpu"))
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum")
    torch.testing.assert_close(got, expected, rtol=2.5e-7, atol=0)  # a sum of 32-bit losses
    assert (loss._head is not None) == together


def test_a_batch_without_targets_costs_nothing_and_keeps_the_graph(tmp_path: Path) -> None:
    model = _model(tmp_path / "model", "llama")
    model.get_output_embeddings().weight.requires_grad_(False)
    batch = _batch()
    batch.targets.fill_(-100)
    loss = TokenLoss(model)(model, batch, torch.device("cpu"))
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
