"""KL to the base: value and gradient compared with plain torch, the reference text of a step, and a control loop."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ops.head
from ops.head import sum_divergences
from tests.tiny import make_tokenizer
from trainer.config import DatasetSection, ScuSection, UserError
from trainer.data.batches import collate_samples
from trainer.data.cache import prepare_reference
from trainer.data.samples import Sample
from trainer.parallel.engine.flat_adapter import flatten_adapter
from trainer.patches.graphed_loss import replace_forward
from trainer.patches.loss_head import TokenLoss, bypass_adapter
from trainer.scu.controller import ScuController, ScuError
from trainer.scu.divergence import Divergence, ReferenceDocuments, cache_base_states

VOCABULARY = 64
CPU = torch.device("cpu")
TINY = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip


def plain(hidden: Tensor, base: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    log_p, log_q = (((factor * rows) @ weight.t()).log_softmax(-1) for rows in (hidden, base))
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("at_once", [8 * 37, 8 * 37 * 5, 2**27])
def test_divergence_and_its_gradient_are_those_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, factor: float, at_once: int
) -> None:
    monkeypatch.setattr(ops.head, "MAX_LOGITS_PER_CHUNK", at_once)
    generator = torch.Generator().manual_seed(0)
    hidden, base, weight = (torch.randn(rows, 16, generator=generator).double() for rows in (13, 13, 37))
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    got, want = sum_divergences(ours, base, weight, factor=factor), plain(theirs, base, weight, factor)
    # The operator's log-softmax is in 32 bits.
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    (3.0 * got).backward()
    (3.0 * want).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_equal_hidden_states_diverge_by_nothing() -> None:
    hidden, weight = torch.randn(5, 8), torch.randn(11, 8)
    rows = hidden.clone().requires_grad_()
    divergence = sum_divergences(rows, hidden, weight)
    divergence.backward()
    assert divergence.item() == pytest.approx(0.0, abs=1e-6) and rows.grad is not None
    assert rows.grad.abs().max() < 1e-6


def test_wrong_shapes_and_a_trained_head_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        sum_divergences(torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(5, 4))
    with pytest.raises(ValueError, match="requires a gradient"):
        sum_divergences(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(5, 4, requires_grad=True))


def adapted(*, modules_to_save: list[str] | None = None) -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=modules_to_save
    )
    model = get_peft_model(LlamaForCausalLM(TINY), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def documents(count: int = 7) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (4 + index,), generator=generator).tolist()
        found.append(Sample(ids, [True] * len(ids), [len(ids)]))
    return found


def reference(rows: int = 2, *, rank: int = 0, world_size: int = 1, packed: bool = False) -> ReferenceDocuments:
    return ReferenceDocuments(
        documents=documents(),
        rows=rows,
        rank=rank,
        world_size=world_size,
        seed=5,
        pad_token_id=0,
        packed=packed,
        flat=False,
    )


def batch_of(reference: ReferenceDocuments, step: int) -> Tensor:
    return reference.build_batch(reference.select(step)).input_ids


def by_hand(model: Any, samples: list[Sample]) -> Tensor:
    """Each document alone, all logits, PEFT's own way without the adapter."""
    total = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.input_ids])
        adapted_logits = model(input_ids=ids).logits[0, :-1]
        with torch.no_grad(), model.disable_adapter():
            base_logits = model(input_ids=ids).logits[0, :-1]
        log_p, log_q = adapted_logits.log_softmax(-1), base_logits.log_softmax(-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
    return total


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("save_head", [False, True])
def test_the_head_gives_the_divergence_of_a_batch(fused: bool | None, save_head: bool) -> None:
    """Fused, from logits, and with a head that is trained in full, which has a copy in the base."""
    model = adapted(modules_to_save=["lm_head"] if save_head else None)
    samples = documents(4)
    batch = collate_samples(samples, 0, packed=False, flat=False)
    loss = TokenLoss(model, fused=fused)
    base = loss.compute_base_states(model, batch, CPU)
    got = loss.compute_divergence(model, batch, CPU, base_states=base, with_gradient=True)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = torch.autograd.grad(got, list(trained.values()), allow_unused=True)
    want = by_hand(model, samples)
    theirs = torch.autograd.grad(want, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    assert got.item() == pytest.approx(want.item(), rel=1e-4) and want.item() > 0.01
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            # Differences of nearly equal logarithms in 32 bits, summed in chunks here and at once by hand.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not loss.compute_divergence(model, batch, CPU, base_states=base, with_gradient=False).requires_grad


def test_the_adapter_is_off_without_a_gradient_flag_being_touched() -> None:
    """PEFT's disable_adapter switches requires_grad off and on, between a graph and its backward."""
    model = adapted()
    ids = torch.tensor([[5, 6, 7, 8]])
    before = [(name, p.requires_grad) for name, p in model.named_parameters()]
    with bypass_adapter(model):
        off = model(input_ids=ids).logits
        assert [(name, p.requires_grad) for name, p in model.named_parameters()] == before
    with model.disable_adapter():
        torch.testing.assert_close(off, model(input_ids=ids).logits)
    assert not torch.allclose(off, model(input_ids=ids).logits)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_pass_over_reference_text_leaves_recomputation_as_it_was(with_gradient: bool) -> None:
    """The flat adapter's views are made again by each pass; the backward of the pass before recomputes with its own."""

    def gradient(between: bool) -> Tensor:
        model = adapted()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
        flat = flatten_adapter(model, separate_up=False)
        assert flat is not None
        loss = TokenLoss(model)
        batch = collate_samples(documents(3), 0, packed=False, flat=False)
        total = loss(model, batch, torch.device("cpu"))
        if between:
            other = collate_samples(documents(5), 0, packed=False, flat=False)
            base = loss.compute_base_states(model, other, CPU)
            divergence = loss.compute_divergence(model, other, CPU, base_states=base, with_gradient=with_gradient)
            total = total + 0.0 * divergence
        total.backward()
        return torch.cat([buffer.grad.flatten() for buffer in flat.buffers if buffer.grad is not None])

    alone, with_reference = gradient(False), gradient(True)
    assert alone.abs().max() > 0
    torch.testing.assert_close(with_reference, alone)


def test_reference_of_a_step_follows_from_its_number_and_ranks_share_it() -> None:
    whole = [batch_of(reference(4), step) for step in (1, 2, 3)]
    again = [batch_of(reference(4), step) for step in (1, 2, 3)]
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    for step in (1, 2, 3, 9):
        parts = [reference(2, rank=rank, world_size=2) for rank in (0, 1)]
        rows = [row[row > 0].tolist() for part in parts for row in batch_of(part, step)]
        assert rows == [row[row > 0].tolist() for row in batch_of(reference(4), step)]
        assert parts[0].count_tokens(step) == parts[1].count_tokens(step) == sum(len(row) - 1 for row in rows)
    # A pass goes through every document once.
    seen = [tuple(row[row > 0].tolist()) for step in range(1, 8) for row in batch_of(reference(1), step)]
    assert len(set(seen)) == 7


class Engine:
    """What is used of one here."""

    device = torch.device("cpu")

    def __init__(self, model: Any) -> None:
        self.module = model

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def engine_of(model: Any) -> Any:
    return Engine(model)


@pytest.mark.parametrize("packed", [False, True])
def test_kept_states_of_the_base_give_the_same_divergence_by_one_pass_less(packed: bool) -> None:
    model, passes = adapted(), list[Any]()
    engine, loss, texts = engine_of(model), TokenLoss(model), reference(3, packed=packed)
    plain_term = Divergence(engine, loss, texts).compute_penalty(2, 0.5)
    states = cache_base_states(engine, loss, texts)
    assert states is not None and model.training
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)  # what the adapter has become since then is not in them
    kept = Divergence(engine, loss, texts, base_states=states)
    model.register_forward_hook(lambda *_: passes.append(1))
    changed, wanted = kept.compute_penalty(2, 0.5), Divergence(engine, loss, texts).compute_penalty(2, 0.5)
    assert len(passes) == 1 + 2
    assert changed.item() == pytest.approx(wanted.item(), rel=1e-6) and changed.item() > plain_term.item()
    gradients = [
        torch.autograd.grad(term, model.base_model.model.model.layers[0].mlp.down_proj.lora_B.default.weight)
        for term in (changed, wanted)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-8)


def test_a_head_that_needs_whole_logits_keeps_no_states() -> None:
    model = adapted(modules_to_save=["lm_head"])
    assert cache_base_states(engine_of(model), TokenLoss(model), reference(3)) is None


class Loop:
    """The training loop of one rank on the tiny model, with its adapter driven away from the base."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(3)
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(LlamaForCausalLM(TINY), lora)
        divergence = Divergence(engine_of(self.model), TokenLoss(self.model), reference())
        section = ScuSection(**({"enabled": True, "measure": "kl", "target": 0.05, "deadband": 0.0} | settings))
        self.scu_controller = ScuController(
            section, self.model, target_tokens=None, total_steps=10, base_parameters=1, divergence=divergence
        )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
        self.lambdas: list[float] = []

    def run(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            tokens = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step % 3))
            logits = self.model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
            loss_sum = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
            loss = loss_sum / 22 + self.scu_controller.compute_penalty(step)
            self.lambdas.append(self.scu_controller.lambda_)
            loss.backward()
            self.scu_controller.observe(step, loss_sum, 22, self.scu_controller.get_local_contribution())
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_the_term_is_off_until_the_target_is_passed_and_then_holds_k_down() -> None:
    steered, free = Loop(target=0.005), Loop(controller="none")
    steered.run(1, 260)
    free.run(1, 260)
    for loop in (steered, free):
        loop.scu_controller.apply_pending_measurement()
    bits = [record["kl_bits"] for record in steered.scu_controller.records]
    first = next(index for index, value in enumerate(bits) if value >= 0.005)
    assert steered.lambdas[: first + 1] == [0.0] * (first + 1) and steered.lambdas[first + 1] == 0.1
    # Until then the two are one run.
    assert bits[: first + 1] == [record["kl_bits"] for record in free.scu_controller.records][: first + 1]
    held = sum(bits[-50:]) / 50
    assert held == pytest.approx(0.005, rel=0.3) and free.scu_controller.records[-1]["kl_bits"] > 3 * held


def test_resumed_run_continues_to_the_bit(tmp_path: Path) -> None:
    whole = Loop(target=0.005)
    whole.run(1, 25)
    first = Loop(target=0.005)
    first.run(1, 18)
    state = json.loads(json.dumps(first.scu_controller.state_dict()))
    first.scu_controller.write_files(tmp_path)
    assert first.scu_controller.state.started, "the test wants a controller that works"
    second = Loop(target=0.005)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert second.scu_controller.load_state_dict(state, step=18, run_dir=tmp_path) == []
    second.run(19, 25)
    assert [value.hex() for value in second.lambdas] == [value.hex() for value in whole.lambdas[18:]]
    for loop in (whole, second):
        loop.scu_controller.apply_pending_measurement()
    assert second.scu_controller.records == whole.scu_controller.records


def test_names_of_metrics_records_and_files(tmp_path: Path) -> None:
    loop = Loop()
    loop.run(1, 3)
    metrics = loop.scu_controller.get_metrics()
    names = "kl_bits kl_smoothed target lambda data_bpt error"
    assert set(metrics) == {f"scu/{name}" for name in names.split()} and metrics["scu/target"] == 0.05
    loop.scu_controller.apply_pending_measurement()
    record = loop.scu_controller.records[-1]
    assert record["total_loss"] == pytest.approx(record["ce_loss"] + record["lambda"] * math.log(2) * record["kl_bits"])
    loop.scu_controller.write_files(tmp_path)
    history = json.loads((tmp_path / "scu_history.json").read_text())
    assert history["kl_bits_history"] == [record["kl_bits"] for record in loop.scu_controller.records]
    assert json.loads((tmp_path / "scu_config.json").read_text())["target"] == 0.05


def test_a_divergence_that_is_no_number_stops_the_run() -> None:
    loop = Loop()
    loop.run(1, 2)
    next(p for n, p in loop.model.named_parameters() if "down_proj.lora_B" in n).data.fill_(math.nan)
    loop.scu_controller.compute_penalty(3)
    loop.scu_controller.observe(3, torch.tensor(1.0), 22, loop.scu_controller.get_local_contribution())
    with pytest.raises(ScuError, match=r"step 3 has .* for the divergence from the base"):
        loop.scu_controller.apply_pending_measurement()


def test_swinging_gains_of_kl_are_refused() -> None:
    with pytest.raises(UserError, match=r"scu\.ki=0\.5: lambda oscillates increasingly with scu\.kp=0\.5"):
        Loop(ki=0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "scu.reference="),
        ("", "scu.reference="),
        (
            json.dumps({"text": "red green blue " * 40}),
            "1 of 1 documents are longer than dataset.max_length=32; split these documents",
        ),
    ],
)
def test_reference_text_that_cannot_be_used_gets_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    make_tokenizer(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    path = tmp_path / "texts.jsonl"
    if text is not None:
        path.write_text(text + "\n")
    section = DatasetSection(path="unused.jsonl", max_length=32, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError) as refused:
        prepare_reference(section, tokenizer, str(path), setting="scu.reference", seed=1)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_every_token_of_reference_text_counts(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": words}) + "\n" for words in ("red green blue", "the cat sleeps")))
    section = DatasetSection(path="unused.jsonl", max_length=64, cache_dir=str(tmp_path / "cache"), packing=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    samples = prepare_reference(section, tokenizer, str(path), setting="scu.reference", seed=1)
    assert len(samples) == 2 and all(all(sample.loss_weights) for sample in samples)


def test_a_pass_over_reference_text_recomputes_next_to_a_replayed_loss() -> None:
    """A replayed forward creates no views of the flat adapter, and those of an earlier step are out of date."""

    def gradients(*, recomputed: bool) -> list[Tensor]:
        model = adapted().train()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        flat = flatten_adapter(model, separate_up=False)
        assert flat is not None
        (buffer,), loss, found = flat.buffers, TokenLoss(model), list[Tensor]()
        batch = collate_samples(documents(3), 0, packed=False, flat=False)
        loss(model, batch, CPU).backward()
        for _ in range(2):
            with torch.no_grad():
                buffer.add_(0.001)  # the optimizer's update
            buffer.grad = None
            with flat.build_stacks_only(), replace_forward(model, lambda: buffer.sum()):
                total = model()
            base = loss.compute_base_states(model, batch, CPU)
            (total + loss.compute_divergence(model, batch, CPU, base_states=base, with_gradient=True)).backward()
            assert buffer.grad is not None
            found.append(buffer.grad.clone())
        return found

    torch.testing.assert_close(gradients(recomputed=True), gradients(recomputed=False))
