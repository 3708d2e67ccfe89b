"""Mixtures of experts on real GPUs: the losses of plain PEFT in 32 bits, and in 16 the same ones at every stage.

The experts of one are in 16 bits, of one in NF4 and of one in MXFP4; plain PEFT has the dequantised values. In 32 bits
experts are computed one after the other, in 16 by the operator's kernels.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, launch
from tests.distributed.plan import case
from tests.gpu.test_layer_shards import environment
from tests.mixtures import make_mixture, store_dequantised, store_in_mxfp4
from tests.plain_peft import plain_losses
from tests.tiny import make_tokenizer
from trainer.config import load_config

pytestmark = pytest.mark.gpu

GPUS, STAGES, RATE = torch.cuda.device_count(), (0, 2, 3), 1e-2
KINDS: dict[str, dict[str, Any]] = {"mixtral": {}, "qwen3_moe": {"adapter": "qlora"}, "gpt_oss": {}}
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "head_dim": 32,
    "num_experts": 8, "num_local_experts": 8,
}  # fmt: skip
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
BF16 = {"training__precision": "bf16"}
# Settings, and the stages at which they are run.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "fp32": ({}, STAGES),
    "bf16": (BF16, STAGES),
    "recomputed": ({"training__gradient_checkpointing": "non_reentrant", **BF16}, (2, 3)),
    "packed": ({"dataset__packing": True, **BF16}, STAGES),
}
IN_16_BITS = [f"{variant}-{stage}" for variant in ("bf16", "recomputed", "packed") for stage in VARIANTS[variant][1]]


def plan() -> list[dict[str, Any]]:
    return [
        case(
            f"{kind}-{variant}-{stage}",
            base_model=kind,
            zero__stage=stage,
            training__learning_rate=RATE,
            **of_kind,
            **settings,
        )
        for kind, of_kind in KINDS.items()
        for variant, (settings, stages) in VARIANTS.items()
        for stage in stages
    ]


def make_models(folder: Path) -> None:
    for kind in KINDS:
        changes = SHAPE | (SLIDING if kind == "gpt_oss" else {})
        make_mixture(folder / kind, kind, **changes)
        make_tokenizer(folder / kind)
    store_in_mxfp4(folder / "gpt_oss")
    device = "cuda" if GPUS else "cpu"
    store_dequantised(folder / "qwen3_moe", folder / "qwen3_moe-plain", four_bit=True, device=device)
    store_dequantised(folder / "gpt_oss", folder / "gpt_oss-plain", four_bit=False, device=device)
    os.symlink(folder / "mixtral", folder / "mixtral-plain")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder: Path = tmp_path_factory.mktemp("mixtures-gpu")
    make_models(folder)
    launch(folder, GPUS, plan(), environment())
    return Matrix(folder, plan())


@cache
def plain(folder: Path, kind: str, packed: bool) -> list[float]:
    """Plain PEFT in 32 bits, with the attention that transformers chooses."""
    base = [f"base_model={folder / kind}-plain", f"training.learning_rate={RATE}", f"dataset.packing={packed}"]
    config = load_config(folder / "base.yaml", base).config
    return plain_losses(config, ranks=GPUS, attention=None, device=torch.device("cuda", 0))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_losses_are_those_of_plain_peft(runs: Matrix, kind: str, stage: int) -> None:
    run = runs[f"{kind}-fp32-{stage}"]
    expected = plain(run.folder.parent, kind, False)
    assert expected[-1] < expected[0] - 0.05, "nothing was learned that could differ"
    assert run.losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", IN_16_BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_losses_are_the_same_at_every_stage(runs: Matrix, kind: str, name: str) -> None:
    """Recomputed as well; stage 0 rounds the sums over ranks elsewhere, which sends some tokens to other experts."""
    variant, _, stage = name.rpartition("-")
    run, expected = runs[f"{kind}-{name}"], runs[f"{kind}-{'packed' if variant == 'packed' else 'bf16'}-2"]
    assert len(run.losses) == 4
    assert run.losses == pytest.approx(expected.losses, rel=3e-3 if stage == "0" else 1e-3)
    said = " ".join(run.console.split())
    assert "experts: 3 layers with an adapter of r=4 for each expert (down_proj, gate_up_proj), by the operator" in said
    if stage == "3":
        assert ("base: sharded in 3 units" if GPUS > 1 else "base: not sharded, on the only rank") in said


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_losses_are_near_those_of_plain_peft_in_fp32(runs: Matrix, kind: str, packed: bool) -> None:
    """The kernels' against another computation; a router that is rounded sends some tokens elsewhere."""
    run = runs[f"{kind}-{'packed' if packed else 'bf16'}-2"]
    assert run.losses == pytest.approx(plain(run.folder.parent, kind, packed), rel=5e-3)
