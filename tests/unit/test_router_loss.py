"""The load-balancing loss: transformers' own, for a router that is trained, and no part of the reported loss."""

from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.unit.test_experts import LORA, base_of
from trainer.config import LoraSection, UserError
from trainer.data.batches import collate_samples
from trainer.data.samples import Sample
from trainer.model.adapter import apply_adapter
from trainer.model.expert_targets import check_router_loss
from trainer.patches.loss_head import TokenLoss

CPU = torch.device("cpu")
WEIGHT = 0.02


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoehybrid"])
def test_it_is_what_transformers_adds_and_reaches_the_router(model_type: str) -> None:
    router = "router" if model_type in ("gpt_oss", "granitemoehybrid") else "gate"
    lora = LoraSection(**LORA, target_modules=("q_proj", router))
    model = apply_adapter(base_of(model_type), lora, torch.float32).train()
    check_router_loss(model.get_base_model(), WEIGHT, lora)
    tokens = list(range(5, 25))
    batch: Any = collate_samples([Sample(tokens, [True] * len(tokens), [len(tokens)])], 0, packed=False, flat=False)
    loss_of = TokenLoss(model, aux_loss_weight=WEIGHT)
    loss = loss_of(model, batch, CPU)
    ids = torch.tensor([tokens])
    base = model.get_base_model()
    base.router_aux_loss_coef = WEIGHT
    with_it = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
    plain = model(input_ids=ids, labels=ids, use_cache=False)
    targets = len(tokens) - 1
    assert loss.item() / targets == pytest.approx(plain.loss.item(), rel=1e-5)
    assert isinstance(loss_of.load_balancing_loss, torch.Tensor)
    assert loss_of.load_balancing_loss.item() / targets == pytest.approx(
        with_it.loss.item() - plain.loss.item(), rel=1e-3
    )
    loss_of.load_balancing_loss.backward()
    reached = [name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()]
    assert any(f"{router}.lora_B" in name for name in reached)
    with torch.no_grad():
        before = loss_of.load_balancing_loss
        loss_of(model, batch, CPU)
    assert loss_of.load_balancing_loss is before, "evaluation leaves it out"


def test_padding_is_not_balanced() -> None:
    model = apply_adapter(base_of("mixtral"), LoraSection(**LORA, target_modules=("gate",)), torch.float32).train()
    samples = [Sample(list(range(5, 5 + n)), [True] * n, [n]) for n in (20, 7)]
    batch: Any = collate_samples(samples, 0, packed=False, flat=False)
    assert batch.attention_mask is not None and not batch.attention_mask.all()
    loss_of = TokenLoss(model, aux_loss_weight=1.0)
    loss_of(model, batch, CPU)
    masked = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, output_router_logits=True)
    counted = model(batch.input_ids, use_cache=False, output_router_logits=True)
    assert isinstance(loss_of.load_balancing_loss, torch.Tensor)
    assert loss_of.load_balancing_loss.item() / batch.target_count == pytest.approx(masked.aux_loss.item(), rel=1e-6)
    assert masked.aux_loss.item() != pytest.approx(counted.aux_loss.item(), rel=1e-3)


@pytest.mark.parametrize("packed", [True, False])
def test_padding_of_packed_rows_is_not_balanced(packed: bool) -> None:
    """The row without padding and the row with it balance as the tokens of both do alone."""
    model = apply_adapter(base_of("mixtral"), LoraSection(**LORA, target_modules=("gate",)), torch.float32).train()
    documents = [(20,), (7,)] if not packed else [(12, 8), (4, 3)]
    draw = torch.Generator().manual_seed(0)
    samples = [
        Sample(torch.randint(3, 384, (sum(lengths),), generator=draw).tolist(), [True] * sum(lengths), list(lengths))
        for lengths in documents
    ]
    loss_of = TokenLoss(model, aux_loss_weight=1.0)
    batch: Any = collate_samples(samples, 0, packed=packed, flat=False)
    loss_of(model, batch, CPU)
    logits: list[torch.Tensor] = []
    for sample in samples:
        alone: Any = collate_samples([sample], 0, packed=packed, flat=False)
        places = {} if alone.position_ids is None else {"position_ids": alone.position_ids}
        found = model(alone.input_ids, **places, use_cache=False, output_router_logits=True).router_logits
        logits = [torch.cat(pair) for pair in zip(logits, found, strict=True)] if logits else list(found)
    expected = load_balancing_loss_func(tuple(logits), 4, 2)
    assert isinstance(loss_of.load_balancing_loss, torch.Tensor)
    assert loss_of.load_balancing_loss.item() / batch.target_count == pytest.approx(expected.item(), rel=1e-5)


def test_it_is_refused_where_nothing_would_follow_it() -> None:
    with pytest.raises(
        UserError,
        match=r"router_aux_loss=0.02: has no effect, because the router is not trained.*add gate to lora.modu",
    ):
        check_router_loss(base_of("qwen3_moe"), WEIGHT, LoraSection())
    check_router_loss(base_of("qwen3_moe"), WEIGHT, LoraSection(modules_to_save=("gate",)))
    check_router_loss(base_of("qwen3_moe"), WEIGHT, None)
    with pytest.raises(UserError, match=r"DeepseekV3ForCausalLM computes no load-balancing loss; set the weight to 0"):
        check_router_loss(base_of("deepseek_v3"), WEIGHT, None)
