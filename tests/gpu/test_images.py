"""Image models under ZeRO on real GPUs: the losses of plain diffusers and PEFT, the same at every stage.

On one GPU stage 3 has its weights in host memory, which is the only way in which anything is cut there.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("diffusers", reason="needs diffusers: pip install diffusers pillow")
pytest.importorskip("PIL", reason="needs pillow: pip install diffusers pillow")

from tests.distributed.conftest import ROOT, Matrix, launch
from tests.distributed.plan import case
from tests.pipelines import make_pipeline, write_images
from tests.plain_diffusers import plain_losses
from trainer.config import load_config

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
FAMILIES, STEPS = ("sdxl", "flux"), 4
ACTIVATIONS = {"training__gradient_checkpointing": "non_reentrant", "training__offload_activations": True}
FP32, BF16 = 1e-4, 1e-3
"""Relative."""


def plan(gpus: int) -> list[dict[str, Any]]:
    """Stage 3 shares weights between GPUs where there are two, and takes them from the host everywhere."""
    bf16, offloaded = {"training__precision": "bf16"}, {"zero__stage": 3, "zero__offload_parameters": True}
    cases = []
    for family in FAMILIES:
        model = {"base_model": family}
        cases += [case(f"{family}-fp32-2", zero__stage=2, **model)]
        cases += [case(f"{family}-bf16-{stage}", zero__stage=stage, **bf16, **model) for stage in stages(gpus)]
        cases += [case(f"{family}-bf16-offloaded", **offloaded, **bf16, **model)]
        cases += [case(f"{family}-bf16-activations", **ACTIVATIONS, **bf16, **model)]
    return cases


def stages(gpus: int) -> tuple[int, ...]:
    return (0, 2, 3) if gpus > 1 else (0, 2)


def settings(folder: Path) -> dict[str, Any]:
    return {
        "base_model": "unset",
        "output_dir": "unset",
        "lora": {"r": 8, "alpha": 16},
        "dataset": {"path": str(folder / "pictures"), "cache_dir": str(folder / "cache")},
        "image": {"resolution": 32, "bucket_step": 8},
        "training": {
            "batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": 3e-3,
            "precision": "fp32",
            "save_steps": 0,
        },
        "logging": {"report_to": "none"},
    }


def trained(folder: Path, ranks: int, env: dict[str, str]) -> Matrix:
    """The plan's runs on so many ranks."""
    for family in FAMILIES:
        make_pipeline(folder / family, family)
    write_images(folder / "pictures", 12, sizes=((64, 64), (96, 64)))
    (folder / "base.yaml").write_text(yaml.safe_dump(settings(folder)))
    launch(folder, ranks, plan(ranks), env)
    return Matrix(folder, plan(ranks))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Convolutions in 32 bits, which cuDNN would round to TF32's 10 bits of mantissa.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, "NVIDIA_TF32_OVERRIDE": "0"}
    env.pop("DS_ACCELERATOR", None)
    return trained(tmp_path_factory.mktemp("images-gpu"), GPUS, env)


def plain(runs: Matrix, family: str, device: torch.device, ranks: int, *changes: str) -> list[float]:
    folder = runs[f"{family}-fp32-2"].folder.parent
    config = load_config(folder / "base.yaml", [f"base_model={folder / family}", *changes]).config
    return plain_losses(config, ranks=ranks, device=device)[0]


def farthest(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    assert len(losses) == len(expected) == STEPS
    return max(abs(ours - other) / other for ours, other in zip(losses, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_plain_diffusers(runs: Matrix, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda", 0)
    expected = plain(runs, family, device, GPUS)
    untrained = plain(runs, family, device, GPUS, "training.learning_rate=1e-12")
    far, learnt = farthest(runs[f"{family}-fp32-2"].losses, expected), farthest(untrained, expected)
    print(f"{family} fp32: {far:.1e} from plain diffusers and PEFT; what was learnt moves losses by {learnt:.1e}")
    assert learnt > 10 * FP32, "nothing was learnt that could differ"
    assert far <= FP32


@pytest.mark.parametrize("stage", [2, 3, "offloaded", "activations"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_the_same_at_every_stage_and_with_activations_on_the_host(
    runs: Matrix, family: str, stage: int | str
) -> None:
    if stage == 3 and GPUS < 2:
        pytest.skip("needs two GPUs: on one there is nobody to share weights with")
    far = farthest(runs[f"{family}-bf16-{stage}"].losses, runs[f"{family}-bf16-0"].losses)
    print(f"{family} bf16: stage {stage} is {far:.1e} from stage 0")
    assert far <= BF16, (runs[f"{family}-bf16-{stage}"].losses, runs[f"{family}-bf16-0"].losses)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_in_16_bits_are_near_those_in_32(runs: Matrix, family: str) -> None:
    far = farthest(runs[f"{family}-bf16-0"].losses, runs[f"{family}-fp32-2"].losses)
    print(f"{family}: bf16 is {far:.1e} from fp32")
    assert 0 < far <= 2e-2
