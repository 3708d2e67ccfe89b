"""Checkpoints stored in FP8: kept as stored, computed as the values they stand for, and refused in one line."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.eight_bits import BLOCK, FORMS, store_in_fp8, write_dequantized
from tests.mixtures import make_mixture
from tests.tiny import make_model
from tests.unit.test_after_run import make_run
from tests.unit.test_memory_model import placement
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.merged_model import merge
from trainer.config import LoraSection, ModelSection, QuantizationSection, RunConfig, UserError
from trainer.memory.model_widths import read_shapes
from trainer.memory.stored_weights import base_weight_bytes
from trainer.model.adapter import apply_adapter
from trainer.model.base import build_empty_model, check_weights, load_base_model, load_model_config
from trainer.model.eight_bit import FrozenLinear8bit
from trainer.model.model_kind import check_kind
from trainer.model.packed_experts import PackedExperts
from trainer.model.stored_fp8 import Fp8Format
from trainer.model.stored_settings import check_saved_modules, check_settings_fit
from trainer.parallel.engine.layer_gather.unit import find_slots
from trainer.patches.fused_lora import fuse_layers

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)
LEFT_OUT = ("lm_head", "layers.1.self_attn.o_proj")
QUERY = "model.layers.0.self_attn.q_proj.weight"
FP8 = QuantizationSection(quant_type="fp8")


def load(folder: Path, **how: Any) -> Any:
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "eager"}
    return load_base_model(str(folder), ModelSection(), **(settings | how))


def layers_of(model: Any) -> dict[str, FrozenLinear8bit]:
    return {name: each for name, each in model.named_modules() if isinstance(each, FrozenLinear8bit)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in each form, as X, and what it stands for, as X-plain; the last block of 32 is short."""
    folder = tmp_path_factory.mktemp("fp8")
    for form in FORMS:
        store_in_fp8(make_model(folder / form, intermediate_size=80), form, leave_out=LEFT_OUT)
        write_dequantized(folder / form, folder / f"{form}-plain")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_lie_there_as_they_are_stored(root: Path, form: str) -> None:
    model, files = load(root / form), load_file(root / form / "model.safetensors")
    layers = layers_of(model)
    assert len(layers) == 13
    assert type(model.lm_head) is type(model.model.layers[1].self_attn.o_proj) is torch.nn.Linear
    for name, layer in layers.items():
        assert torch.equal(layer.weight, files[f"{name}.weight"].view(torch.uint8))
        stored = files[f"{name}.weight_scale" if form == "channel" else f"{name}.weight_scale_inv"].float()
        assert torch.equal(layer.scales, stored.expand(layer.scales.shape)), name
        weight = model.get_parameter(f"{name}.weight")
        gathered = sum(slot.nbytes for slot, _ in find_slots(weight))
        assert gathered == weight.numel(), "a byte a weight"
    model.bfloat16()  # as the 16-bit engine does it
    assert all(each.weight.dtype == torch.uint8 and each.scales.dtype == torch.float32 for each in layers.values())


@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_values_they_stand_for(root: Path, form: str) -> None:
    """Exact with `adapter: lora`; with 8-bit products where a row has one scale, and exact again where blocks have."""
    wanted = load(root / f"{form}-plain")(input_ids=IDS).logits
    assert torch.equal(load(root / form)(input_ids=IDS).logits, wanted)
    assert torch.equal(load(root / form, unpack=True)(input_ids=IDS).logits, wanted)
    products = load(root / form, quantization=FP8)(input_ids=IDS).logits
    error = float(((products - wanted).norm() / wanted.norm()).detach())
    assert error == 0 if form == "blocks" else 0 < error < 0.06
    assert check_weights(str(root / form), ModelSection(), load_model_config(str(root / form), ModelSection())) == []


