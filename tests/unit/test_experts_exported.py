"""What becomes of adapted experts: merged into the checkpoint's own layout, and exported expert by expert."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.served import serve
from tests.tiny import make_tokenizer, record_base
from tests.unit.test_experts import base_of, saved
from trainer.checkpoint.finished_run import find_run
from trainer.commands.export.__main__ import export
from trainer.commands.merged_model import merge
from trainer.config import RunConfig, UserError
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_tokenizer

IDS = torch.arange(3, 40)[None]


def make_run(folder: Path, model_type: str, *, base: Path | None = None, **lora: Any) -> tuple[Path, torch.Tensor]:
    """A run as training leaves it, with a drawn adapter, and its logits; the base is made if there is none."""
    if base is None:
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
    record_base(run_dir, config)
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


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid", "laguna"])
def test_merged_experts_are_stored_as_the_checkpoint_stores_them(model_type: str, tmp_path: Path) -> None:
    run_dir, logits = make_run(tmp_path, model_type)
    output = merge(find_run(run_dir), tmp_path / "merged")
    stored, merged = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", output))
    assert {name: value.shape for name, value in merged.items()} == {
        name: value.shape for name, value in stored.items()
    }
    torch.testing.assert_close(logits_of(output), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("mixtral", {"rslora": True}),
        ("qwen3_moe", {"expert_rank": "r/top_k"}),
        ("deepseek_v3", {"target_modules": ["down_proj", "q_a_proj"]}),
        ("gpt_oss", {}),
        ("llama4_text", {}),
        ("laguna", {"exclude_modules": ["g_proj"]}),
    ],
)
def test_what_servers_read_expert_by_expert_gives_the_same_logits(
    model_type: str, lora: dict[str, Any], form: str, tmp_path: Path
) -> None:
    run_dir, logits = make_run(tmp_path, model_type, **lora)
    [command] = export(find_run(run_dir), form, tmp_path / "out")
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
        served = serve(base, form, tmp_path / "out")(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(served, logits, rtol=1e-4, atol=1e-4)
    assert ("--enable-mixed-moe-lora-format" in command) is (form == "vllm")
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = [name for name in stored if ".experts." in name]
    known = {"mixtral": r"block_sparse_moe\.experts\.\d\.w[123]", "llama4_text": r"feed_forward\.experts\.\d\.\w+_proj"}
    pattern = known.get(model_type, r"mlp\.experts\.\d\.\w+_proj")
    if (model_type, form) == ("gpt_oss", "vllm"):
        pattern = r"mlp\.experts\.\d\.w[123]"
    pattern = pattern.replace("w[123]", r"\w+_proj") if form == "sglang" else pattern
    assert names and all(re.search(rf"layers\.\d\.{pattern}\.lora_[AB]\.weight$", name) for name in names), names[:3]
    parts = {name.split(".experts.")[1].split(".")[1] for name in names}
    assert len(parts) == 3, "servers take all parts of an expert or none"
    ranks = {len(value) for name, value in stored.items() if ".lora_A." in name}
    assert ranks == ({2, 4} if form == "vllm" and "expert_rank" in lora else {4})


def test_experts_under_a_name_that_no_server_knows_are_refused(tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path, "granitemoehybrid")
    with pytest.raises(UserError, match=r"input_linear\.weight: this is not a known name for expert weights"):
        export(find_run(run_dir), "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
