"""Bases stored in FP8 at every stage: the losses of plain PEFT on the dequantised weights, and resumed to the bit."""

from typing import Any

import pytest
import torch
import yaml

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.eight_bits import FORMS, store_in_fp8, write_dequantized
from tests.mixtures import make_mixture
from tests.plain_peft import plain_losses
from tests.tiny import make_model, make_tokenizer
from trainer.config import RunConfig

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODULE = {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0}
PLACES: dict[str, dict[str, Any]] = {
    "0": {"zero__stage": 0},
    "1": {"zero__stage": 1},
    "2": {"zero__stage": 2},
    "layer": {"zero__stage": 3, "training__gradient_checkpointing": "non_reentrant"},
    "module": MODULE,
}
ATTENTION = {"lora__target_modules": "q_proj,k_proj,v_proj,o_proj"}
RUNS: dict[str, dict[str, Any]] = {
    **{f"blocks-{place}": {"base_model": "blocks", **where} for place, where in PLACES.items()},
    "tensor-2": {"base_model": "tensor", "zero__stage": 2},
    "channel-layer": {"base_model": "channel", "zero__stage": 3},
    "fused-blocks-layer": {"base_model": "blocks", "zero__stage": 3, "ops__backend": "reference"},
    "mixture-0": {"base_model": "mixture", "zero__stage": 0, **ATTENTION},
    "mixture-layer": {"base_model": "mixture", "zero__stage": 3, **ATTENTION},
}
EIGHT = {"adapter": "qlora", "quantization__quant_type": "fp8", "base_model": "channel", "ops__backend": "reference"}
QUANTISED = {**EIGHT, "base_model": "qwen3_moe"}
LONG = {"training__max_steps": 4, "training__save_steps": 2, "training__precision": "bf16", "lora__dropout": 0.1}
RESUMED = {"base_model": "blocks", "zero__stage": 3, **LONG}


def _plan() -> list[dict[str, Any]]:
    cases = [case(name, **settings) for name, settings in RUNS.items()]
    cases += [case(f"products-{stage}", zero__stage=stage, **EIGHT) for stage in (2, 3)]
    cases += [case(f"experts-{stage}", zero__stage=stage, **QUANTISED) for stage in (0, 3)]
    cases.append(case("whole", **RESUMED))
    again = {"training__resume_from_checkpoint": "whole/checkpoint-2", "output_dir": "again"}
    return [*cases, case("again", **RESUMED, **again)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("fp8")
    for form in FORMS:
        store_in_fp8(make_model(folder / form, intermediate_size=80), form)  # the last block of 32 is short
    store_in_fp8(make_mixture(folder / "mixture", "qwen3_moe", moe_intermediate_size=48), "blocks")
    make_mixture(folder / "qwen3_moe", "qwen3_moe")
    for name in ("mixture", "qwen3_moe"):
        make_tokenizer(folder / name)
    launch(folder, 2, _plan(), environment())
    return Matrix(folder, _plan())


@pytest.fixture(scope="module")
def plain(runs: Matrix) -> dict[str, list[float]]:
    """Losses of PEFT and a loop of our own, on the weights that each checkpoint stands for."""
    folder, found = runs["whole"].folder.parent, {}
    for name in (*FORMS, "mixture"):
        settings = yaml.safe_load((folder / "base.yaml").read_text())
        settings |= {
            "base_model": str(write_dequantized(folder / name, folder / f"{name}-plain")),
            "output_dir": "unset",
        }
        if name == "mixture":
            settings["lora"]["target_modules"] = ATTENTION["lora__target_modules"].split(",")
        config = RunConfig.model_validate(settings)
        found[name] = plain_losses(config, ranks=2, device=torch.device("cpu"))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_plain_peft_on_the_dequantised_weights(
    runs: Matrix, plain: dict[str, list[float]], name: str
) -> None:
    found = runs[name]
    assert len(found.losses) == 4
    assert found.losses == pytest.approx(plain[RUNS[name]["base_model"]], abs=1e-6)
    if name.endswith("layer"):
        assert "base: sharded in" in found.console


def test_8_bit_products_on_the_stored_codes_agree_over_stages(runs: Matrix, plain: dict[str, list[float]]) -> None:
    assert runs["products-3"].losses == pytest.approx(runs["products-2"].losses, abs=1e-5)
    assert runs["products-2"].losses == pytest.approx(plain["channel"], abs=5e-3)
    assert runs["products-2"].losses != pytest.approx(plain["channel"], abs=1e-6), "inputs were not quantised"


def test_an_moe_model_quantised_to_8_bits_agrees_over_stages(runs: Matrix) -> None:
    assert runs["experts-3"].losses == pytest.approx(runs["experts-0"].losses, abs=1e-5)
    assert len(runs["experts-0"].losses) == 4


def test_a_resumed_run_continues_to_the_bit(runs: Matrix) -> None:
    whole, again = runs["whole"], runs["again"]
    assert again.losses == whole.losses[2:]
    for key, value in whole.adapter().items():
        assert torch.equal(again.adapter()[key], value), key