def test_transformers_reads_the_same_values(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    folder = store_in_fp8(make_model(tmp_path / "model"), "blocks")
    how = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True, modules_to_not_convert=["lm_head"])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how).state_dict()
    ours = load(folder, unpack=True).state_dict()
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("quantization", [None, FP8])
def test_the_operators_train_it_as_pefts_forward_does(root: Path, quantization: QuantizationSection | None) -> None:
    results = []
    for fused in (False, True):
        model = load(root / "blocks", quantization=quantization)
        torch.manual_seed(1)
        model = apply_adapter(model, LoraSection(r=4, alpha=8), torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.1)
        if fused:
            report = fuse_layers(model, "reference", forward=partial(model, input_ids=IDS, use_cache=False))
            assert (report.fused_count, report.total) == (14, 14)
        logits = model(input_ids=IDS, use_cache=False).logits
        logits.square().mean().backward()
        results.append([logits.detach(), *(each.grad for each in model.parameters() if each.requires_grad)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-moe-fp8": ("qwen3_moe", "blocks", {}),
    "gates that end within a block": ("qwen3_moe", "blocks", {"moe_intermediate_size": 48}),
    "deepseek-v3": ("deepseek_v3", "blocks", {}),
    "channel": ("mixtral", "channel", {}),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_stay_in_fp8_and_are_adapted(kind: str, tmp_path: Path) -> None:
    family, form, changes = MIXTURES[kind]
    folder = store_in_fp8(make_mixture(tmp_path / "model", family, **changes), form)
    plain = write_dequantized(folder, tmp_path / "plain")
    results = []
    for each in (folder, plain):
        model = load(each)
        packed = [each for each in model.parameters() if isinstance(each, PackedExperts)]
        if each is folder:
            assert packed and all(part.packing.kind == "fp8" for part in packed)
            for part in packed:
                assert part.nbytes < 1.2 * torch.Size(part.packing.shape).numel() + 512
        with torch.no_grad():
            frozen = model(input_ids=IDS).logits
        torch.manual_seed(1)
        model = apply_adapter(model, LoraSection(r=4, alpha=8), torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.1)
        logits = model(input_ids=IDS, use_cache=False).logits
        logits.square().mean().backward()
        grads = [each.grad for each in model.parameters() if each.requires_grad and each.grad is not None]
        results.append([frozen, logits.detach(), *grads])
    assert len(results[0]) == len(results[1]) > 8
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("family", "kind", "allowed"), [("mixtral", "fp8", 0.05), ("gpt_oss", "int8", 0.02)])
def test_experts_are_quantised_by_rows_while_they_are_read(
    family: str, kind: str, allowed: float, tmp_path: Path
) -> None:
    """gpt-oss's lie the other way round: a row is still what makes one output."""
    folder = make_mixture(tmp_path, family)
    plain, model = load(folder), load(folder, quantization=QuantizationSection(quant_type=kind))
    experts = {name: each for name, each in model.named_parameters() if isinstance(each, PackedExperts)}
    assert len(experts) == 4
    for name, each in experts.items():
        wanted = plain.get_parameter(name).detach()
        rows = wanted.mT if each.packing.transposed else wanted
        scales = each.sections()["scales"]
        top = 448.0 if kind == "fp8" else 127.0
        torch.testing.assert_close(scales[..., 0] * top, rows.abs().amax(-1))
        assert 0 < float((each.dequantize() - wanted).norm() / wanted.norm()) < allowed
    with torch.no_grad():
        assert model(input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_the_estimate_counts_the_bytes_that_lie_there(root: Path, form: str) -> None:
    model = load(root / form, dtype=torch.bfloat16)
    shapes = read_shapes(load_model_config(str(root / form), ModelSection()), ModelSection(), LoraSection(r=4))
    real = sum(each.nbytes for each in model.parameters()) + sum(
        each.scales.nbytes for each in layers_of(model).values()
    )
    for packed in (False, True):  # `adapter: lora`, or qlora with fp8
        kept = placement(packed=packed, quant_type="fp8")
        assert real <= base_weight_bytes(shapes, kept) <= real + 512 * 2 * len(shapes.weights)


def test_what_config_json_leaves_out_is_known_by_either_rule() -> None:
    names = Fp8Format(None, ("lm_head", "model.layers.0.mlp.gate", "re:.*self_attn.*", "model.vision_tower"))
    assert names.is_quantized("model.layers.0.mlp.gate_proj") and not names.is_quantized("model.layers.0.mlp.gate")
    assert not names.is_quantized("model.layers.3.self_attn.q_proj") and not names.is_quantized("lm_head")
    assert not names.is_quantized("model.vision_tower.layers.0.fc1") and names.is_quantized(
        "model.layers.0.mlp.down_proj"
    )


def run_config(base: Path, **settings: Any) -> RunConfig:
    values: dict[str, Any] = {"base_model": str(base), "output_dir": "unset", "dataset": {"path": "none.jsonl"}}
    return RunConfig.model_validate(values | settings)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "nf4": (
        {"adapter": "qlora"},
        r"quant_type=nf4: .* already stored in FP8; use adapter: lora, or quant",
    ),
    "int8": ({"adapter": "qlora", "quantization": {"quant_type": "int8"}}, r"quant_type=int8: .* already stored"),
    "dora": ({"lora": {"dora": True}}, r"lora.dora=true: does not support .* stored in FP8; remove the"),
    "qat": (
        {"training": {"qat": "int8"}},
        r"training.qat=int8: does not support .* stored in FP8; use the 16-bit",
    ),
    "offload": (
        {"zero": {"stage": 3, "gather": "module", "offload_parameters": True}},
        r"zero.offload_parameters=true: zero.gather=module cannot offload .*; use zero.gather: layer",
    ),
    "pissa": ({"lora": {"init": "pissa"}}, r"lora.init=pissa: does not support .* or use the 16-bit model"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_want_other_weights_are_refused_in_one_line(case: str, root: Path) -> None:
    settings, message = SETTINGS[case]
    model_config = load_model_config(str(root / "blocks"), ModelSection())
    check_settings_fit(run_config(root / "blocks"), model_config)
    check_settings_fit(run_config(root / "blocks", adapter="qlora", quantization={"quant_type": "fp8"}), model_config)
    with pytest.raises(UserError, match=message) as error:
        check_settings_fit(run_config(root / "blocks", **settings), model_config)
    assert "\n" not in str(error.value)


def test_a_layer_in_8_bits_is_not_trained_whole(root: Path) -> None:
    model_config = load_model_config(str(root / "blocks"), ModelSection())
    empty = build_empty_model(model_config, ModelSection())
    check_saved_modules(run_config(root / "blocks", lora={"modules_to_save": ["lm_head"]}), model_config, empty)
    for name in ("q_proj", "mlp"):
        config = run_config(root / "blocks", lora={"modules_to_save": [name]})
        with pytest.raises(UserError, match=rf"lora.modules_to_save={name}: the weight of .* is stored in"):
            check_saved_modules(config, model_config, empty)


def test_all_weights_cannot_be_trained_in_it(root: Path) -> None:
    with pytest.raises(UserError, match=r"adapter=none: the weights of .* are stored in FP8 .* use adapter: lora"):
        check_kind(str(root / "blocks"), load_model_config(str(root / "blocks"), ModelSection()), all_trained=True)


PACKED = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 8}, "gptq, 8 bits, but only 4 are supported"),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, version gemv, but only gemm are supported"),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8 of bitsandbytes"),
    "nvfp4": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"g": {"weights": PACKED, "input_activations": PACKED}},
        },
        "compressed-tensors, nvfp4-pack-quantized, with quantized inputs, as in W4A4, but the only supported 4-bit "
        "formats are NVFP4 and W4A16 integers per group or channel",
    ),
    "int8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
        },
        "compressed-tensors, int-quantized",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_forms_are_refused_in_one_line_that_names_ours(case: str, root: Path) -> None:
    config = load_model_config(str(root / "blocks-plain"), ModelSection())
    config.quantization_config, named = OTHERS[case]
    with pytest.raises(UserError) as error:
        check_kind("some/model", config)
    line = str(error.value)
    assert line.startswith(f"base_model=some/model: is already quantized ({named}); use the full-precision model")
    assert "quantization.quant_type: fp8 or int8" in line and "\n" not in line


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return changed


