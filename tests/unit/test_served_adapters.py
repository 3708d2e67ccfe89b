"""Adapters for inference servers: their files reproduce the trained logits; unsupported ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import save_family
from tests.tiny import make_tokenizer
from tests.unit.test_after_run import make_run
from tests.unit.test_experts import base_of
from tests.unit.test_experts_exported import make_run as make_trained
from tests.unit.test_gguf import make_saved
from trainer.checkpoint.finished_run import find_run, saved_tokenizer
from trainer.commands.export import verify as verify_module
from trainer.commands.export.__main__ import export, main
from trainer.commands.export.verify import verify
from trainer.config import RunConfig, UserError
from trainer.model.served_layers import serving_notes
from trainer.setup.preflight import read_model_files

Tensors = dict[str, torch.Tensor]
FORMS = ("peft", "vllm", "sglang", "gguf-lora")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def name_of(form: str) -> str:
    return "adapter.gguf" if form == "gguf-lora" else "out"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_trained_models_logits(
    form: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_module, "find_spec", lambda name: None)  # llama.cpp itself: tests/integration
    output = tmp_path / name_of(form)
    assert main([str(run_dir), "--format", form, "--verify", "--output", str(output)]) == 0
    said = capsys.readouterr().out
    by = {"peft": "PEFT", "vllm": "the rules of vLLM", "sglang": "the rules of SGLang"}
    assert f"verified by {by.get(form, 'the rules of llama.cpp')}: on 16 prompts logits differ by" in said
    commands = {"vllm": "--max-lora-rank 8", "sglang": "--lora-paths", "gguf-lora": "llama-server"}
    assert commands.get(form, "PeftModel") in said
    assert [path.name for path in tmp_path.iterdir()] == [output.name], "no temporary files remain"


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
def test_scales_parts_and_architectures(
    model_type: str, lora: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang knows no rsLoRA and no q without k and v; phi3 has q, k and v in one layer of its checkpoint."""
    monkeypatch.setattr(verify_module, "find_spec", lambda name: None)
    run, _ = make_trained(tmp_path, model_type, base=make_saved(tmp_path / "base", model_type, {}), **lora)
    for form in FORMS if model_type != "phi3" else FORMS[:3]:
        assert export(find_run(run), form, tmp_path / form, verified=True)[0].startswith("verified by ")
    settings = json.loads((tmp_path / "sglang" / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == (16 if lora.get("rslora") else 8) and not settings["use_rslora"]
    names = {name.split(".lora_")[0] for name in load_file(tmp_path / "sglang" / "adapter_model.safetensors")}
    if "q_proj" in " ".join(names):
        assert all(name.replace("q_proj", "v_proj") in names for name in names)


def change(run: Path, tensors: Tensors, settings: dict[str, Any]) -> None:
    save_file(tensors, run / "adapter_model.safetensors")
    (run / "adapter_config.json").write_text(json.dumps(settings))


def twice_the_scale(tensors: Tensors, settings: dict[str, Any]) -> None:
    settings["lora_alpha"] *= 2


def one_layer_missing(tensors: Tensors, settings: dict[str, Any]) -> None:
    for end in ("lora_A", "lora_B"):
        tensors[f"base_model.model.model.layers.1.mlp.down_proj.{end}.weight"].zero_()


def gate_for_up(tensors: Tensors, settings: dict[str, Any]) -> None:
    first, second = (f"base_model.model.model.layers.0.mlp.{name}_proj.lora_B.weight" for name in ("gate", "up"))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def transposed(tensors: Tensors, settings: dict[str, Any]) -> None:
    a, b = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{end}.weight" for end in "AB")
    tensors[a], tensors[b] = tensors[b].T.contiguous(), tensors[a].T.contiguous()


def only_a_part(tensors: Tensors, settings: dict[str, Any]) -> None:
    for name in [name for name in tensors if "k_proj" in name]:
        del tensors[name]


def unknown_layer(tensors: Tensors, settings: dict[str, Any]) -> None:
    for end in ("lora_A", "lora_B"):
        tensors[f"base_model.model.model.layers.7.mlp.down_proj.{end}.weight"] = tensors.pop(
            f"base_model.model.model.layers.1.mlp.down_proj.{end}.weight"
        )


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (twice_the_scale, "not what was trained"),
        (one_layer_missing, "not what was trained"),
        (gate_for_up, "not what was trained"),
        (transposed, "not what was trained"),
        (only_a_part, r"SGLang stacks it with .*k_proj"),
        (unknown_layer, "the base has no such layer"),
    ],
)
def test_a_mistake_in_the_files_is_found(
    mistake: Callable[[Tensors, dict[str, Any]], None], line: str, run_dir: Path, tmp_path: Path
) -> None:
    run = find_run(run_dir)
    export(run, "sglang", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    mistake(tensors, settings)
    change(tmp_path / "out", tensors, settings)
    with pytest.raises(RuntimeError, match=line):
        verify(run, "sglang", tmp_path / "out", saved_tokenizer(run))


def test_weights_that_are_stored_transposed_are_verified(tmp_path: Path) -> None:
    """GPT-2 stores its weights [in, out]."""
    base = save_family(tmp_path / "model", "gpt2")
    run_dir = make_run(tmp_path, base=base, lora={"target_modules": ["c_attn"]})
    assert main([str(run_dir), "--format", "vllm", "--verify", "--output", str(tmp_path / "out")]) == 0


def test_an_adapter_that_changes_nothing_proves_nothing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    tensors = load_file(run_dir / "adapter_model.safetensors")
    save_file({name: 1e-4 * value for name, value in tensors.items()}, run_dir / "adapter_model.safetensors")
    assert main([str(run_dir), "--format", "vllm", "--verify", "--output", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "lora", "line"),
    [
        ("vllm", {"dora": True}, "vLLM does not support DoRA"),
        (
            "sglang",
            {"modules_to_save": ["lm_head"]},
            "SGLang only supports A and B of linear layers, and the adapter has lm_head",
        ),
        ("gguf-lora", {"modules_to_save": ["lm_head"]}, "llama.cpp only supports A and B of linear layers"),
    ],
)
def test_what_a_server_does_not_apply_is_refused(form: str, lora: dict[str, Any], line: str, tmp_path: Path) -> None:
    run, _ = make_trained(tmp_path, "llama", base=make_saved(tmp_path / "base", "llama", {}), **lora)
    with pytest.raises(UserError, match=line):
        export(find_run(run), form, tmp_path / name_of(form))
    assert not (tmp_path / name_of(form)).exists()
    assert export(find_run(run), "peft", tmp_path / "peft", verified=True)[0].startswith("verified by PEFT")


def test_layers_that_a_server_does_not_know_are_refused(tmp_path: Path) -> None:
    run, _ = make_trained(tmp_path, "qwen2_moe")
    for form, server in (("sglang", "SGLang"), ("vllm", "vLLM")):
        with pytest.raises(UserError, match=rf"{server} does not apply .* shared_expert_gate; .*lora\.exclude_modules"):
            export(find_run(run), form, tmp_path / "out")
    with pytest.raises(UserError, match=r"gguf-lora: Qwen2MoeForCausalLM is not one of .*convert_lora_to_gguf"):
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
    notes = serving_notes(RunConfig.model_validate(values | {"export": {"target": target}}), base_of(model_type))
    assert len(notes) == len(names)
    for note, name in zip(notes, names, strict=True):
        assert note.startswith(f"export.target={target}: ") and name in note


def test_validate_shows_what_the_target_would_not_apply(tmp_path: Path) -> None:
    """The notes of `read_model_files` are printed by validate and at the start of training."""
    base_of("qwen2_moe").save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    values = {"base_model": str(tmp_path), "output_dir": "o", "dataset": {"path": "d", "max_length": 64}}
    config = RunConfig.model_validate(values | {"export": {"target": "vllm"}})
    assert any("shared_expert_gate" in note for note in read_model_files(config).notes)


def test_llama_cpps_own_converter_reads_what_vllm_does(run_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "convert_lora_to_gguf.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[sys.argv.index('--outfile') + 1])\n"
        "assert not json.loads((folder / 'adapter_config.json').read_text())['use_rslora']\n"
        "assert (pathlib.Path(sys.argv[sys.argv.index('--base') + 1]) / 'config.json').is_file()\n"
        "out.write_bytes(b'GGUF')\n"
    )
    lines = export(find_run(run_dir), "gguf-lora", tmp_path / "a.gguf", converter=script)
    assert f"written by {script}" in lines[0] and (tmp_path / "a.gguf").read_bytes() == b"GGUF"
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(RuntimeError, match=r"convert_lora_to_gguf\.py ended with exit code 1: no such model"):
        export(find_run(run_dir), "gguf-lora", tmp_path / "b.gguf", converter=script)


def test_verify_is_for_adapters(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--format", "hf", "--verify", "--output", str(tmp_path / "out")]) == 2
    assert "--verify: is for adapters (peft, vllm, sglang, gguf-lora), not for --format hf" in capsys.readouterr().err


def test_verify_refuses_a_host_without_memory(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Full)
    with pytest.raises(UserError, match=r"--verify: keeps 3 copies of the model in 32 bits, 0\.0 GiB"):
        export(find_run(run_dir), "vllm", tmp_path / "out", verified=True)
