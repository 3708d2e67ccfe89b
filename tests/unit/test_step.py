"""One optimizer step and its loss: only targets count, documents are alone, a bad gradient changes nothing."""

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_model
from trainer.config import LoraSection, TrainingSection
from trainer.data.batches import collate_samples
from trainer.data.samples import Sample
from trainer.loop import exclude_from_garbage_collection
from trainer.parallel.engine.optimizer import build_optimizer, build_schedule, compute_rates, restore_schedule
from trainer.patches.loss_head import TokenLoss

DOCUMENTS = [[5, 9, 31, 77, 12], [200, 41, 6, 7, 8, 9, 10], [99, 3, 120]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("step"))


def load(folder: Path, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)


def sample(*documents: list[int]) -> Sample:
    tokens = [token for document in documents for token in document]
    return Sample(tokens, [True] * len(tokens), [len(document) for document in documents])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("training", [True, False])
def test_a_document_has_the_same_loss_alone_and_packed(folder: Path, attention: str, training: bool) -> None:
    """Through the trainer's own batches and loss, in train and eval mode."""
    model = load(folder, attention).train(training)
    loss = TokenLoss(model)
    device = torch.device("cpu")
    alone = [
        float(loss(model, collate_samples([sample(doc)], 0, packed=True, flat=False), device)) for doc in DOCUMENTS
    ]
    packed = float(loss(model, collate_samples([sample(*DOCUMENTS)], 0, packed=True, flat=False), device))
    two_rows = collate_samples([sample(*DOCUMENTS[:2]), sample(DOCUMENTS[2])], 0, packed=True, flat=False)
    assert packed == pytest.approx(sum(alone), rel=1e-5)
    assert float(loss(model, two_rows, device)) == pytest.approx(sum(alone), rel=1e-5)


def test_a_changed_neighbour_changes_no_logit(folder: Path) -> None:
    model = load(folder, "sdpa")
    first = collate_samples([sample(DOCUMENTS[0], DOCUMENTS[1])], 0, packed=True, flat=False)
    second = collate_samples([sample([7, 7, 7, 7, 7], DOCUMENTS[1])], 0, packed=True, flat=False)
    with torch.no_grad():
        logits = [
            model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0, 5:]
            for batch in (first, second)
        ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=0)


def test_padding_carries_no_loss_and_no_token(folder: Path) -> None:
    model = load(folder, "sdpa")
    loss = TokenLoss(model)
    batch = collate_samples([sample(DOCUMENTS[0]), sample(DOCUMENTS[1])], 0, packed=False, flat=False)
    alone = [collate_samples([sample(doc)], 0, packed=False, flat=False) for doc in DOCUMENTS[:2]]
    device = torch.device("cpu")
    assert float(loss(model, batch, device)) == pytest.approx(
        sum(float(loss(model, b, device)) for b in alone), rel=1e-5
    )
    assert batch.target_count == 4 + 6
    assert batch.tokens == 5 + 7


def test_logits_are_computed_only_where_there_are_targets(folder: Path) -> None:
    """The loss equals the one over all positions, also with no target at all."""
    model = load(folder, "sdpa")
    loss = TokenLoss(model)
    batch = collate_samples([sample(DOCUMENTS[1])], 0, packed=False, flat=False)
    batch.targets[0, :4] = -100
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    assert float(loss(model, batch, torch.device("cpu"))) == pytest.approx(float(wanted), rel=1e-5)
    batch.targets[:] = -100
    nothing = loss(model, batch, torch.device("cpu"))
    nothing.backward()
    assert float(nothing) == 0.0


def test_loraplus_teaches_b_faster_and_vectors_do_not_decay() -> None:
    model = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(4, 2), "lora_B": torch.nn.Linear(2, 4, bias=False)})
    training = TrainingSection(learning_rate=1e-3, weight_decay=0.1)
    optimizer = build_optimizer(model, training, LoraSection(loraplus_lr_ratio=16.0), fused=False)
    groups = {(group["lr"], group["weight_decay"]): len(group["params"]) for group in optimizer.param_groups}
    assert groups == {(1e-3, 0.1): 1, (1e-3, 0.0): 1, (16e-3, 0.1): 1}


def test_restarts_and_stable_decay_follow_the_published_curves() -> None:
    def rates(**changes: Any) -> list[float]:
        training = TrainingSection(warmup_steps=2, learning_rate=1.0, **changes)
        parameter = torch.nn.Parameter(torch.zeros(2))
        return compute_rates(build_schedule(torch.optim.AdamW([parameter], lr=1.0), training, 22), 22)

    restarts = rates(lr_scheduler="cosine_with_restarts", lr_cycles=2)
    assert restarts[2] == restarts[12] == 1.0
    assert restarts[2:12] == pytest.approx([0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(10)])
    assert restarts[12:] == pytest.approx(restarts[2:12])
    stable = rates(lr_scheduler="warmup_stable_decay", decay_ratio=0.25, min_lr_ratio=0.2)
    assert stable[2:17] == [1.0] * 15 and stable[16] == 1.0
    assert stable[16:] == pytest.approx([0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)])


@pytest.mark.parametrize(
    "name",
    [
        "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "warmup_stable_decay", "constant_with_warmup",
        "polynomial",
    ],
)  # fmt: skip
def test_a_restored_schedule_goes_on_where_it_was(name: str) -> None:
    training = TrainingSection(lr_scheduler=name, warmup_steps=3, learning_rate=1e-2, min_lr_ratio=0.1)

    def fresh() -> Any:
        parameter = torch.nn.Parameter(torch.zeros(2))
        return build_schedule(torch.optim.AdamW([parameter], lr=1e-2), training, 20)

    stepped, restored = fresh(), fresh()
    for _ in range(7):
        stepped.optimizer.step()
        stepped.step()
    restore_schedule(restored, 7)
    assert restored.get_last_lr() == stepped.get_last_lr()
    rates = compute_rates(fresh(), 20)
    for _ in range(5):
        stepped.step()
        restored.step()
        assert restored.get_last_lr() == stepped.get_last_lr() == [rates[stepped.last_epoch]]


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup_stable_decay", "constant_with_warmup", "inverse_sqrt"])
@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.99])
def test_the_last_step_is_no_warm_up(name: str, total: int, ratio: float) -> None:
    """A run of a single step, which the default ratio would make a warm-up, trained at a learning rate of 0."""
    training = TrainingSection(lr_scheduler=name, warmup_ratio=ratio, learning_rate=1e-2)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1e-2)
    rates = compute_rates(build_schedule(optimizer, training, total), total)
    assert max(rates) > 5e-3


def test_the_collector_leaves_alone_what_was_there_before_the_steps() -> None:
    class Node:
        me: "Node"

    def cycle() -> "weakref.ref[Node]":
        node = Node()
        node.me = node
        return weakref.ref(node)

    with exclude_from_garbage_collection():
        assert gc.get_freeze_count() > 100_000
        assert len(gc.get_objects()) < 10_000
        of_a_step = cycle()
        gc.collect()
        assert of_a_step() is None
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > 100_000