def announced(**changes: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        if not changes:
            del config["quantization_config"]
        config.get("quantization_config", {}).update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return changed


def in_16_bits(stored: dict[str, torch.Tensor]) -> None:
    for name in list(stored):
        if stored[name].dtype == torch.float8_e4m3fn:
            stored[name] = stored[name].bfloat16()
        elif name.endswith("_scale_inv"):
            del stored[name]


DAMAGED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "scales lost": (
        tensors(lambda stored: stored.pop(f"{QUERY}_scale_inv")),
        (f"{QUERY} is stored in FP8, but {QUERY}_scale_inv is missing; download it again",),
    ),
    "blocks that do not divide": (
        announced(weight_block_size=[48, 48]),
        ("has shape (64, 128) and", "(2, 4), but blocks of 48 x 48 need (2, 3); use config.json"),
    ),
    "other scales": (
        tensors(lambda stored: stored.update({f"{QUERY}_scale_inv": torch.ones(3, 2)})),
        (f"{QUERY} has shape (64, 64) and {QUERY}_scale_inv (3, 2), but blocks of 32 x 32 need",),
    ),
    "e5m2": (
        tensors(lambda stored: stored.update({QUERY: stored[QUERY].to(torch.float8_e5m2)})),
        (f"{QUERY} is stored as F8_E5M2, but only e4m3 is supported in 8 bits; use the 16-bit model",),
    ),
    "not announced": (announced(), ("is stored in FP8, but config.json does not declare it", "same model")),
    "announced only": (tensors(in_16_bits), ("config.json says FP8, but no tensor", "remove")),
    "another shape": (
        tensors(lambda all_: all_.update({QUERY: all_[QUERY][:32].clone(), f"{QUERY}_scale_inv": torch.ones(1, 2)})),
        (f"do not match config.json (first: {QUERY} has shape (32, 64), config.json says (64, 64))",),
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_checkpoint_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    folder = store_in_fp8(make_model(tmp_path / "model"), "blocks")
    change, lines = DAMAGED[case]
    change(folder)
    with pytest.raises(UserError) as error:
        check_weights(str(folder), ModelSection(), load_model_config(str(folder), ModelSection()))
    assert str(error.value).startswith(f"base_model={folder}: ")
    for line in lines:
        assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_merged_into_the_16_bit_model_or_the_dequantised_weights(tmp_path: Path) -> None:
    base = make_model(tmp_path / "model")
    run_dir = make_run(tmp_path, base=base)
    plain = write_dequantized(store_in_fp8(base, "channel"), tmp_path / "plain")
    run = find_run(run_dir, allow_mismatch=True)
    with pytest.raises(UserError, match=r"is stored in FP8, .* with --base-model.*, or use --dtype bf16"):
        merge(run, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    written = merge(run, tmp_path / "dequantised", dtype="fp32")
    named = merge(find_run(run_dir, str(plain), allow_mismatch=True), tmp_path / "named")
    first, second = (load_file(folder / "model.safetensors") for folder in (written, named))
    assert first.keys() == second.keys() and "quantization_config" not in (written / "config.json").read_text()
    for name, value in second.items():
        assert torch.equal(first[name], value), name
    with torch.no_grad():
        trained = load_trained_model(run, load_saved_tokenizer(run), CPU)(IDS).logits
        torch.testing.assert_close(load(written)(IDS).logits, trained, rtol=1e-4, atol=1e-5)
