"""A packed document gets the loss and the gradient that it has alone, in every model with recurrent layers."""

from typing import Any

import pytest
import torch

from tests.families import tiny_family
from trainer.config import LoraSection, UserError
from trainer.config.training_sections import TrainingSection
from trainer.data.batches import collate_samples
from trainer.data.samples import Sample
from trainer.model.adapter import apply_adapter
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packing_probe import separate_documents
from trainer.patches.per_document import DocumentLayout, PerDocumentForward
from trainer.patches.recompute import enable_recomputation
from trainer.patches.replace import undo

CPU = torch.device("cpu")
PACKS = ([37, 3, 40], [5, 46, 1, 20])
FEW = ("lfm2", "qwen3_5_text", "zaya")
"""A convolution with bounds, a delta rule without, and a layer of several results."""
RECURRENT = (
    "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba lfm2_moe mamba mamba2 minimax "
    "nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
).split()
KINDS = [
    *FEW,
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in RECURRENT),
    pytest.param("kimi_linear", marks=pytest.mark.nightly),  # its plain code takes minutes for the backward pass
]


def adapted(kind: str, recomputed: str = "none") -> Any:
    model = apply_adapter(tiny_family(kind).double(), LoraSection(r=4), torch.float64)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    enable_recomputation(model, TrainingSection.model_validate({"gradient_checkpointing": recomputed}))
    return model.train()


def packs() -> list[Sample]:
    draw = torch.Generator().manual_seed(2)
    tokens = [torch.randint(3, 380, (sum(lengths),), generator=draw).tolist() for lengths in PACKS]
    return [Sample(ids, [True] * len(ids), lengths) for ids, lengths in zip(tokens, PACKS, strict=True)]


def documents() -> list[Sample]:
    alone = []
    for pack in packs():
        for ids in torch.tensor(pack.input_ids).split(pack.document_lengths):
            alone.append(Sample(ids.tolist(), [True] * len(ids), [len(ids)]))
    return alone


def learn(loss: TokenLoss, model: Any, batches: list[Any]) -> tuple[float, torch.Tensor]:
    """Return loss sum and gradient of all batches, which are all computed before the first backward pass."""
    model.zero_grad()
    total = torch.stack([loss(model, batch, CPU) for batch in batches]).sum()
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(total.detach()), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("recomputed", ["none", "non_reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_learn_what_they_learn_alone(kind: str, recomputed: str) -> None:
    model = adapted(kind, recomputed)
    loss = TokenLoss(model)
    rows = [
        collate_samples([sample], 0, packed=False, flat=False) for sample in documents() if len(sample.input_ids) > 1
    ]
    alone, expected = learn(loss, model, rows)
    together = [collate_samples([pack], 0, packed=True, flat=False) for pack in packs()]
    assert not separate_documents(loss, model, 0, CPU)
    for batches in (together, [collate_samples(packs(), 0, packed=True, flat=False)]):
        found, gradient = learn(loss, model, batches)
        assert found == pytest.approx(alone, rel=1e-6)
        error = (gradient - expected).abs().max() / expected.abs().max()
        assert error < 1e-6, f"{error:.1e}"  # the delta rules compute in 32 bits in any model
    undo(model)
    leaking, _ = learn(loss, model, together)
    assert leaking != pytest.approx(alone, rel=1e-6), "the model keeps documents apart by itself"


def test_attention_without_positions_keeps_documents_apart() -> None:
    """transformers gives the masks of Granite 4.0 H no positions, so its attention joined the documents of a pack."""
    model = tiny_family("granitemoehybrid", layer_types=["linear_attention", "full_attention"] * 2)
    loss = TokenLoss(model)
    rows = [
        collate_samples([sample], 0, packed=False, flat=False) for sample in documents() if len(sample.input_ids) > 1
    ]
    together = [collate_samples([pack], 0, packed=True, flat=False) for pack in packs()]
    assert not separate_documents(loss, model, 0, CPU)
    alone, packed = ([float(loss(model, batch, CPU).detach()) for batch in batches] for batches in (rows, together))
    assert sum(packed) == pytest.approx(sum(alone), rel=1e-6)
    undo(model)


def test_layers_use_their_kernels_only_where_these_keep_documents_apart() -> None:
    """LFM2's convolution gets bounds; in Zamba a scan follows that ignores them, by one part in a million."""
    for kind, by_kernels in (("lfm2", True), ("zamba", False)):
        model = adapted(kind)
        separate_documents(TokenLoss(model), model, 0, CPU)
        forwards = [vars(module).get("forward") for module in model.modules()]
        separate = [forward for forward in forwards if isinstance(forward, PerDocumentForward)]
        assert separate and all(forward.by_kernels is by_kernels for forward in separate), kind


def test_documents_of_similar_length_are_computed_together() -> None:
    positions = torch.cat([torch.arange(length) for length in (100, 3, 4, 70, 1, 4, 80)])[None]
    found = DocumentLayout(positions, torch.clone, one_call=False)
    assert [tuple(index.shape) for index in found.groups] == [(1, 1), (3, 4), (3, 100)]
    tokens = torch.cat([index.flatten() for index in found.groups])
    assert torch.equal(tokens[found.positions], torch.arange(positions.numel()))
    assert [tuple(index.shape) for index in DocumentLayout(positions, torch.clone, one_call=True).groups] == [(7, 100)]


def test_layers_that_combine_several_tokens_into_one_are_found() -> None:
    """DeepSeek-V4 compresses four tokens into one, also of two documents: too few to be seen in short ones."""
    model = adapted("deepseek_v4")
    with pytest.raises(
        UserError, match=r"dataset.packing=true: .* packed documents have different logits than separate ones"
    ):
        separate_documents(TokenLoss(model), model, 0, CPU)
