"""The merged model gives the adapter's logits, whatever the adapter is on; and its files are read back."""

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.families import save_family
from tests.unit.test_after_run import make_run
from trainer.checkpoint.finished_run import FinishedRun, find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.atomic_output import check_output
from trainer.commands.export.__main__ import export
from trainer.commands.merge import main
from trainer.commands.merged_model import merge, verify_saved_weights
from trainer.config import UserError
from trainer.model.saved_adapter import parse_scale

CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain", {}, {}),
    ("qlora", {}, {"adapter": "qlora"}),
    ("tied", {"tie_word_embeddings": True}, {}),
    ("tied head", {"tie_word_embeddings": True}, {"lora": {"target_modules": ["q_proj", "lm_head"]}}),
    ("tied embedding", {"tie_word_embeddings": True}, {"lora": {"target_modules": ["q_proj", "embed_tokens"]}}),
    ("grown", {"vocab_size": 327}, {"model": {"added_tokens": ["<tool>"]}}),
]


@pytest.mark.parametrize(("name", "model", "settings"), CASES, ids=[case[0] for case in CASES])
def test_merged_logits_are_the_adapters(
    name: str, model: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    run = find_run(make_run(tmp_path, llama=model, **settings))
    tokenizer = load_saved_tokenizer(run)
    output = merge(run, tmp_path / "merged")
    # In full precision, whatever the run was trained on: a 4-bit base is not what an adapter is merged into.
    full = run.config.model_copy(update={"adapter": "lora"})
    adapted = load_trained_model(FinishedRun(run.folder, run.run_dir, full), tokenizer, CPU)
    merged = AutoModelForCausalLM.from_pretrained(output)
    tokens = torch.randint(len(tokenizer), (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = merged(tokens).logits, adapted(tokens).logits
        with adapted.disable_adapter():
            base = adapted(tokens).logits
    assert (logits - expected).abs().max() < 1e-5
    assert (expected - base).abs().max() > 1e-2, "the adapter does something"
    assert merged.config.use_cache and not list(output.glob("adapter_*"))
    assert len(AutoTokenizer.from_pretrained(output)) == len(tokenizer) <= merged.config.vocab_size


def test_a_part_of_the_update_is_merged(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    assert main([str(run_dir), "--scale", "0.5", "--output", str(tmp_path / "half")]) == 0
    merged = load_file(tmp_path / "half" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    base = load_file(tmp_path / "model" / "model.safetensors")[f"{name}.weight"]
    adapter = load_file(run_dir / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
    torch.testing.assert_close(merged[f"{name}.weight"], base + 0.5 * (8 / 4) * b @ a)


def test_a_16_bit_sum_is_rounded_once(tmp_path: Path) -> None:
    run = find_run(make_run(tmp_path))
    output = merge(run, tmp_path / "merged", dtype="bf16")
    name = "model.layers.1.mlp.up_proj"
    base = load_file(tmp_path / "model" / "model.safetensors")[f"{name}.weight"].bfloat16()
    adapter = load_file(run.folder / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
    scale = 8 / 4  # PEFT's alpha over the run's r
    expected = (base.float() + scale * b @ a).bfloat16()
    assert torch.equal(load_file(output / "model.safetensors")[f"{name}.weight"], expected)


def test_auto_keeps_the_number_format_of_the_base(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    output = merge(find_run(folder, allow_mismatch=True), tmp_path / "merged")
    assert {value.dtype for value in load_file(output / "model.safetensors").values()} == {torch.bfloat16}


def test_weights_beyond_the_format_are_an_error_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path)
    file = folder / "adapter_model.safetensors"
    save_file({name: value * 1e4 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    assert main([str(folder), "--dtype", "fp16"]) == 1
    assert "not finite in torch.float16; merge with --dtype bf16 or fp32" in capsys.readouterr().err
    assert not (folder / "merged").exists() and not list(folder.glob(".writing-*"))
    assert main([str(folder), "--dtype", "bf16"]) == 0


def test_what_the_disk_spoils_is_found(tmp_path: Path) -> None:
    run = find_run(make_run(tmp_path))
    output = merge(run, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(output)
    verify_saved_weights(model, output)
    file = output / "model.safetensors"
    whole = load_file(file)
    spoiled = {name: value + (name == "model.norm.weight") for name, value in whole.items()}
    save_file(spoiled, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight differs from the merged weight"):
        verify_saved_weights(model, output)
    save_file({name: value for name, value in whole.items() if "norm" in name}, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"has [0-9,]+ of the model's [0-9,]+ weights"):
        verify_saved_weights(model, output)


def test_an_empty_folder_is_free_for_output(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main([str(folder), "--output", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_link_to_an_empty_folder_is_free_for_output(tmp_path: Path) -> None:
    folder, link = make_run(tmp_path), tmp_path / "link"
    (tmp_path / "elsewhere" / "empty").mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere" / "empty")
    assert main([str(folder), "--output", str(link)]) == 0
    assert link.is_symlink() and (tmp_path / "elsewhere" / "empty" / "config.json").is_file()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["empty"]


def test_an_empty_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path)
    with pytest.raises(UserError, match=r"is a mount point, which cannot be replaced; use a folder in it"):
        check_output(tmp_path)


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_an_output_without_a_name_is_one_line(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"is not a folder name"):
        check_output(Path(output))


@pytest.mark.parametrize("text", ["x", "", "0", "11", "nan", "auto"])
def test_a_scale_is_a_factor(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a number above 0"):
        parse_scale(text)
    assert parse_scale("0.35") == 0.35


def test_adapters_of_layers_that_share_a_weight_are_not_merged(tmp_path: Path) -> None:
    """Zamba 2 uses the weights of one attention layer at several depths, with an adapter at each."""
    base = save_family(tmp_path / "model", "zamba2")
    run = find_run(make_run(tmp_path, base=base, lora={"target_modules": ["q_proj"]}))
    for command in (lambda output: merge(run, output), lambda output: export(run, "vllm", output)):
        with pytest.raises(
            UserError,
            match=r"layers\.1\..*q_proj and .*layers\.3\..*q_proj share a weight",
        ):
            command(tmp_path / "output")
        assert not (tmp_path / "output").exists()


def test_a_configuration_that_does_not_say_whether_the_head_is_tied_is_merged(tmp_path: Path) -> None:
    base = save_family(tmp_path / "model", "inkling_text")
    run = find_run(make_run(tmp_path, base=base, lora={"target_modules": ["q_proj"]}))
    stored, merged = (load_file(each / "model.safetensors") for each in (base, merge(run, tmp_path / "merged")))
    changed = {name for name, value in merged.items() if not torch.equal(value, stored[name])}
    assert merged.keys() == stored.keys() and changed == {name for name in stored if name.endswith("q_proj.weight")}
