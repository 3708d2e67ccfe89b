"""Every way of loading a base gives its weights and buffers the types that from_pretrained gives them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.eight_bits import store_in_fp8
from tests.engine import one_rank
from tests.families import FAMILIES, save_family
from tests.runs_in_process import make_ground, train
from tests.unit.test_after_run import make_run
from trainer.checkpoint.finished_run import find_run
from trainer.commands.merged_model import merge
from trainer.config import LoraSection, ModelSection, QuantizationSection, TrainingSection, UserError, ZeroSection
from trainer.model import streamed_weights
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.model.model_kind import NOT_CAUSAL, get_auto_class
from trainer.parallel.engine.deepspeed_engine import build_deepspeed_config, start_engine

CPU = torch.device("cpu")
SOME = ("deepseek_v3", "ernie4_5_moe", "gptj", "gpt_oss", "nemotron_h", "llama")
PATHS: dict[str, dict[str, Any]] = {
    "nf4": {"quantization": QuantizationSection()},
    "int8": {"quantization": QuantizationSection(quant_type="int8")},
    "stage 3": {"deepspeed_config": {}},
}
Types = dict[str, tuple[tuple[int, ...], torch.dtype]]


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by all of their names: layers may share weights, as in Zamba."""
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


def types_of(model: Any) -> Types:
    """Return shape and type of all parameters and buffers; not of what is packed into whole numbers."""
    named = tensors_of(model)
    return {name: (tuple(each.shape), each.dtype) for name, each in named.items()}


def reference(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig

    return get_auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)


def check_paths(folder: Path, dtype: torch.dtype) -> None:
    plain = reference(folder, dtype)
    expected, values = types_of(plain), tensors_of(plain)
    for name, path in PATHS.items():
        model = load_base_model(str(folder), ModelSection(), dtype=dtype, device=CPU, attention=None, **path)
        found = types_of(model)
        packed = {each for each, (_, kind) in found.items() if kind in (torch.uint8, torch.int8)}
        assert found.keys() == expected.keys(), name
        assert {each for each in expected if expected[each] != found[each]} <= packed, name
        if name == "stage 3":
            for each, value in tensors_of(model).items():
                assert torch.equal(value, values[each]), each


@pytest.fixture(autouse=True)
def _unpartitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at is how weights are read, not how DeepSpeed cuts them."""
    monkeypatch.setattr(streamed_weights, "_partition", lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SOME)
def test_streamed_weights_have_the_types_of_from_pretrained(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_paths(save_family(tmp_path, kind), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.nightly] if kind == "inkling_text" else [])
        for kind in sorted({*FAMILIES} - {*SOME, *NOT_CAUSAL})
    ],
)
def test_so_have_those_of_every_family(kind: str, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check_paths(save_family(tmp_path, kind), dtype)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_layers_kept_in_32_bits_are_never_quantised(kind: str, tmp_path: Path) -> None:
    """An attention indexer converts its input to the type of this weight: if that is packed, to whole numbers."""
    folder = save_family(tmp_path, "deepseek_v32")
    model = load_base_model(str(folder), ModelSection(), dtype=torch.float32, device=CPU, attention=None, **PATHS[kind])
    found, kept = tensors_of(model), load_file(folder / "model.safetensors")
    names = [name for name in kept if name.endswith("indexer.weights_proj.weight")]
    assert names and all(torch.equal(found[name], kept[name]) for name in names)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_layer_refuses_whole_numbers(kind: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path, "llama")
    model = load_base_model(str(folder), ModelSection(), dtype=torch.float32, device=CPU, attention=None, **PATHS[kind])
    layer = model.model.layers[0].mlp.down_proj
    with pytest.raises(UserError, match=r"adapter=qlora: this model converts a linear layer's input"):
        layer(torch.ones(1, layer.in_features).to(layer.weight.dtype))


@pytest.mark.parametrize("form", ["blocks", "channel"])
def test_so_have_weights_beside_stored_fp8(form: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "fp8", "deepseek_v3")
    expected = types_of(reference(folder, torch.bfloat16))
    store_in_fp8(folder, form)
    model = load_base_model(str(folder), ModelSection(), dtype=torch.bfloat16, device=CPU, attention=None)
    found = types_of(model)
    kept = {name for name, (_, kind) in found.items() if kind != torch.uint8}
    assert {name for name in kept if found[name] != expected[name]} == set()
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"][1] == torch.float32


def test_so_have_random_weights() -> None:
    """Norms of gpt-oss stay in 32 bits where the rest is in fp16."""
    name = "random:gpt-oss-20b,num_hidden_layers=2,hidden_size=64,intermediate_size=64,num_local_experts=4,head_dim=16"
    name += ",num_attention_heads=4,num_key_value_heads=2"
    model = load_base_model(name, ModelSection(), dtype=torch.float16, device=CPU, attention=None)
    wide = {each for each, (_, kind) in types_of(model).items() if kind == torch.float32 and "norm" in each}
    assert len(wide) == 5


@pytest.mark.parametrize("stage", [0, 2])
def test_the_engine_keeps_frozen_weights_in_32_bits(stage: Any, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "ernie4_5_moe")
    base = load_base_model(str(folder), ModelSection(), dtype=torch.bfloat16, device=CPU, attention=None)
    before = {name: each.clone() for name, each in base.named_parameters() if each.dtype == torch.float32}
    assert any("gate.weight" in name for name in before)
    with one_rank(tmp_path):
        adapted = apply_adapter(base, LoraSection(r=2), torch.bfloat16)
        trained = [each for each in adapted.parameters() if each.requires_grad]
        settings = build_deepspeed_config(TrainingSection(batch_size=1), ZeroSection(stage=stage), "bf16", on_gpu=False)
        engine: Any = start_engine(adapted, torch.optim.AdamW(trained), settings)
        after = dict(engine.module.get_base_model().named_parameters())
        for name, value in before.items():
            assert torch.equal(after[name], value) and after[name].dtype == torch.float32


@pytest.mark.parametrize("settings", [{"zero__stage": 3}, {"zero__stage": 3, "zero__gather": "module"}, {}])
def test_runs_in_16_bits_train(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ground = make_ground(tmp_path)
    save_family(ground / "model", "ernie4_5_moe")
    train(ground, training__precision="bf16", training__max_steps=2, ops__backend="reference", **settings)


def test_merged_weights_keep_their_types(tmp_path: Path) -> None:
    base = save_family(tmp_path / "model", "deepseek_v3")
    stored = load_file(base / "model.safetensors")
    for name, value in stored.items():
        stored[name] = value if name.endswith("e_score_correction_bias") else value.bfloat16()
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    config = (base / "config.json").read_text().replace('"float32"', '"bfloat16"')
    (base / "config.json").write_text(config)
    lora = {"target_modules": ["q_a_proj", "o_proj"]}
    run = find_run(make_run(tmp_path, base=base, lora=lora))
    merged = load_file(merge(run, tmp_path / "merged") / "model.safetensors")
    assert {name: value.dtype for name, value in merged.items()} == {name: v.dtype for name, v in stored.items()}
