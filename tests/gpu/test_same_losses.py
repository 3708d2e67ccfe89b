"""Speed changes nothing, on real GPUs: 50 steps of SmolLM2-135M against plain PEFT and AdamW; prints what it measured.

The weights are those of the folder that ZEROLORA_SMOLLM2 names or that `make demo` left in its cache; without them the
shape has random ones, and the output says so. Keep the output with `pytest -s`.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.conftest import ROOT, Matrix, launch
from tests.distributed.plan import case
from tests.plain_peft import plain_losses
from tests.tiny import write_chats
from trainer.config import load_config

pytestmark = pytest.mark.gpu

STEPS, STAGES = 50, (0, 1, 2, 3)
RELATIVE = 1e-4


def base_model() -> str:
    """SmolLM2-135M, real if it is here."""
    cache = Path(os.environ.get("ZEROLORA_CACHE", "~/.cache/zerolora")).expanduser()
    named = [Path(os.environ["ZEROLORA_SMOLLM2"])] if "ZEROLORA_SMOLLM2" in os.environ else []
    found = [*named, *(path.parent for path in sorted(cache.glob("**/config.json")) if "smollm2" in str(path).lower())]
    return str(found[0]) if found else "random:smollm2-135m"


def plan() -> list[dict[str, Any]]:
    cases = [case(f"fp32-{stage}", zero__stage=stage) for stage in STAGES]
    cases += [case(f"packed-fp32-{stage}", zero__stage=stage, dataset__packing=True) for stage in (2, 3)]
    bf16 = {"training__precision": "bf16"}
    cases += [case(f"bf16-{stage}", zero__stage=stage, **bf16) for stage in STAGES]
    return [*cases, case("packed-bf16", dataset__packing=True, **bf16)]


def settings(folder: Path) -> dict[str, Any]:
    return {
        "base_model": base_model(),
        "output_dir": "unset",
        "lora": {"r": 16, "alpha": 32},
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 256, "cache_dir": str(folder / "cache")},
        "training": {
            "batch_size": 4,
            "max_steps": STEPS,
            "learning_rate": 2e-4,
            "precision": "fp32",
            "save_steps": 0,
        },
        "logging": {"report_to": "none"},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder: Path = tmp_path_factory.mktemp("same-losses")
    write_chats(folder / "train.jsonl", 2000, longest=60)
    (folder / "base.yaml").write_text(yaml.safe_dump(settings(folder)))
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    env.pop("DS_ACCELERATOR", None)
    print(f"\n{base_model()}, {STEPS} steps, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    launch(folder, torch.cuda.device_count(), plan(), env)
    return Matrix(folder, plan())


class Plain:
    """Losses of plain PEFT, computed once for each way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[bool, str, str], list[float]] = {}

    def losses(self, *, packed: bool, precision: str, attention: str = "sdpa") -> list[float]:
        key = (packed, precision, attention)
        if key not in self._known:
            overrides = [f"dataset.packing={packed}", f"training.precision={precision}"]
            config = load_config(self._folder / "base.yaml", overrides).config
            device, ranks = torch.device("cuda", 0), torch.cuda.device_count()
            self._known[key] = plain_losses(config, ranks=ranks, attention=attention, device=device)
        return self._known[key]


@pytest.fixture(scope="module")
def plain(runs: Matrix) -> Plain:
    return Plain(runs["fp32-0"].folder.parent)


@pytest.mark.parametrize("name", [f"fp32-{stage}" for stage in STAGES] + ["packed-fp32-2", "packed-fp32-3"])
def test_fp32_losses_are_those_of_plain_peft(runs: Matrix, plain: Plain, name: str) -> None:
    """Stages 0 to 3; packs against their documents one by one."""
    expected = plain.losses(packed=name.startswith("packed"), precision="fp32")
    losses = runs[name].losses
    worst = max(abs(ours - other) / other for ours, other in zip(losses, expected, strict=True))
    print(f"{name:<14} loss {losses[0]:.4f} -> {losses[-1]:.4f}  largest relative difference to PEFT {worst:.1e}")
    assert expected[-1] < expected[0] - 0.1, "nothing was learned that could differ"
    assert worst <= RELATIVE


@pytest.mark.parametrize("name", [f"bf16-{stage}" for stage in STAGES] + ["packed-bf16"])
def test_bf16_losses_are_as_near_to_fp32_as_those_of_plain_peft(runs: Matrix, plain: Plain, name: str) -> None:
    """The root mean square of the distances, over two kernels of attention: a largest one is chance."""
    packed = name.startswith("packed")
    exact = torch.tensor(plain.losses(packed=packed, precision="fp32"))

    def distance(losses: list[float]) -> float:
        return float((torch.tensor(losses) - exact).square().mean().sqrt())

    kernels = [plain.losses(packed=packed, precision="bf16", attention=kernel) for kernel in ("sdpa", "eager")]
    ours, theirs = distance(runs[name].losses), max(map(distance, kernels))
    print(f"{name:<14} distance to fp32 {ours:.1e}, of plain PEFT {theirs:.1e}")
    assert ours <= 1.25 * theirs
