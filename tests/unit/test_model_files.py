"""Files of a model's folder that somebody else wrote, or damaged: one line that names the file and the value."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.eight_bits import store_in_fp8
from tests.families import FAMILIES, tiny_config
from tests.runs_in_process import make_ground, train
from trainer.config import ModelSection, UserError, load_config
from trainer.model.base import build_empty_model
from trainer.model.expert_targets import check_experts_per_token
from trainer.setup.text_run import read_model_files

Change = Callable[[Path], Any]
INDEX, DEEP = "model.safetensors.index.json", "[" * 100_000


def write(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config(**values: Any) -> Change:
    """Change some values of config.json."""

    def change(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | values))

    return change


def packed(groups: Any) -> Change:
    return config(quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})


def fp8(**values: Any) -> Change:
    return config(quantization_config={"quant_method": "fp8", **values})


def index(named: Any) -> Change:
    """Move the weights out of the folder, and name them in an index."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "w.safetensors")
        names = load_file(folder.parent / "w.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, named)}))

    return change


def index_text(content: str | bytes) -> Change:
    return lambda folder: ((folder / "model.safetensors").unlink(), write(INDEX, content)(folder))


def turn_template_into_folder(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").mkdir()


def with_stored(change_weights: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        save_file(change_weights(stored), folder / "model.safetensors", {"format": "pt"})

    return change


def break_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/x")


DAMAGED: dict[str, tuple[Change, str]] = {
    "activation": (config(hidden_act="x"), "hidden_act=x: unknown to transformers"),
    "architectures": (config(architectures=5), "config.json: architectures=5: "),
    "an architecture": (config(architectures=[5]), "config.json: architectures.0=5: "),
    "a billion layers": (config(num_hidden_layers=10**9), "config.json: num_hidden_layers=1000000000: .* 10000"),
    "model type": (config(model_type=["llama"]), r"config.json: model_type=\[llama\]: "),
    "code of its own without a configuration": (
        config(auto_map={"AutoModelForCausalLM": "m.M"}, model_type="x"),
        "config.json has model_type x, which transformers .* does not support",
    ),
    "byte-order mark": (write("config.json", b"\xef\xbb\xbf{}"), "config.json: begins with a byte-order mark, which"),
    "tokenizer in git-lfs": (
        write("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"),
        "tokenizer.json: is a git-lfs pointer; copy",
    ),
    "integers": (
        with_stored(lambda stored: {key: w.int() if "q_proj" in key else w for key, w in stored.items()}),
        r"q_proj.weight is stored as integers \(I32\); use",
    ),
    "names of torch.compile": (
        with_stored(lambda stored: {f"_orig_mod.{key}": weight for key, weight in stored.items()}),
        "is stored as _orig_mod..*; remove _orig_mod. from the names of the tensors",
    ),
    "a broken link": (break_link, "model.safetensors is a symlink to ../blobs/x, which does not exist; download"),
    "code of its own": (config(auto_map=5), "config.json: auto_map=5: "),
    "rope": (config(rope_parameters={"rope_type": "zzz"}), "rope_type=zzz: unknown to transformers"),
    "rope as a list": (config(rope_parameters=[1]), r"config.json: rope_parameters=\[1\]: must be a mapping"),
    "end outside": (config(eos_token_id=9999999), "config.json: eos_token_id=9999999: must be below vocab_size=384;"),
    "end of a list outside": (
        write("generation_config.json", '{"eos_token_id": [2, 384]}'),
        r"generation_config.json: eos_token_id=\[2, 384\]: must be below vocab_size=384;",
    ),
    "groups": (packed([1]), r"config.json: quantization_config.config_groups=\[1\]: "),
    "a group": (packed({"a": 5}), r"quantization_config.config_groups.a=5: must be a mapping, such as"),
    "weights of a group": (packed({"a": {"weights": 7}}), "quantization_config.config_groups.a.weights=7: "),
    "quantisation": (config(quantization_config=[1]), r"config.json: quantization_config=\[1\]: "),
    "block": (fp8(weight_block_size=["a", 1]), 'quantization_config.weight_block_size.0="a": '),
    "left out": (fp8(modules_to_not_convert=5), "quantization_config.modules_to_not_convert=5: "),
    "config in Latin-1": (write("config.json", b'{"a": "\xff"}'), "config.json: line 1: byte 0xff is not UTF-8"),
    "nested config": (write("config.json", f'{{"a": {DEEP}'), "config.json: is nested too deeply"),
    "list for config": (write("config.json", "[1]"), "config.json: must be a mapping"),
    "generation": (write("generation_config.json", "[1]"), "generation_config.json: "),
    "end of text": (write("generation_config.json", '{"eos_token_id": "x"}'), "generation_config.json: eos_token_id"),
    "tokenizer": (write("tokenizer.json", "[1]"), "tokenizer.json: "),
    "tokenizer class": (write("tokenizer_config.json", '{"tokenizer_class": 5}'), "tokenizer_config.json: tokenizer_c"),
    "chat template": (write("tokenizer_config.json", '{"chat_template": 5}'), "tokenizer_config.json: chat_template"),
    "padding": (
        write("tokenizer_config.json", '{"padding_side": "middle"}'),
        "tokenizer_config.json: padding_side=\"middle\": must be 'left' or 'right'; copy",
    ),
    "UTF-16": (
        write("chat_template.jinja", "{{ x }}".encode("utf-16")),
        "chat_template.jinja: line 1: byte 0xff is not",
    ),
    "a folder": (turn_template_into_folder, "chat_template.jinja: is a folder; copy"),
    "nested tokenizer": (write("tokenizer_config.json", f'{{"a": {DEEP}'), "tokenizer_config.json: is nested too"),
    "weights above": (index("../w.safetensors"), f"{INDEX} lists ../w.safetensors, which is outside its folder"),
    "number for weights": (index(5), rf"{INDEX} weight_map\..*: "),
    "nested index": (index_text(DEEP), f"{INDEX} is nested too deeply"),
    "list for index": (index_text("[1]"), f"{INDEX} must be a mapping;"),
    "index in Latin-1": (index_text(b'{"weight_map": {"\xff": "a"}}'), f"{INDEX} line 1: byte 0xff"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named_with_its_value(case: str, tmp_path: Path) -> None:
    change, words = DAMAGED[case]
    ground = make_ground(tmp_path)
    change(ground / "model")
    with pytest.raises(UserError, match=f"^base_model={ground}/model: .*{words}") as raised:
        read_model_files(load_config(ground / "base.yaml", []).config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("case", ["architectures", "quantisation", "end outside", "padding", "UTF-16"])
def test_a_damaged_file_of_the_hub_is_named_with_its_value(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = DAMAGED[case]
    ground, cache = make_ground(tmp_path), tmp_path / "models--me--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    shutil.copytree(ground / "model", cache / "snapshots" / ("a" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert read_model_files(load_config(ground / "base.yaml", ["base_model=me/tiny"]).config).context_length
    change(cache / "snapshots" / ("a" * 40))
    with pytest.raises(UserError, match=f"^base_model=me/tiny: {words}"):
        read_model_files(load_config(ground / "base.yaml", ["base_model=me/tiny"]).config)


def test_weights_at_an_absolute_path_are_outside_as_well(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    index(str(tmp_path / "w.safetensors"))(ground / "model")
    with pytest.raises(UserError, match=f"lists {tmp_path}/w.safetensors, which is outside its folder"):
        read_model_files(load_config(ground / "base.yaml", []).config)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("visited", [0, 5])
def test_a_token_cannot_visit_more_experts_than_there_are(kind: str, visited: int) -> None:
    model = build_empty_model(tiny_config(kind, num_experts_per_tok=visited), ModelSection())
    with pytest.raises(
        UserError, match=f"^base_model=m: config.json has num_experts_per_tok={visited}, but the model "
    ):
        check_experts_per_token("m", model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_family_is_refused_for_its_experts(kind: str) -> None:
    check_experts_per_token("m", build_empty_model(tiny_config(kind), ModelSection()))


def weight_of(value: float, name: str) -> Change:
    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        stored[name].view(-1)[3] = value
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return change


NOT_FINITE = {
    "weight": (weight_of(float("nan"), "model.layers.1.mlp.up_proj.weight"), "up_proj.weight"),
    "norm": (weight_of(float("inf"), "model.norm.weight"), "model.norm.weight"),
    "scale": (
        lambda folder: (
            store_in_fp8(folder, "blocks"),
            weight_of(float("nan"), "model.layers.1.mlp.up_proj.weight_scale_inv")(folder),
        ),
        "up_proj.weight_scale_inv",
    ),
}


@pytest.mark.parametrize("case", NOT_FINITE)
@pytest.mark.parametrize("settings", [{}, {"adapter": "qlora"}])
def test_a_base_that_is_not_finite_is_named_and_not_the_learning_rate(
    case: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    if case == "scale" and settings:
        settings = {"adapter": "qlora", "quantization__quant_type": "fp8"}
    change, name = NOT_FINITE[case]
    ground = make_ground(tmp_path)
    change(ground / "model")
    with pytest.raises(UserError, match=rf"^base_model=.*: 1 of [\d,]+ values of .*{name} are NaN or infinite"):
        train(ground, training__max_steps=2, ops__backend="reference", **settings)


def test_weights_beyond_fp16_are_named(tmp_path: Path) -> None:
    from trainer.model.base import check_base_is_finite

    ground = make_ground(tmp_path)
    weight_of(1e6, "model.norm.weight")(ground / "model")
    check_base_is_finite(str(ground / "model"), ModelSection(), torch.bfloat16)
    with pytest.raises(UserError, match=r"model.norm.weight are beyond the range of torch.float16; use .*bf16"):
        check_base_is_finite(str(ground / "model"), ModelSection(), torch.float16)


def test_a_loss_that_is_not_finite_over_a_finite_base_is_told_as_before(tmp_path: Path) -> None:
    ground = make_ground(tmp_path)
    weight_of(3e38, "model.norm.weight")(ground / "model")
    with pytest.raises(FloatingPointError, match="non-finite"):
        train(ground, training__max_steps=2)
