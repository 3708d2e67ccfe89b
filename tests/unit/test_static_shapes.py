"""Padding to few shapes changes no loss and no gradient; which settings leave micro-steps that can be replayed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.head import sum_token_losses
from ops.seeds import Seeds, draw_seed
from tests.engine import tiny_model
from trainer.config import LoraSection, UserError, load_config
from trainer.data.batches import IGNORE_INDEX, MicroBatch, collate_samples
from trainer.data.samples import Sample
from trainer.data.static_shapes import StaticShape, choose_shape, pad_to_shape, round_up
from trainer.model.adapter import apply_adapter
from trainer.parallel.engine.flat_adapter import FlatAdapter, flatten_adapter
from trainer.patches.graphed_loss import GraphedLoss, StaticInputs
from trainer.patches.loss_head import TokenLoss

CPU = torch.device("cpu")


def sample(*lengths: int, seed: int = 0, prompt: int = 0) -> Sample:
    """A pack of documents with so many tokens; the first `prompt` tokens of each are no targets."""
    draw = torch.Generator().manual_seed(seed)
    trained = [index >= prompt for length in lengths for index in range(length)]
    return Sample(torch.randint(3, 384, (sum(lengths),), generator=draw).tolist(), trained, list(lengths))


@pytest.fixture(scope="module")
def adapted() -> tuple[Any, FlatAdapter]:
    model = apply_adapter(tiny_model(torch.float64, CPU), LoraSection(r=4, alpha=8), torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    flat = flatten_adapter(model, separate_up=True)
    assert flat is not None
    return model, flat


@pytest.mark.parametrize(
    "batch",
    [
        collate_samples([sample(37, 20)], 0, packed=True, flat=False),
        collate_samples([sample(33, prompt=20), sample(9, 12, seed=1, prompt=4)], 0, packed=True, flat=False),
        collate_samples([sample(35, prompt=30), sample(19, seed=1)], 0, packed=False, flat=False),
        collate_samples([sample(7, prompt=7)], 0, packed=False, flat=False),
    ],
    ids=["pack", "rows", "padded rows", "no target"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_a_padded_batch_has_the_same_loss_and_gradient(
    adapted: tuple[Any, FlatAdapter], batch: MicroBatch, fused: bool
) -> None:
    """What is recorded, run without recording it: static inputs, leaves in place of the buffers, rows that count 0."""
    model, flat = adapted
    loss = TokenLoss(model, fused=fused)
    wanted = loss(model, batch, CPU)
    gradients = torch.autograd.grad(wanted, flat.buffers)
    shape = choose_shape(batch)
    assert shape.length > batch.input_ids.shape[1] or shape.targets > (batch.targets != IGNORE_INDEX).any(0).sum()
    other = replace(batch, input_ids=batch.input_ids.flip(1))
    inputs = StaticInputs(*loss.build_host_inputs(pad_to_shape(other, shape), shape.targets), CPU)
    inputs.fill(*loss.build_host_inputs(pad_to_shape(batch, shape), shape.targets))
    leaves = [buffer.detach().requires_grad_() for buffer in flat.buffers]
    with flat.read_from(leaves):
        found = loss.compute_from_inputs(model, *inputs.read())
        ours = torch.autograd.grad(found, leaves)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6, abs=1e-9)
    for got, expected in zip(ours, gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(loss(model, batch, CPU), wanted)  # the buffers are read again


def test_positions_of_padding_stay_among_those_of_documents() -> None:
    """A model with learned positions has none for more than a document may have."""
    batch = collate_samples([sample(100, seed=at) for at in range(40)], 0, packed=True, flat=True)
    filled = pad_to_shape(batch, StaticShape(1, 4352, 4352, True, 64, 512))
    assert filled.position_ids is not None and 4352 - 4000 > 100 > int(filled.position_ids.max())


def test_documents_of_a_flat_pack_keep_their_bounds() -> None:
    batch = collate_samples([sample(37, 20, 5)], 0, packed=True, flat=True)
    shape = choose_shape(batch)
    filled = pad_to_shape(batch, shape, pad_token_id=7)
    assert batch.cu_seqlens is not None and filled.cu_seqlens is not None and filled.position_ids is not None
    assert (shape.length, shape.documents) == (62, 4) and len(filled.cu_seqlens) == 5
    assert filled.cu_seqlens.tolist() == [0, 37, 57, 62, 62] and filled.cu_seqlens.dtype == torch.int32
    longer = pad_to_shape(batch, StaticShape(1, 64, 64, True, 8, 64))
    assert longer.cu_seqlens is not None and longer.cu_seqlens.tolist() == [0, 37, 57, 62, 64, 64, 64, 64, 64]
    assert longer.position_ids is not None and longer.position_ids[0, 60:].tolist() == [3, 4, 0, 1]
    assert filled.max_seqlen >= 37 and (filled.tokens, filled.target_count) == (62, batch.target_count)


def test_only_documents_of_one_length_are_taken_for_that() -> None:
    """4 x 16 = 64 would be computed as rows of a batch."""
    even = choose_shape(collate_samples([sample(16, 16, 16, 16)], 0, packed=True, flat=True))
    assert even.has_equal_documents and (even.documents, even.longest) == (4, 16)
    for lengths in ((10, 16, 16, 22), (30, 34), (1, 63), (60,), (8, 8, 16, 16, 16)):
        batch = collate_samples([sample(*lengths)], 0, packed=True, flat=True)
        shape = choose_shape(batch)
        assert not shape.has_equal_documents or lengths == (60,)
        assert not even.can_hold(shape) and shape.can_hold(shape)
        assert max(lengths) <= shape.longest and (shape.has_equal_documents or len(lengths) < shape.documents)


def test_a_larger_shape_holds_a_smaller_one_of_as_many_tokens() -> None:
    large = StaticShape(1, 512, 256, True, 16, 256)
    assert large.can_hold(StaticShape(1, 512, 64, True, 8, 128))
    for other in (
        StaticShape(1, 512, 320, True, 8, 128),
        StaticShape(1, 512, 64, True, 32, 128),
        StaticShape(1, 512, 64, True, 8, 512),
        StaticShape(1, 480, 64, True, 8, 128),
        StaticShape(2, 512, 64, True, 8, 128),
        StaticShape(1, 512, 64),
    ):
        assert not large.can_hold(other)


def test_padding_is_a_sixteenth_at_most() -> None:
    for count in range(1, 5000):
        assert count <= round_up(count) <= count + count / 16
    assert (round_up(2048), round_up(2000), round_up(511)) == (2048, 2048, 512)
    even = collate_samples([sample(1000)], 0, packed=False, flat=False)
    assert choose_shape(even, (1000, 999)) == StaticShape(1, 1000, 999)
    assert choose_shape(even, (1000, 500)) == StaticShape(1, 1000, 1000) and choose_shape(even).length == 1024


def test_rows_without_a_target_count_nothing() -> None:
    hidden = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    weight, targets = torch.randn(40, 16, dtype=torch.float64), torch.randint(0, 40, (9,))
    kept = torch.tensor([0, 3, 4, 8])
    some = torch.full_like(targets, IGNORE_INDEX)
    some[kept] = targets[kept]
    found, wanted = sum_token_losses(hidden, weight, some), sum_token_losses(hidden[kept], weight, targets[kept])
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    (got,), (expected,) = torch.autograd.grad(found, hidden), torch.autograd.grad(wanted, hidden)
    torch.testing.assert_close(got, expected)
    assert not got[[1, 2, 5, 6, 7]].any()


def test_a_pass_that_is_repeated_draws_the_seeds_again() -> None:
    x, seeds = torch.zeros(1), Seeds()
    with seeds.record():
        first = [draw_seed(x, 0.5) for _ in range(3)]
    with seeds.replay():
        assert [draw_seed(x, 0.5) for _ in range(3)] == first and draw_seed(x, 0.0) is None
    assert draw_seed(x, 0.5) not in first


REFUSED = {
    "adapter=none": "trains all weights",
    "ops.flat=false": "a separate gradient",
    "zero.stage=3": "gathers weights",
    "training.torch_compile=true": "its own graphs",
    "training.router_aux_loss=0.1": "second output",
    "training.qat=int8": "on the host",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_graphs_that_are_asked_for_and_cannot_be_are_refused(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("base_model: m\noutput_dir: out\ndataset:\n  path: data.jsonl\n")
    with pytest.raises(UserError, match=r"^training\.cuda_graphs=on: ") as refusal:
        load_config(file, ["training.cuda_graphs=on", setting])
    assert REFUSED[setting] in str(refusal.value) and "; use auto" in str(refusal.value)
    assert load_config(file, ["training.cuda_graphs=auto", setting]).config.training.cuda_graphs == "auto"


@pytest.mark.parametrize(
    ("lora", "tokens"), [({}, [5]), ({"modules_to_save": ("lm_head",)}, None), ({"dora": True}, None)]
)
def test_weights_outside_of_the_adapters_buffer_are_not_left_out_of_captures(
    lora: dict[str, Any], tokens: list[int] | None
) -> None:
    """A recording has gradients of the buffer alone."""
    model = apply_adapter(tiny_model(torch.float32, CPU), LoraSection(r=4, **lora), torch.float32, tokens)
    flatten_adapter(model, separate_up=False)
    said: list[str] = []
    assert GraphedLoss.create(TokenLoss(model), model, "on", said.append, has_experts=False) is None
    assert "trained tensors are not in the adapter's buffer" in said[0]
