"""What becomes of adapted experts: merged into the checkpoint's own layout, and exported expert by expert."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import make_tokenizer
from tests.unit.test_experts import base_of, saved
from trainer.checkpoint.finished_run import find_run
from trainer.commands.export.__main__ import export
from trainer.commands.merge import merge
from trainer.config import RunConfig
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_tokenizer

IDS = torch.arange(3, 40)[None]


def make_run(folder: Path, model_type: str, **lora: Any) -> tuple[Path, torch.Tensor]:
    """A run as training leaves it, with a drawn adapter, and its logits."""
    base = folder / "base"
    base_of(model_type).save_pretrained(base)
    make_tokenizer(base)
    run_dir = folder / "run"
    config = RunConfig.model_validate(
        {
            "base_model": str(base),
            "output_dir": str(run_dir),
            "dataset": {"path": "gone.jsonl"},
            "lora": {"r": 4, "alpha": 8, **lora},
        }
    )
    run_dir.mkdir()
    (run_dir / "training_config.json").write_text(config.model_dump_json())
    model = apply_adapter(AutoModelForCausalLM.from_pretrained(base).eval(), config.lora, torch.float32)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    saved(model, run_dir)
    load_tokenizer(str(base), config.model).save_pretrained(run_dir)
    with torch.no_grad():
        with model.disable_adapter():
            before = model(input_ids=IDS, use_cache=False).logits
        logits = model(input_ids=IDS, use_cache=False).logits
    assert (logits - before).abs().max() > 1e-2, "the adapter does something"
    return run_dir, logits


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = (
            AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS, use_cache=False).logits
        )
    return logits


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid"])
def test_merged_experts_are_stored_as_the_checkpoint_stores_them(model_type: str, tmp_path: Path) -> None:
    run_dir, logits = make_run(tmp_path, model_type)
    output = merge(find_run(run_dir), tmp_path / "merged")
    stored, merged = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", output))
    assert {name: value.shape for name, value in merged.items()} == {
        name: value.shape for name, value in stored.items()
    }
    torch.testing.assert_close(logits_of(output), logits, rtol=1e-4, atol=1e-4)


def applied(stored: dict[str, torch.Tensor], folder: Path, *, pairs: bool) -> dict[str, torch.Tensor]:
    """W + s B A on the tensors of a checkpoint, read as vLLM documents the layout: two matrices a part of an expert."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    adapter = load_file(folder / "adapter_model.safetensors")
    scale = settings["lora_alpha"] / settings["r"]
    weights = dict(stored)
    for name, a in adapter.items():
        if ".lora_A." not in name:
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = scale * adapter[name.replace("lora_A", "lora_B")] @ a
        assert layer.rpartition(".")[2] in settings["target_modules"]
        if f"{layer}.weight" in weights:
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + delta
            continue
        match = re.fullmatch(r"(.*)\.(\d+)\.(gate|up|down)_proj", layer)
        assert match is not None, layer
        index, part = int(match[2]), match[3]
        fused = f"{match[1]}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        whole = weights[fused] = weights[fused].clone()
        if part == "down":
            whole[index] += delta.t()
        else:
            assert pairs
            whole[index][:, 0 if part == "gate" else 1 :: 2] += delta.t()
    return weights


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"expert_rank": "r/top_k"}),
        ("deepseek_v3", {"target_modules": ["down_proj", "q_a_proj"]}),
        ("gpt_oss", {}),
    ],
)
def test_exported_deltas_expert_by_expert_give_the_same_logits(
    model_type: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    run_dir, logits = make_run(tmp_path, model_type, **lora)
    lines = export(find_run(run_dir), "vllm", tmp_path / "vllm")
    assert "--enable-lora --max-lora-rank 4" in lines[0]
    stored = load_file(tmp_path / "base" / "model.safetensors")
    weights = applied(stored, tmp_path / "vllm", pairs=model_type == "gpt_oss")
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(tmp_path / "base"), logits, rtol=1e-4, atol=1e-4)
    names = [name for name in load_file(tmp_path / "vllm" / "adapter_model.safetensors") if ".experts." in name]
    known = {"mixtral": r"block_sparse_moe\.experts\.\d\.w[123]", "gpt_oss": r"mlp\.experts\.\d\.\w+_proj"}
    pattern = known.get(model_type, r"mlp\.experts\.\d\.\w+_proj")
    assert names and all(re.search(rf"layers\.\d\.{pattern}\.lora_[AB]\.weight$", name) for name in names), names[:3]
