"""Adapters that are trained together (`adapters`) are those of their runs alone: losses, norms and factors."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS, EXACT = 2, 1e-6
ROUNDED, ROUNDED_FACTORS = 1e-3, 2e-2
"""With FP8, where a difference in the last bit of an activation may round it to a neighbour."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "twin": {"seed": 3, "training.max_grad_norm": 0.0},
    "other": {
        "seed": 7,
        "dataset.path": "other.jsonl",
        "lora.r": 8,
        "lora.alpha": 4,
        "lora.target_modules": ["q_proj", "v_proj", "down_proj"],
        "training.batch_size": 3,
        "training.learning_rate": 3e-3,
        "training.lr_scheduler": "linear",
        "training.max_steps": 6,
        "training.max_grad_norm": 0.05,
        "training.weight_decay": 0.1,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"zero__stage": stage} for stage in (0, 1, 2, 3)},
    "nf4": {"zero__stage": 3, "adapter": "qlora"},
    "packed": {"dataset__packing": True},
    "recomputed": {"zero__stage": 3, "training__gradient_checkpointing": "non_reentrant"},
    "selective": {"training__gradient_checkpointing": "selective", "adapter": "qlora"},
    "fp8": {"adapter": "qlora", "quantization__quant_type": "fp8"},
    "dropout": {
        "lora__dropout": 0.3, "training__gradient_checkpointing": "non_reentrant", "dataset__max_length": 12,
        "dataset__path": "long.jsonl", "dataset__evaluation__path": "long.jsonl",
    },
    "accumulated": {"training__gradient_accumulation_steps": 3, "training__loss": "dft"},
    "equal-stage3": {"zero__stage": 3},
    "equal-nf4": {"zero__stage": 3, "adapter": "qlora", "training__gradient_checkpointing": "non_reentrant"},
}  # fmt: skip


def adapters_of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """Return the adapters of a case; the products of equal ones are batched."""
    return {name: own for name, own in ADAPTERS.items() if name != "other" or not kind.startswith("equal")}


def plan() -> list[dict[str, Any]]:
    cases = []
    for kind, shared in KINDS.items():
        common = {"ops__backend": "reference", "training__save_steps": 2, **shared}
        adapters = [{"name": name, **_of_kind(kind, own)} for name, own in adapters_of_kind(kind).items()]
        cases.append(case(f"{kind}-together", **common, adapters=adapters))
        for name, own in adapters_of_kind(kind).items():
            settings = {key.replace(".", "__"): value for key, value in _of_kind(kind, own).items()}
            cases.append(case(f"{kind}-{name}", **common | settings))
    return cases


def _of_kind(kind: str, own: dict[str, Any]) -> dict[str, Any]:
    """With dropout, as its mask counts rows and padding, all data has sequences of one length."""
    return {key: value for key, value in own.items() if not (kind == "dropout" and key == "dataset.path")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("adapters")
    write_data(folder)
    launch(folder, RANKS, plan(), environment())
    return Matrix(folder, plan())


def write_data(folder: Path) -> None:
    from tests.tiny import write_chats

    write_chats(folder / "other.jsonl", 12, seed=5, longest=20)
    texts = [json.dumps({"text": "red green blue seven eight nine runs jumps sleeps"}) for _ in range(20)]
    (folder / "long.jsonl").write_text("\n".join(texts))


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in adapters_of_kind(kind)])
def test_an_adapter_is_that_of_its_run_alone(runs: Matrix, kind: str, name: str) -> None:
    together, alone = runs[f"{kind}-together"].folder / name, runs[f"{kind}-{name}"].folder
    found, expected = records(together), records(alone)
    allowed = ROUNDED if kind == "fp8" else EXACT
    for metric in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss", "train/target_tokens"):
        values, wanted = ([line[metric] for line in lines if metric in line] for lines in (found, expected))
        assert values == pytest.approx(wanted, rel=allowed, abs=allowed), metric
    assert len([line for line in found if "train/loss" in line]) == ADAPTERS[name].get("training.max_steps", 4)
    for file in ("adapter_model.safetensors", "checkpoint-2/adapter_model.safetensors"):
        factors, wanted_factors = load_file(together / file), load_file(alone / file)
        assert factors.keys() == wanted_factors.keys()
        for key, factor in factors.items():
            assert (factor - wanted_factors[key]).abs().max() <= (ROUNDED_FACTORS if kind == "fp8" else EXACT), key
        assert any(factor.any() for key, factor in factors.items() if "lora_B" in key), "nothing was learned"
    settings, wanted_settings = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (together, alone)
    )
    layers = {key.partition(".lora_")[0] for key in load_file(alone / "adapter_model.safetensors")}
    for saved in (settings, wanted_settings):  # by their names or by their paths
        targets = saved.pop("target_modules")
        assert all(any(f".{layer}".endswith(f".{target}") for target in targets) for layer in layers)
    assert settings == wanted_settings
