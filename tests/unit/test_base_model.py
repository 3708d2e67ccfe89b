"""What is named as `base_model` and cannot be trained on: each case its own true line, before any weight is loaded."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.distributed.conftest import ROOT
from tests.families import save_family, tiny_config
from tests.tiny import make_model
from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.model.base import build_empty_model, check_weights, load_base_model, load_model_config, load_tokenizer
from trainer.model.model_kind import NOT_CAUSAL, check_kind

Change = Callable[[Path], object]
UP = "model.layers.1.mlp.up_proj.weight"


def settings(**changes: Any) -> Change:
    """Change config.json; a value of None removes the key."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        new = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in new.items() if value is not None}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Change what is in model.safetensors."""

    def changed(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return changed


def written(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def removed(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def sharded(change: Change) -> Change:
    """Three files and an index, then a change."""

    def changed(folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="150KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
        change(folder)

    return changed


def pickled(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "model.safetensors")


def as_folder(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def quantised(method: str, **more: Any) -> Change:
    return settings(quantization_config={"quant_method": method, **more})


BROKEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    # weights against config.json
    "more layers": (
        settings(num_hidden_layers=5),
        ("27 of the 48 weights", "for LlamaForCausalLM are missing", "(first: model.layers.2.", "would be random"),
    ),
    "fewer layers": (settings(num_hidden_layers=1), ("1 layers in model.layers, but the files have 1 more",)),
    "vocabulary": (
        settings(vocab_size=500),
        ("2 of 21 weights do not match config.json (first: lm_head.weight has shape (384, 64)", "says (500, 64)"),
    ),
    "hidden size": (settings(hidden_size=32, head_dim=16), ("weights do not match config.json",)),
    "untied": (tensors(lambda stored: stored.pop("lm_head.weight")), ("1 of the 21", "(first: lm_head.weight)")),
    "one tensor": (tensors(lambda stored: stored.pop(UP)), ("1 of the 21 weights", f"(first: {UP})")),
    "one shape": (
        tensors(lambda stored: stored.update({UP: torch.ones(3, 4)})),
        (f"1 of 21 weights do not match config.json (first: {UP} has shape (3, 4)", "says (128, 64)"),
    ),
    "another family": (settings(model_type="gpt2", architectures=["GPT2LMHeadModel"]), ("would be random",)),
    # the files
    "no weights": (removed("model.safetensors"), ("no .safetensors file; convert",)),
    "truncated": (cut("model.safetensors", 9000), ("model.safetensors is truncated",)),
    "cut in the header": (cut("model.safetensors", 500), ("model.safetensors is truncated", "copy it again")),
    "empty": (
        cut("model.safetensors", 0),
        ("model.safetensors is empty, or only a Git LFS pointer; download or copy it again",),
    ),
    "pickled": (pickled, ("model.safetensors is a pickle file",)),
    "git-lfs": (written("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), ("`git lfs pull`",)),
    "web page": (written("model.safetensors", "<!doctype html>" * 9), ("model.safetensors is a web page",)),
    "gguf": (written("model.safetensors", b"GGUF" + bytes(99)), ("model.safetensors is a GGUF file",)),
    "a folder": (as_folder("model.safetensors"), ("model.safetensors is a folder",)),
    "other name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "weights.safetensors"),
        ("has weights.safetensors, but neither model.safetensors nor model.safetensors.index.json",),
    ),
    "a shard": (
        sharded(lambda folder: sorted(folder.glob("model-*"))[-1].unlink()),
        (" is listed in model.safetensors.index.json, but missing (1 of ", "download or copy the model again"),
    ),
    "a cut shard": (
        sharded(lambda folder: cut(sorted(folder.glob("model-*"))[1].name, 2000)(folder)),
        ("model-00002-of-", "is truncated"),
    ),
    "index": (sharded(written("model.safetensors.index.json", "{")), ("index.json is not JSON (",)),
    "index of nothing": (sharded(written("model.safetensors.index.json", "[]")), ("index.json must be a mapping",)),
    "index lost": (sharded(removed("model.safetensors.index.json")), ("neither model.safetensors nor",)),
    # config.json
    "no config.json": (removed("config.json"), ("has no config.json",)),
    "config cut": (cut("config.json", 40), ("config.json: is not JSON (line ",)),
    "config empty": (cut("config.json", 0), ("config.json: is not JSON (line 1",)),
    "config of bytes": (written("config.json", b"\xff\xfe\x00"), ("config.json: line 1: byte 0xff is not UTF-8",)),
    "config nested": (written("config.json", "[" * 100_000), ("config.json: is nested too deeply",)),
    "config a list": (written("config.json", "[]"), ("config.json: must be a mapping",)),
    "no model_type": (settings(model_type=None), ("config.json has no model_type",)),
    "unknown model_type": (settings(model_type="llama9"), ("has model_type llama9, which transformers 5.",)),
    "heads": (settings(num_attention_heads=5), ("config.json is unusable (",)),
    **{
        f"{key}={value}": (settings(**{key: value}), (f"config.json: {key}={value}: {problem}",))
        for key, value, problem in (
            ("num_attention_heads", 0, "must be above 0"),
            ("head_dim", -16, "must be 0 or more"),
            ("vocab_size", 384.0, "must be a whole number"),
            ("rms_norm_eps", -1.0, "must be above 0"),
            ("attention_dropout", 2.0, "must be below 1"),
            ("torch_dtype", 16, "must be a string"),
        )
    },
    "part of another type": (settings(text_config={"hidden_size": -1}), ("config.json: text_config.hidden_size=-1: ",)),
    "rope": (
        settings(rope_parameters={"rope_theta": 0}),
        ("config.json: rope_parameters.rope_theta=0: must be above",),
    ),
    "padding of another type": (settings(pad_token_id="0"), ('config.json: pad_token_id="0": must be a whole number',)),
    "mlp_bias": (settings(mlp_bias="no"), ('(mlp_bias="no": must be of type bool)',)),
    "use_cache": (settings(use_cache=5), ("(use_cache=5: must be of type bool)",)),
    "initializer_range": (
        settings(initializer_range=-0.02),
        ("(initializer_range=-0.02: Value must be greater or equal to 0.0 and",),
    ),
    "odd head": (
        settings(head_dim=15),
        ("is unusable (RoPE requires an even rotary dimension, but got `head_dim`=15",),
    ),
    "padding": (settings(pad_token_id=999), ("config.json: pad_token_id=999: must be below vocab_size=",)),
    "a rope without a key": (
        settings(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        ("unusable (Missing required keys", "'factor'"),
    ),
    # generation_config.json
    **{
        f"generate {key}={value}": (
            written("generation_config.json", json.dumps({key: value})),
            ("generation_config.json: ", key, str(value), fix),
        )
        for key, value, fix in (
            ("num_return_sequences", 3, "different than 1 (got 3); fix this key"),
            ("num_beams", 0, "=0: must be above 0"),
            ("temperature", "hot", '="hot": must be a number'),
            ("top_p", 5.0, "=5.0: must be 1 or less"),
            ("max_new_tokens", 0, "must be greater than 0, but is 0; fix this key"),
            ("cache_implementation", "statik", "Choose one of: ("),
        )
    },
    "a text for a number": (
        settings(num_hidden_layers="two"),
        ('config.json: num_hidden_layers="two": must be a whole number',),
    ),
    "adapter next to it": (
        written("adapter_config.json", "{}"),
        ("also contains an adapter", "move adapter_config.json"),
    ),
    # other models
    "t5": (settings(model_type="t5", is_encoder_decoder=True), ("an encoder-decoder model (t5)",)),
    "bert": (settings(model_type="bert", architectures=None), ("bert uses bidirectional attention",)),
    "masked": (settings(architectures=["RobertaForMaskedLM"]), ("RobertaForMaskedLM in config.json does not predict",)),
    "classifier": (settings(architectures=["LlamaForSequenceClassification"]), ("does not predict the next token",)),
    "vision": (settings(model_type="vit"), ("transformers has no causal language model of model_type vit",)),
    # quantised
    "bnb": (quantised("bitsandbytes", load_in_4bit=True), ("already quantized (bitsandbytes)", "full-precision")),
    "gptq": (quantised("gptq", bits=4), ("config.json says GPTQ, but no tensor is in that format",)),
    "gptq rules": (quantised("gptq", bits=4, dynamic=[1]), ("config.json: quantization_config.dynamic",)),
    "awq": (quantised("awq", bits=4), ("config.json says AWQ, but no tensor is in that format",)),
    "awq groups": (quantised("awq", bits=4, group_size="x"), ("config.json: quantization_config.group_size",)),
    "odd groups": (
        quantised("compressed-tensors", config_groups={"g": {"weights": {"num_bits": 4, "group_size": "x"}}}),
        ("with 4-bit None weights (strategy None, group_size 0), but the only supported",),
    ),
    "fp8": (quantised("fp8"), ("config.json says FP8, but no tensor", "remove quantization_config")),
    "mxfp4": (
        quantised("mxfp4"),
        ("config.json says mxfp4, but no tensor", "remove quantization_config"),
    ),
    "compressed": (
        quantised("compressed-tensors", format="float-quantized"),
        ("already quantized (compressed-tensors, float-quantized)", "full-precision"),
    ),
    # the tokenizer
    "no tokenizer": (
        removed("tokenizer.json", "tokenizer_config.json"),
        ("the folder has no tokenizer (tokenizer.js",),
    ),
    "half a tokenizer": (removed("tokenizer.json"), ("the folder has no tokenizer (tokenizer.json",)),
    "tokenizer cut": (cut("tokenizer.json", 3000), ("tokenizer.json: is not JSON (line ",)),
    "tokenizer of nothing": (written("tokenizer.json", "{}"), ("its tokenizer cannot be read (",)),
    "a length in words": (
        written("tokenizer_config.json", '{"model_max_length": "x"}'),
        ('tokenizer_config.json: model_max_length="x": must be a number',),
    ),
    "special tokens": (written("special_tokens_map.json", "{"), ("special_tokens_map.json: is not JSON (line 1",)),
    "added tokens": (written("added_tokens.json", "[1]"), ("added_tokens.json: must be a mapping",)),
    "tokenizer settings": (written("tokenizer_config.json", "{"), ("tokenizer_config.json: is not JSON (line 1",)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model")


def test_models_that_see_later_tokens_are_refused_by_their_type() -> None:
    """The table of families was measured with the probe of loaded models; `validate` does not load any."""
    table = yaml.safe_load((ROOT / "docs/lab/data/families.yaml").read_text())["families"]
    kinds = {kind for kind, cells in table.items() if "attend to later tokens" in cells["lora"]}
    assert kinds == set(NOT_CAUSAL)
    for kind in kinds:
        with pytest.raises(UserError, match="tokens attend to later tokens, so there is nothing to predict"):
            check_kind("m", tiny_config(kind))


def check(name: str) -> list[str]:
    """As trainer/setup/preflight.py does it."""
    section = ModelSection()
    config = load_model_config(name, section)
    check_kind(name, config)
    notes = check_weights(name, section, config)
    load_tokenizer(name, section)
    return notes


@pytest.mark.parametrize(("kind", "problem"), [("blip-2", "pixel_values"), ("diffusion_gemma", "token by token")])
def test_models_that_need_more_than_tokens_are_refused_by_their_class(kind: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"base_model=m: .*{problem}.*use a causal language model"):
        check_kind("m", tiny_config(kind))


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_line(case: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, fragments = BROKEN[case]
    shutil.copytree(model, tmp_path / "m")
    change(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        check("m")
    line = str(refused.value)
    assert line.startswith("base_model=m: ") and "\n" not in line and len(line) < 500
    assert [fragment for fragment in fragments if fragment not in line] == [], line


def test_a_good_folder_has_nothing_said_of_it(model: Path, tmp_path: Path) -> None:
    assert check(str(model)) == []
    shutil.copytree(model, tmp_path / "m")
    sharded(lambda folder: None)(tmp_path / "m")
    assert len(list((tmp_path / "m").glob("model-*"))) > 2
    assert check(str(tmp_path / "m")) == []


def test_nothing_but_the_headers_is_read(model: Path, tmp_path: Path) -> None:
    """A sparse file of 8 TiB by its header takes no longer."""
    shutil.copytree(model, tmp_path / "m")
    entries: dict[str, dict[str, Any]] = {
        name: {"dtype": "F32", "shape": list(value.shape), "data_offsets": [0, 0]}
        for name, value in load_file(model / "model.safetensors").items()
    }
    end = 0
    for entry in entries.values():
        begin, end = end, end + 4 * int(torch.Size(entry["shape"]).numel())
        entry["data_offsets"] = [begin, end]
    header = json.dumps(entries).encode()
    with (tmp_path / "m" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    assert check(str(tmp_path / "m")) == []


NAMES: dict[str, tuple[str, ...]] = {
    "https://huggingface.co/Qwen/Qwen2.5-7B": ("is a URL; write base_model: Qwen/Qwen2.5-7B",),
    "hf://Qwen/Qwen2.5-7B": ("is a URL; write base_model: Qwen/Qwen2.5-7B",),
    "huggingface.co/Qwen/Qwen2.5-7B/tree/main": ("; write base_model: Qwen/Qwen2.5-7B",),
    "Qwen/Qwen2.5-7B/": ("; write base_model: Qwen/Qwen2.5-7B",),
    "Qwen\\Qwen2.5-7B": ("; write base_model: Qwen/Qwen2.5-7B",),
    "Qwen/Qwen2.5-7B@main": ("; write base_model: Qwen/Qwen2.5-7B, and the revision in model.revision",),
    "./adaptr": ("; did you mean adapter?",),
    "https://example.org": ("is a URL; use OWNER/NAME on the Hub",),
    "m/model.safetensors": ("is a file; use the folder",),
    "/models/missing": ("no such folder (/",),
    "./missing": ("no such folder (",),
    "missing.safetensors": ("no such file",),
    "a/b/c": ("no such folder (",),
    "missing/": ("no such folder (",),
    "two words": ("no such folder (",),
    "x" * 300: ("contains a name of 300 bytes; use at most 255",),
    "nobody/nothing": ("not a local folder, not in the Hub's cache, and HF_HUB_OFFLINE is set; run `hf download",),
    "parent": ("has no config.json, but its subfolder m has one; use parent/m",),
    "adapter": ("contains only an adapter; set base_model: some/base, and lora.adapter_path: adapter",),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_something_else_is_one_line(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(model, tmp_path / "m")
    shutil.copytree(model, tmp_path / "parent" / "m")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "some/base"}'
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        check(name)
    line = str(refused.value)
    assert line.startswith("base_model=") and "\n" not in line
    assert [fragment for fragment in NAMES[name] if fragment not in line] == [], line


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors", "tokenizer.json"])
def test_what_may_not_be_read_is_named(name: str, model: Path) -> None:
    """As another user where this one is root, who may read everything."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)  # pytest's own folders are closed to other users
        folder = Path(place) / "m"
        shutil.copytree(model, folder)
        assert check(str(folder)) == []
        for file in folder.iterdir():
            file.chmod(0o644)
        (folder / name).chmod(0)
        user = os.geteuid()
        try:
            os.seteuid(user or 65534)
            with pytest.raises(UserError, match=r"permission|Permission") as refused:
                check(str(folder))
        finally:
            os.seteuid(user)
    assert name in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma3_text"])
def test_a_tokenizer_made_of_nothing_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    """For some models transformers makes one without a vocabulary where there is no file."""
    shutil.copytree(model, tmp_path / "m")
    settings(model_type=kind)(tmp_path / "m")
    removed("tokenizer.json", "tokenizer_config.json")(tmp_path / "m")
    with pytest.raises(UserError, match="the folder has no tokenizer"):
        load_tokenizer(str(tmp_path / "m"), ModelSection())


def test_weights_that_are_missing_are_not_drawn_when_a_model_is_loaded_either(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    settings(num_hidden_layers=5)(tmp_path / "m")
    with pytest.raises(UserError, match="would be random"):
        load_base_model(
            str(tmp_path / "m"), ModelSection(), dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
        )


def test_a_streamed_model_generates_like_a_loaded_one(tmp_path: Path) -> None:
    """It follows generation_config.json, on which lm-eval's scores depend: Qwen's penalizes repetition."""
    folder = make_model(tmp_path / "model")
    kept = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(kept | {"repetition_penalty": 1.75}))
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "attention": "eager"}
    whole = load_base_model(str(folder), ModelSection(), **cpu)
    pieces = load_base_model(str(folder), ModelSection(), quantization=QuantizationSection(), **cpu)
    assert pieces.generation_config.repetition_penalty == whole.generation_config.repetition_penalty == 1.75
    assert pieces.generation_config == whole.generation_config


def test_a_streamed_4_bit_model_says_so_to_peft(tmp_path: Path) -> None:
    """PEFT and transformers read these attributes, as bitsandbytes' own loading sets them."""
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "attention": "eager"}
    folder = str(make_model(tmp_path / "model"))
    model = load_base_model(folder, ModelSection(), quantization=QuantizationSection(), **cpu)
    assert model.quantization_method == "bitsandbytes" and model.is_quantized and model.is_loaded_in_4bit


def test_weights_that_a_model_changes_in_place_stay_in_16_bits(tmp_path: Path) -> None:
    """Gemma 3n clips some of its weights in each step of training, which packed ones do not allow."""
    folder = save_family(tmp_path, "gemma3n_text", altup_coef_clip=1.0)
    cpu: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "attention": None}
    model = load_base_model(str(folder), ModelSection(), quantization=QuantizationSection(), **cpu)
    packed = {name.rpartition(".")[0] for name, each in model.named_parameters() if each.dtype == torch.uint8}
    assert packed and not any("_coefs" in name for name in packed)
    assert model.train()(input_ids=torch.arange(3, 9)[None]).logits.isfinite().all()


def test_a_package_that_a_model_needs_is_named(tmp_path: Path) -> None:
    tiny_config("gemma3n").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^base_model=.*: TimmWrapperModel requires the timm library; install it"):
        build_empty_model(load_model_config(str(tmp_path), ModelSection()), ModelSection())
