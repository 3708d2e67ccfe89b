"""What models keep for their backward pass, counted by autograd's hooks, against the estimate of the same decisions."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.test_architectures import SMALL
from tests.distributed.test_families import FAMILIES, NOT_PACKED
from trainer.config import ModelSection, RunConfig
from trainer.data.batches import MicroBatch
from trainer.memory.activations import FP32_BYTES, Activations, MicroStep
from trainer.memory.decisions import Decisions, Machine
from trainer.memory.model_widths import read_shapes
from trainer.memory.planner import DataSize, Planner
from trainer.memory.stored_weights import ModelShapes
from trainer.model.adapter import apply_adapter
from trainer.model.model_kind import has_soft_cap
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.patches.loss_head import TokenLoss
from trainer.patches.recompute import enable_recomputation

ROWS, LENGTH = 2, 256
WITHIN = 0.1
CPU = torch.device("cpu")
NO_PARTS = ("gpt_oss", "opt")
NORMS_OUTSIDE = {"bloom": 2, "cohere": 2}
"""Bloom has one behind the embedding, and Cohere's keeps a copy of its input."""
ALL = FAMILIES | NOT_PACKED


def config_of(**training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "base_model": "unset",
            "output_dir": "unset",
            "lora": {"r": 8},
            "dataset": {"path": "unset.jsonl", "max_length": LENGTH, "packing": training.pop("packing", False)},
            "training": {"batch_size": ROWS} | training,
        }
    )


@cache
def model_config(name: str) -> Any:
    return AutoConfig.for_model(name, **(SMALL | {"num_hidden_layers": 2} | ALL[name]))


@cache
def shapes_of(name: str) -> ModelShapes:
    return read_shapes(model_config(name), ModelSection(), config_of().lora)


def plan(name: str, config: RunConfig, precision: str) -> tuple[Decisions, MicroStep, Activations]:
    planner = Planner(
        shapes_of(name), DataSize.assume(config), Machine(1, False, precision, own_kernels=False, flash=False)
    )
    decided = planner.build_decisions(config)
    work = planner.build_micro_step(config, decided)
    return decided, work, planner.estimate_activations(work)


@pytest.fixture(autouse=True)
def _linear_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of ZeRO-3 in an earlier test leaves DeepSpeed's, which keeps its input for a frozen weight too."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


def loaded(name: str, config: RunConfig, precision: str) -> Any:
    dtype = DTYPES[precision]
    torch.manual_seed(0)
    known = model_config(name)
    attention = "eager" if has_soft_cap(known) else None  # as load_base_model does
    model = AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation=attention)
    model = apply_adapter(model, config.lora, dtype)
    enable_recomputation(model, config.training)
    return model.train()


def bytes_saved(model: Any, loss: TokenLoss, *, packed: bool) -> int:
    """Bytes of all storages that autograd keeps in one micro-step, each once, without the model's own."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # alive, so that no other tensor takes its address
        return tensor

    ids = torch.randint(3, 300, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(LENGTH // 2)] * 2)[None].expand(ROWS, -1) if packed else None
    batch = MicroBatch(ids, ids.roll(-1, 1), ids.numel(), position_ids=positions)
    loss(model, batch, CPU)  # which observes the head first
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(model, batch, CPU)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def predicted(name: str, work: MicroStep, seen: Activations) -> int:
    """The layers, and what the loss keeps: fused a gradient of the head's input, else logits.

    The first norm keeps nothing, for the embedding is frozen, and the last as much as a norm of a layer. Recomputed
    layers have none, and the embedding is made to want a gradient.
    """
    shapes = shapes_of(name)
    of_logits = shapes.vocabulary * (FP32_BYTES + (work.element_size if shapes.properties.caps else 0))
    kept = seen.kept + work.tokens * (shapes.hidden * work.element_size if work.fused_loss else of_logits)
    outside = NORMS_OUTSIDE.get(name, 1) * work.tokens * (shapes.hidden + 1) * FP32_BYTES
    return kept + (outside if work.training.gradient_checkpointing == "non_reentrant" else 0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", ["fp32", "bf16", "packed", "recomputed", "selective"])
def test_the_estimate_agrees_with_autograd(name: str, case: str) -> None:
    if case == "packed" and name in NOT_PACKED:
        pytest.skip("its documents see each other in a pack, which is refused")
    if case == "selective" and name in NO_PARTS:
        pytest.skip("no feed-forward part of its own that is adapted, which is refused")
    checkpointing = {"recomputed": "non_reentrant", "selective": "selective"}.get(case, "none")
    config = config_of(packing=case == "packed", gradient_checkpointing=checkpointing)
    precision = "bf16" if case == "bf16" else "fp32"
    decided, work, seen = plan(name, config, precision)
    model = loaded(name, config, precision)
    said: list[str] = []
    loss = TokenLoss(model, fused=decided.fused_head.value, log=said.append)
    saved = bytes_saved(model, loss, packed=case == "packed")
    assert predicted(name, work, seen) == pytest.approx(saved, rel=WITHIN)
    assert not said, "the model on the device does other than its empty twin"
