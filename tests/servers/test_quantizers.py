"""Checkpoints that a real quantizer writes, AutoRound, have its values here and are trained as they are."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import make_model
from tests.unit.test_stored_four_bit import adapt, load, logits_and_gradients
from trainer.model.packed_experts import FrozenLinearGrouped

pytestmark = [
    pytest.mark.nightly,
    # Not importorskip: CI fails a file that is skipped as a whole.
    pytest.mark.skipif(find_spec("auto_round") is None, reason="needs the wheel auto-round"),
]
# `fake` writes the dequantized values of the same rounding.
PROGRAM = """
import sys
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

base, folder, form = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
options = {"bits": 4, "group_size": 32, "sym": form != "auto_awq", "iters": 0, "disable_opt_rtn": True}
rounder = AutoRound(model, AutoTokenizer.from_pretrained(base), device_map="cpu", **options)
rounder.quantize_and_save(folder, format=form)
"""


def quantize(base: Path, folder: Path, form: str) -> Path:
    """Return the folder of the quantized model, which AutoRound puts below the one it is given."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, base, folder, form], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.rglob("config.json")).parent


@pytest.mark.parametrize("form", ["auto_gptq", "auto_awq", "llm_compressor"])
def test_autorounds_files_have_its_values(tmp_path: Path, form: str) -> None:
    base = make_model(tmp_path / "base")
    folder = quantize(base, tmp_path / form, form)
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    assert method == {"auto_gptq": "gptq", "auto_awq": "awq", "llm_compressor": "compressed-tensors"}[form]
    model, original = load(folder), load_file(base / "model.safetensors")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, FrozenLinearGrouped)}
    assert len(layers) == 14
    for name, layer in layers.items():
        w_OI = original[f"{name}.weight"]
        groups = w_OI.unflatten(-1, (-1, 32))
        # Symmetric codes go from -8 to 7 steps of the largest magnitude / 8 or / 7, others over the group's range.
        step = groups.abs().amax(-1) / 7 if form != "auto_awq" else (groups.amax(-1) - groups.amin(-1)) / 15
        error = (layer.dequantize(torch.float32) - w_OI).abs().unflatten(-1, (-1, 32)).amax(-1)
        assert (error <= 1.05 * step + 1e-6).all(), f"{name}: no more than a step, at the end of the range"
        assert (error.median() < 0.6 * step.median()) and error.max() > 0, "rounded to the nearest"
    adapted = adapt(model)
    assert all(torch.isfinite(each).all() and each.abs().sum() > 0 for each in logits_and_gradients(adapted))
