"""A merged gpt-oss has its experts in MXFP4 as the base has, and the loss of writing them so is said."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.mixtures import make_mixture, store_in_mxfp4
from tests.tiny import make_tokenizer
from tests.unit.test_after_run import make_run
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.merged_model import merge
from trainer.config import ModelSection
from trainer.model import mxfp4
from trainer.model.base import check_weights, load_base_model, load_model_config
from trainer.model.stored_layout import map_stored_tensors

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)
DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    base = store_in_mxfp4(make_mixture(folder / "model", "gpt_oss"))
    make_tokenizer(base)
    return make_run(folder, base=base, lora={"target_modules": ["q_proj", "o_proj"]})


def test_experts_that_were_not_adapted_are_the_bases_to_the_bit(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = find_run(run_dir)
    output = merge(run, tmp_path / "merged")
    assert "experts: unchanged, in MXFP4" in capsys.readouterr().err
    before, after = load_file(run_dir.parent / "model" / "model.safetensors"), load_file(output / "model.safetensors")
    assert before.keys() == after.keys()
    for name in (name for name in before if "experts" in name):
        assert torch.equal(before[name], after[name]), name
    config = load_model_config(str(output), ModelSection())
    assert config.quantization_config == json.loads((output / "config.json").read_text())["quantization_config"]
    assert check_weights(str(output), ModelSection(), config) == []
    merged = load_base_model(str(output), ModelSection(), dtype=torch.float32, device=CPU, attention="eager")
    adapted = load_trained_model(run, load_saved_tokenizer(run), CPU)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-5)


def test_a_number_format_that_is_asked_for_is_written_instead(run_dir: Path, tmp_path: Path) -> None:
    output = merge(find_run(run_dir), tmp_path / "merged", dtype="bf16")
    stored = load_file(output / "model.safetensors")
    assert stored[DOWN].dtype == torch.bfloat16 and not any(name.endswith("_blocks") for name in stored)
    assert "quantization_config" not in json.loads((output / "config.json").read_text())


def test_what_an_adapter_added_to_experts_is_rounded_and_the_loss_is_said(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged experts are changed here by as much as an adapter may change them."""
    torch.manual_seed(0)
    wanted: list[torch.Tensor] = []

    def changed(model: torch.nn.Module, *rest: object) -> object:
        weight = model.get_parameter(DOWN)
        weight.data += 0.05 * weight.data.std() * torch.randn_like(weight)
        wanted.append(weight.data.clone())
        return map_stored_tensors(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("trainer.commands.merged_model.map_stored_tensors", changed)
    output = merge(find_run(run_dir), tmp_path / "merged")
    stored = load_file(output / "model.safetensors")
    written = mxfp4.dequantize(stored[f"{DOWN}_blocks"], stored[f"{DOWN}_scales"], torch.float32)
    written = written.view(*wanted[0].mT.shape).mT
    lost = float((written - wanted[0]).norm() / wanted[0].norm())
    assert 0.001 < lost < 0.15
    line = re.search(r"changed by ([\d.]+)% \(rounding\) and ([\d.]+)% \(adapter\)", capsys.readouterr().err)
    assert line is not None
    assert 0 < float(line[1]) <= 100 * lost + 0.01, "of all experts one tensor was changed"
    assert float(line[2]) > 0
