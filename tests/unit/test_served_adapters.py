"""Adapters for inference servers: their files reproduce the trained logits; unsupported ones are refused."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.families import save_family
from tests.served import serve
from tests.tiny import make_tokenizer
from tests.unit.test_after_run import make_run
from tests.unit.test_experts import base_of
from tests.unit.test_experts_exported import make_run as make_trained
from tests.unit.test_gguf import make_saved
from trainer.checkpoint.finished_run import attach_adapter, find_run, load_full_base, load_saved_tokenizer
from trainer.commands.export.__main__ import export, main
from trainer.config import RunConfig, UserError
from trainer.model.base import resize_to_vocabulary
from trainer.model.served_layers import list_serving_warnings
from trainer.setup.text_run import read_model_files

FORMS = ("peft", "vllm", "sglang", "gguf-lora")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def name_of(form: str) -> str:
    return "adapter.gguf" if form == "gguf-lora" else "out"


@torch.no_grad()
def assert_served(run: Path, server: str, folder: Path) -> None:
    """Check that the server computes the trained model's logits, and not the base's."""
    found = find_run(run)
    tokenizer = load_saved_tokenizer(found)
    tokens = torch.arange(3, 40)[None]

    def logits(model: Any) -> torch.Tensor:
        return model.eval()(input_ids=tokens, use_cache=False).logits

    base = load_full_base(found, torch.float32)
    resize_to_vocabulary(base, tokenizer)
    before = logits(base)
    if server == "peft":
        served = logits(PeftModel.from_pretrained(deepcopy(base), str(folder)))
    else:
        served = logits(serve(deepcopy(base), server, folder))
    trained = logits(attach_adapter(base, tokenizer, found, in_fp32=True))
    assert (trained - before).abs().max() > 1e-2
    torch.testing.assert_close(served, trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_trained_models_logits(
    form: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / name_of(form)
    assert main([str(run_dir), "--format", form, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    commands = {"vllm": "--max-lora-rank 8", "sglang": "--lora-paths", "gguf-lora": "llama-server"}
    assert commands.get(form, "PeftModel") in said
    assert [path.name for path in tmp_path.iterdir()] == [output.name], "no temporary files remain"
    if form != "gguf-lora":  # by llama.cpp itself: tests/integration
        assert_served(run_dir, form, output)


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("llama", {"rslora": True}),
        ("llama", {"target_modules": ["k_proj", "up_proj", "lm_head"]}),
        ("mistral", {"target_modules": ["q_proj", "down_proj"], "rslora": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("phi3", {}),
    ],
)
def test_scales_parts_and_architectures(model_type: str, lora: dict[str, Any], tmp_path: Path) -> None:
    """SGLang knows no rsLoRA and no q without k and v; phi3 has q, k and v in one layer of its checkpoint."""
    run, _ = make_trained(tmp_path, model_type, base=make_saved(tmp_path / "base", model_type, {}), **lora)
    for form in ("vllm", "sglang"):
        export(find_run(run), form, tmp_path / form)
        assert_served(run, form, tmp_path / form)
    settings = json.loads((tmp_path / "sglang" / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == (16 if lora.get("rslora") else 8) and not settings["use_rslora"]
    names = {name.split(".lora_")[0] for name in load_file(tmp_path / "sglang" / "adapter_model.safetensors")}
    if "q_proj" in " ".join(names):
        assert all(name.replace("q_proj", "v_proj") in names for name in names)


def test_weights_that_are_stored_transposed_are_exported(tmp_path: Path) -> None:
    """GPT-2 stores its weights [in, out]."""
    base = save_family(tmp_path / "model", "gpt2")
    run_dir = make_run(tmp_path, base=base, lora={"target_modules": ["c_attn"]})
    assert main([str(run_dir), "--format", "vllm", "--output", str(tmp_path / "out")]) == 0
    assert_served(run_dir, "vllm", tmp_path / "out")


@pytest.mark.parametrize(
    ("form", "lora", "line"),
    [
        ("vllm", {"dora": True}, "vLLM does not support DoRA"),
        (
            "sglang",
            {"modules_to_save": ["lm_head"]},
            "SGLang only supports A and B of linear layers, but the adapter has lm_head",
        ),
        ("gguf-lora", {"modules_to_save": ["lm_head"]}, "llama.cpp only supports A and B of linear layers"),
    ],
)
def test_what_a_server_does_not_apply_is_refused(form: str, lora: dict[str, Any], line: str, tmp_path: Path) -> None:
    run, _ = make_trained(tmp_path, "llama", base=make_saved(tmp_path / "base", "llama", {}), **lora)
    with pytest.raises(UserError, match=line):
        export(find_run(run), form, tmp_path / name_of(form))
    assert not (tmp_path / name_of(form)).exists()
    export(find_run(run), "peft", tmp_path / "peft")
    assert_served(run, "peft", tmp_path / "peft")


def test_layers_that_a_server_does_not_know_are_refused(tmp_path: Path) -> None:
    run, _ = make_trained(tmp_path, "qwen2_moe")
    for form, server in (("sglang", "SGLang"), ("vllm", "vLLM")):
        with pytest.raises(UserError, match=rf"{server} does not apply .* shared_expert_gate; .*lora\.exclude_modules"):
            export(find_run(run), form, tmp_path / "out")
    with pytest.raises(UserError, match=r"gguf-lora: Qwen2MoeForCausalLM is not supported .*convert_lora_to_gguf"):
        export(find_run(run), "gguf-lora", tmp_path / "adapter.gguf")


@pytest.mark.parametrize(
    ("model_type", "target", "lora", "names"),
    [
        ("qwen2_moe", "vllm", {}, ["shared_expert_gate"]),
        ("qwen3_moe", "vllm", {"target_modules": ["gate", "q_proj"]}, ["gate"]),
        ("mixtral", "vllm", {"target_modules": ["gate", "q_proj"]}, []),
        ("mixtral", "vllm", {"dora": True, "experts": False}, ["lora.dora"]),
        ("mixtral", "sglang", {"target_modules": ["gate", "q_proj"]}, ["gate"]),
        ("mixtral", "llama.cpp", {}, ["experts"]),
        ("mixtral", "ollama", {"modules_to_save": ["lm_head"]}, []),
        ("mixtral", "llama.cpp", {"modules_to_save": ["lm_head"], "experts": False}, ["lora.modules_to_save"]),
        ("qwen2_moe", None, {}, []),
    ],
)
def test_training_warns_of_what_the_target_would_not_apply(
    model_type: str, target: str | None, lora: dict[str, Any], names: list[str]
) -> None:
    values = {"base_model": "b", "output_dir": "o", "dataset": {"path": "d"}, "lora": lora}
    config = RunConfig.model_validate(values | {"export": {"target": target}})
    notes = list_serving_warnings(config.export.target, config.lora, config.model.added_tokens, base_of(model_type))
    assert len(notes) == len(names)
    for note, name in zip(notes, names, strict=True):
        assert note.startswith(f"export.target={target}: ") and name in note


def test_validate_shows_what_the_target_would_not_apply(tmp_path: Path) -> None:
    """Training prints only the notes that begin with `warning: ` to the console; validate prints all."""
    base_of("qwen2_moe").save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    values = {"base_model": str(tmp_path), "output_dir": "o", "dataset": {"path": "d", "max_length": 64}}
    config = RunConfig.model_validate(values | {"export": {"target": "vllm"}})
    (note,) = read_model_files(config).notes
    assert note.startswith("warning: export.target=vllm: vLLM does not apply adapters of shared_expert_gate; set lora.")
    assert note.endswith(", or serve the merged model (zerolora export --format hf)")
