"""GPUs that share sequences give the losses and adapters of one GPU with whole sequences."""

import os
from typing import Any

import pytest
import torch

from tests.distributed.conftest import ROOT, Matrix, launch
from tests.distributed.plan import PAIRED, case
from tests.families import save_family
from tests.tiny import make_model

pytestmark = pytest.mark.gpu

LONG = {"dataset__max_length": 250, "training__batch_size": 1, "dataset__packing": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "packed-0": {**LONG, "zero__stage": 0},
    "packed-3": {**LONG, "zero__stage": 3},
    "rows-2": {"dataset__max_length": 250, "training__batch_size": 1, "zero__stage": 2},
    "nf4-3": {**LONG, "zero__stage": 3, "adapter": "qlora"},
    "gemma-2": {**LONG, "zero__stage": 2, "base_model": "gemma"},
    "experts-3": {**LONG, "zero__stage": 3, "base_model": "experts"},
    "pairs-2": {**PAIRED, "zero__stage": 2},
    "bf16-2": {**LONG, "zero__stage": 2, "training__precision": "bf16"},
    "recomputed-2": {
        **LONG, "zero__stage": 2, "training__precision": "bf16", "training__offload_activations": True,
        "training__gradient_checkpointing": "non_reentrant",
    },
}  # fmt: skip
RELATIVE = {"bf16-2": 2e-3, "recomputed-2": 2e-3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; this machine has {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("sequences")
    make_model(folder / "model")
    save_family(folder / "gemma", "gemma3_text")
    save_family(folder / "experts", "qwen3_moe")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    env.pop("DS_ACCELERATOR", None)
    every = []
    for ranks in (1, 2):
        shared = {"parallel__sequence": ranks}
        cases = [case(f"{name}-of-{ranks}", **changes, **shared) for name, changes in SETTINGS.items()]
        launch(folder, ranks, cases, env)
        every += cases
    return Matrix(folder, every)


@pytest.mark.parametrize("name", SETTINGS)
def test_shared_sequences_give_the_losses_of_whole_ones(runs: Matrix, name: str) -> None:
    alone, shared = runs[f"{name}-of-1"], runs[f"{name}-of-2"]
    assert len(alone.losses) == len(shared.losses) > 2
    assert shared.losses == pytest.approx(alone.losses, rel=RELATIVE.get(name, 1e-4))
