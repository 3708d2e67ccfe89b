"""`training.loss`, weights of tokens and NEFTune: published formulas, in chunks as from all logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

import ops.head
from ops.head import LossKind, sum_token_losses, sum_token_losses_from_logits
from tests.tiny import make_model
from tests.token_losses import PARAMETERS, PUBLISHED
from trainer.data.batches import MicroBatch, collate_samples
from trainer.data.samples import Sample, join_samples
from trainer.model.base import add_embedding_noise
from trainer.patches.loss_head import TokenLoss

TOKENS, HIDDEN, VOCABULARY = 37, 16, 101
CPU = torch.device("cpu")


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return hidden states, a head, targets of which some do not count, and weights."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[::2] = (hidden.detach() @ head.t()).argmax(1)[::2]  # probabilities from near 0 to near 1
    targets[5], weights = -100, torch.rand(TOKENS, generator=generator)
    return hidden, head, targets, weights


def published(kind: str, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    counted = targets >= 0
    losses = torch.zeros(TOKENS, dtype=logits.dtype)
    losses[counted] = PUBLISHED[kind](logits[counted], targets[counted])
    return losses


@pytest.mark.parametrize("chunk_elements", [1, 5 * VOCABULARY, 10**9])
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("weighted", [True, False])
def test_losses_and_gradients_are_the_published_ones(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, name: str, weighted: bool
) -> None:
    monkeypatch.setattr(ops.head, "MAX_LOGITS_PER_CHUNK", chunk_elements)
    hidden, head, targets, drawn = problem(torch.float64)
    weights, kind = drawn if weighted else None, LossKind(name, PARAMETERS[name])
    truth = (published(name, hidden @ head.t(), targets) * (drawn.double() if weighted else 1.0)).sum()
    (expected,) = torch.autograd.grad(3 * truth, hidden)
    computes_in_chunks = sum_token_losses(hidden, head, targets, kind=kind, token_weights=weights)
    from_logits = sum_token_losses_from_logits(hidden @ head.t(), targets, kind, weights)
    for loss in (computes_in_chunks, from_logits):
        (grad,) = torch.autograd.grad(3 * loss, hidden)
        torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
        assert (grad - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_err_by_their_rounding(name: str, dtype: torch.dtype) -> None:
    hidden, head, targets, weights = problem(dtype)
    kind = LossKind(name, PARAMETERS[name])
    (grad,) = torch.autograd.grad(sum_token_losses(hidden, head, targets, kind=kind, token_weights=weights), hidden)
    logits = (hidden.detach() @ head.t()).double().requires_grad_()
    (of_logits,) = torch.autograd.grad((published(name, logits, targets) * weights).sum(), logits)
    truth = of_logits @ head.double()
    assert (grad - truth).norm() <= torch.finfo(dtype).eps * truth.norm()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_certain_token_has_a_finite_gradient(name: str) -> None:
    """Focal loss with an exponent below 1 has an infinite factor of a loss of 0."""
    logits = torch.zeros(2, 30).index_put_((torch.tensor([0, 1]), torch.tensor([3, 4])), torch.tensor(1e4))
    logits.requires_grad_()
    kind = LossKind(name, 0.5)
    loss = sum_token_losses_from_logits(logits, torch.tensor([3, 5]), kind)
    (grad,) = torch.autograd.grad(loss, logits)
    computes_in_chunks = sum_token_losses(logits, torch.eye(30), torch.tensor([3, 5]), kind=kind)
    assert torch.isfinite(grad).all() and torch.isfinite(loss)
    torch.testing.assert_close(torch.autograd.grad(computes_in_chunks, logits)[0], grad)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(make_model(tmp_path_factory.mktemp("losses")))
    loaded.get_output_embeddings().weight.requires_grad_(False)
    return loaded


DOCUMENTS = [
    Sample([5, 9, 31, 77, 12], [0.0, 0.5, 0.5, 0.0, 1.0], [5]),
    Sample([7, 8, 9], [1.0, 0.25, 1.0], [3]),
    Sample([200, 41, 6, 7], [False, True, False, True], [4]),
]
LAYOUTS: dict[str, MicroBatch] = {
    "padded": collate_samples(DOCUMENTS, 0, packed=False, flat=False),
    "packs": collate_samples([join_samples(DOCUMENTS[:2]), DOCUMENTS[2]], 0, packed=True, flat=False),
    "one pack": collate_samples([join_samples(DOCUMENTS)], 0, packed=True, flat=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["nll", "focal"])
def test_weights_belong_to_their_tokens_in_every_layout(model: Any, layout: str, fused: bool, name: str) -> None:
    batch, wanted, count = LAYOUTS[layout], 0.0, 0.0
    for document in DOCUMENTS:
        ids = torch.tensor([document.input_ids])
        losses = PUBLISHED[name](model(input_ids=ids).logits[0, :-1], ids[0, 1:])
        weights = torch.tensor(document.loss_weights[1:], dtype=torch.float32)
        wanted, count = wanted + (losses * weights).sum().item(), count + float(weights.sum())
    loss = TokenLoss(model, fused=None if fused else False, kind=LossKind(name, PARAMETERS[name]))
    assert loss(model, batch, CPU).item() == pytest.approx(wanted, rel=1e-5)
    assert (batch.target_weight, batch.target_count) == (count, 7)
    assert (loss._head is not None) == fused


def test_the_held_out_loss_is_plain(model: Any) -> None:
    """Neither the loss of training nor weights change it, so that runs compare."""
    batch = LAYOUTS["padded"]
    with torch.no_grad():
        found = float(TokenLoss(model, kind=LossKind("dft"))(model, batch, CPU))
        expected = float(TokenLoss(model).compute_row_losses(model, batch, CPU).sum())
    assert found == pytest.approx(expected, rel=1e-6)


def test_batches_without_fractions_have_no_weights() -> None:
    whole = [Sample([5, 9, 31], [False, True, True], [3]), Sample([7, 8], [0.0, 1.0], [2])]
    batch = collate_samples(whole, 0, packed=False, flat=False)
    assert batch.weights is None and batch.target_weight == 3


def test_noise_on_embeddings_is_that_of_transformers_and_of_training_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, theirs = (AutoModelForCausalLM.from_pretrained(make_model(tmp_path / name)).train() for name in "ab")
    add_embedding_noise(ours, 5.0)
    embedding: Any = theirs.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    ids = torch.arange(3, 35).reshape(2, 16)

    def embed(model: Any) -> torch.Tensor:
        torch.manual_seed(1)
        found: torch.Tensor = model.get_input_embeddings()(ids)
        return found

    plain = ours.get_input_embeddings().weight[ids]
    assert torch.equal(embed(ours), embed(theirs))
    noise = (embed(ours) - plain).abs().max()
    assert 0.9 * 5.0 / (16 * 64) ** 0.5 < noise <= 5.0 / (16 * 64) ** 0.5 + 1e-6
    with torch.no_grad():
        assert torch.equal(embed(ours), plain)
    ours.eval()
    assert torch.equal(embed(ours), plain)
