"""Bases stored in 4 bits at every stage: the losses of plain PEFT on the dequantised weights, resumed to the bit."""

from typing import Any

import pytest
import torch
import yaml

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case
from tests.distributed.test_stored_fp8 import ATTENTION, PLACES
from tests.four_bits import store_in_four_bits, write_dequantized
from tests.mixtures import make_mixture
from tests.plain_peft import plain_losses
from tests.tiny import make_model, make_tokenizer
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.merged_model import merge
from trainer.config import ModelSection, RunConfig
from trainer.model.base import load_base_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DENSE = {"act-order": ("0", "2", "layer", "module"), "awq": ("1", "layer"), "w4a16-zeros": ("2", "module")}
DENSE |= {"gptq": ("layer",), "nvfp4": ("0", "layer", "module")}
EXPERTS: dict[str, Any] = {"lora__target_modules": "q_proj,v_proj,gate_proj,up_proj,down_proj"}
RUNS: dict[str, dict[str, Any]] = {
    **{
        f"{form}-{place}": {"base_model": form, **PLACES[place]} for form, places in DENSE.items() for place in places
    },
    "fused-nvfp4-layer": {"base_model": "nvfp4", "zero__stage": 3, "ops__backend": "reference"},
    "fused-act-order-2": {"base_model": "act-order", "zero__stage": 2, "ops__backend": "reference"},
    "mixture-awq-0": {"base_model": "mixture-awq", "zero__stage": 0, **ATTENTION},
    "mixture-awq-layer": {"base_model": "mixture-awq", "zero__stage": 3, **ATTENTION},
    "mixture-nvfp4-module": {"base_model": "mixture-nvfp4", **PLACES["module"], **ATTENTION},
}  # fmt: skip
ADAPTED = {f"experts-{form}-{stage}": (form, stage) for form in ("awq", "nvfp4") for stage in (0, 3)}
LONG = {"training__max_steps": 4, "training__save_steps": 2, "training__precision": "bf16", "lora__dropout": 0.1}
RESUMED = {"base_model": "nvfp4", "zero__stage": 3, **LONG}


def _plan() -> list[dict[str, Any]]:
    cases = [case(name, **settings) for name, settings in RUNS.items()]
    cases += [
        case(name, base_model=f"mixture-{form}", zero__stage=stage, **EXPERTS)
        for name, (form, stage) in ADAPTED.items()
    ]
    cases += [case(f"experts-plain-{form}", base_model=f"mixture-{form}-plain", **EXPERTS) for form in ("awq", "nvfp4")]
    again = {"training__resume_from_checkpoint": "whole/checkpoint-2", "output_dir": "again"}
    return [*cases, case("whole", **RESUMED), case("again", **RESUMED, **again)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("four")
    for form in DENSE:
        write_dequantized(store_in_four_bits(make_model(folder / form), form), folder / f"{form}-plain", form)
    for form in ("awq", "nvfp4"):
        make_tokenizer(make_mixture(folder / f"mixture-{form}", "qwen3_moe"))
        write_dequantized(store_in_four_bits(folder / f"mixture-{form}", form), folder / f"mixture-{form}-plain", form)
    launch(folder, 2, _plan(), environment())
    return Matrix(folder, _plan())


@pytest.fixture(scope="module")
def plain(runs: Matrix) -> dict[str, list[float]]:
    """Losses of PEFT and a loop of our own, on the dequantised weights of each checkpoint."""
    folder, found = runs["whole"].folder.parent, {}
    for name in {settings["base_model"] for settings in RUNS.values()}:
        settings = yaml.safe_load((folder / "base.yaml").read_text())
        settings |= {"base_model": str(folder / f"{name}-plain"), "output_dir": "unset"}
        if "mixture" in name:
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


@pytest.mark.parametrize("name", ADAPTED)
def test_adapted_experts_have_the_losses_of_the_dequantised_model(runs: Matrix, name: str) -> None:
    wanted = runs[f"experts-plain-{ADAPTED[name][0]}"]
    assert len(wanted.losses) == 4
    assert runs[name].losses == pytest.approx(wanted.losses, abs=1e-6)


def test_a_resumed_run_continues_to_the_bit(runs: Matrix) -> None:
    whole, again = runs["whole"], runs["again"]
    assert again.losses == whole.losses[2:]
    for key, value in whole.adapter().items():
        assert torch.equal(again.adapter()[key], value), key


@pytest.mark.parametrize("name", ["awq-layer", "experts-nvfp4-3"])
def test_a_trained_run_is_merged(runs: Matrix, name: str, tmp_path: Any) -> None:
    run, ids, cpu = find_run(runs[name].folder), torch.arange(24).view(2, 12), torch.device("cpu")
    merged = merge(run, tmp_path / "wide", dtype="fp32")
    stored = merge(run, tmp_path / "stored", dtype="stored")
    how: dict[str, Any] = {"dtype": torch.float32, "device": cpu, "attention": "eager"}
    with torch.no_grad():
        trained = load_trained_model(run, load_saved_tokenizer(run), cpu)(ids).logits
        for folder, allowed in ((merged, 1e-5), (stored, 0.1)):
            logits = load_base_model(str(folder), ModelSection(), **how)(ids).logits
            torch.testing.assert_close(logits, trained, rtol=1e-4, atol=allowed)
