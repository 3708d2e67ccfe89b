"""Files written for other programs: they have the mode of new files, and transformers 4 and 5 load the tokenizer."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import CHATML, make_model, make_tokenizer
from tests.unit.test_after_run import make_run
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer
from trainer.checkpoint.weights import save_initial_adapter, write_full_model
from trainer.commands import merge
from trainer.commands.export.__main__ import export
from trainer.commands.push import stage_files
from trainer.config import LoraSection, ModelSection
from trainer.contract.whole_files import apply_umask
from trainer.data.demo_data import build_once
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_tokenizer
from trainer.model.tokenizer_files import read_tokenizer_files, write_files
from trainer.tasks.images.files import DIFFUSERS_FILE, write_for_diffusers


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(params=[0o022, 0o027])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask; return the mode of a new file."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(path: Path) -> set[int]:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    assert files
    return {file.stat().st_mode & 0o777 for file in files}


@pytest.mark.parametrize("form", ["peft", "vllm", "sglang", "gguf-lora", "hf"])
def test_exported_files_have_the_mode_of_new_files(form: str, mode: int, run_dir: Path, tmp_path: Path) -> None:
    export(find_run(run_dir), form, tmp_path / "out")
    assert modes(tmp_path / "out") == {mode}


def test_whole_models_and_initial_adapters_have_the_mode_of_new_files(mode: int, run_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run_dir.parent / "model")
    write_full_model(model, dict(model.state_dict()), tmp_path / "whole")
    save_initial_adapter(apply_adapter(model, LoraSection(), torch.float32), tmp_path / "initial", is_main=True)
    assert modes(tmp_path) == {mode}


def test_image_adapters_have_the_mode_of_new_files(mode: int, run_dir: Path, tmp_path: Path) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    write_for_diffusers(tmp_path)
    assert modes(tmp_path / DIFFUSERS_FILE) == {mode}


def test_a_shared_cache_can_be_read_by_others(mode: int, tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        make_model(folder)

    build_once(tmp_path / "model", make)
    assert modes(tmp_path / "model") == {mode}
    assert (tmp_path / "model").stat().st_mode & 0o777 == (0o755 if mode == 0o644 else 0o750)


def test_apply_umask_leaves_what_links_lead_to(mode: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch(0o600)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(target)
    apply_umask(tmp_path / "folder")
    assert target.stat().st_mode & 0o777 == 0o600


def loaded(files: dict[str, bytes], folder: Path) -> Any:
    folder.mkdir()
    write_files(files, folder)
    return AutoTokenizer.from_pretrained(folder)


def store_as_published(base: Path) -> dict[str, bytes]:
    """Write what transformers 4 wrote of a tokenizer; return the files by name."""
    make_tokenizer(base)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 2048}
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML}))
    (base / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}\n')
    (base / "chat_template.jinja").unlink()
    return {file.name: file.read_bytes() for file in base.iterdir()}


def test_an_unchanged_tokenizer_keeps_the_files_of_its_base(tmp_path: Path) -> None:
    stored = store_as_published(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), ModelSection())
    assert tokenizer.pad_token == "<|endoftext|>", "chosen at loading, as it is when the files are read again"
    assert read_tokenizer_files(tokenizer) == stored


def test_files_are_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--me--tiny"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    stored = store_as_published(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", tmp_path)
    tokenizer = load_tokenizer(str(snapshot), ModelSection())
    tokenizer.name_or_path = "me/tiny"
    assert read_tokenizer_files(tokenizer, revision="v2") == stored
    assert read_tokenizer_files(tokenizer) != stored, "another revision"


@pytest.mark.parametrize("change", ["tokens", "template", "padding", "nothing"])
def test_what_is_saved_anew_is_the_tokenizer_and_names_a_class_of_both_majors(change: str, tmp_path: Path) -> None:
    """make_tokenizer saves as transformers 5 does: TokenizersBackend."""
    base = tmp_path / "base"
    base.mkdir()
    make_tokenizer(base)
    assert "TokenizersBackend" in (base / "tokenizer_config.json").read_text()
    changes: dict[str, dict[str, Any]] = {
        "tokens": {"added_tokens": ("<a1>",)},
        "padding": {"pad_token": "<|im_start|>"},
    }
    tokenizer = load_tokenizer(str(base), ModelSection(**changes.get(change, {})))
    if change == "template":
        tokenizer.chat_template = CHATML + "\n"
    if change == "tokens":
        tokenizer.add_special_tokens({"extra_special_tokens": ["<s1>"]})
    files = read_tokenizer_files(tokenizer)
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"extra_special_tokens", "is_local", "name_or_path"} & set(settings)
    again = loaded(files, tmp_path / "again")
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.all_special_tokens == tokenizer.all_special_tokens


def test_a_tokenizer_whose_class_only_config_json_names_is_saved_in_full(tmp_path: Path) -> None:
    """Its files alone, as an adapter's folder has them, would be read as another class."""
    base = make_model(tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": None}))
    tokenizer = load_tokenizer(str(base), ModelSection())
    again = loaded(read_tokenizer_files(tokenizer), tmp_path / "again")
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_every_writer_keeps_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    run = make_run(tmp_path, base=make_model(tmp_path / "model"))
    stored = store_as_published(tmp_path / "published") if (tmp_path / "published").mkdir() is None else {}
    for file in run.glob("*tok*"):
        file.unlink()
    (run / "chat_template.jinja").unlink()
    write_files(stored, run)
    (tmp_path / "staged").mkdir()
    stage_files(find_run(run), "me/tiny", tmp_path / "staged")
    export(find_run(run), "peft", tmp_path / "peft")
    merge.main([str(run), "--output", str(tmp_path / "merged")])
    for folder in ("staged", "peft", "merged"):
        assert {name: (tmp_path / folder / name).read_bytes() for name in stored} == stored, folder
        assert not (tmp_path / folder / "chat_template.jinja").exists()
    assert load_saved_tokenizer(find_run(run)).chat_template == CHATML
