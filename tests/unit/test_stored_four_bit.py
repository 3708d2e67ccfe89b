"""Checkpoints in GPTQ, AWQ, W4A16 and NVFP4: kept as stored, computed exactly, merged, and refused in one line."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.four_bits import FORMS, announced, store_in_four_bits, write_dequantized
from tests.mixtures import make_mixture
from tests.tiny import make_model, make_tokenizer
from tests.unit.test_after_run import make_run
from tests.unit.test_memory_model import placement
from tests.unit.test_stored_fp8 import run_config
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.merged_model import merge
from trainer.config import LoraSection, ModelSection, UserError
from trainer.memory.model_widths import read_shapes
from trainer.memory.stored_weights import base_weight_bytes
from trainer.model.adapter import apply_adapter
from trainer.model.base import build_empty_model, check_weights, load_base_model, load_model_config
from trainer.model.model_kind import check_kind
from trainer.model.packed_experts import FrozenLinearGrouped, PackedExperts
from trainer.model.stored_four_bit import FourBitFiles, FourBitFormat, parse_four_bit_format
from trainer.model.stored_settings import check_saved_modules, check_settings_fit
from trainer.model.tensor_files import SafetensorsFiles
from trainer.parallel.engine.layer_gather.unit import find_slots
from trainer.patches.fused_lora import fuse_layers

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)
LEFT_OUT = ("lm_head",)
QUERY = "model.layers.0.self_attn.q_proj"


def load(folder: Path, **how: Any) -> Any:
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "eager"}
    return load_base_model(str(folder), ModelSection(), **(settings | how))


def adapt(model: Any) -> Any:
    torch.manual_seed(1)
    model = apply_adapter(model, LoraSection(r=4, alpha=8), torch.float32)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    return model


def logits_and_gradients(model: Any) -> list[torch.Tensor]:
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.square().mean().backward()
    grads = [each.grad for each in model.parameters() if each.requires_grad and each.grad is not None]
    return [logits.detach(), *grads]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in each form, as X, and its dequantised values, as X-plain."""
    folder = tmp_path_factory.mktemp("four")
    for form in FORMS:
        store_in_four_bits(make_model(folder / form), form)
        write_dequantized(folder / form, folder / f"{form}-plain", form)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_formats_own_readers_and_stay_in_4_bits(root: Path, form: str) -> None:
    model, plain = load(root / form), load(root / f"{form}-plain")
    modules: list[tuple[str, Any]] = list(model.named_modules())
    layers = {name: each for name, each in modules if isinstance(each, FrozenLinearGrouped)}
    assert len(layers) == 14 and type(model.lm_head) is torch.nn.Linear
    for name, layer in layers.items():
        weight: Any = layer.weight
        wanted = plain.get_parameter(f"{name}.weight")
        assert torch.equal(layer.dequantize(torch.float32), wanted), name
        assert torch.equal(layer.dequantize(torch.bfloat16), wanted.bfloat16()), name
        gathered = sum(slot.nbytes for slot, _ in find_slots(weight))
        sections = weight.sections()
        assert sections["codes"].nbytes == wanted.numel() // 2
        assert gathered < sum(each.nbytes for each in sections.values()) + 5 * 256
    assert torch.equal(load(root / form, unpack=True)(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    model.bfloat16()  # as the 16-bit engine does
    assert all(each.weight.dtype == torch.uint8 for each in layers.values())
    assert check_weights(str(root / form), ModelSection(), load_model_config(str(root / form), ModelSection())) == []


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_peft_on_the_dequantised_weights(root: Path, form: str) -> None:
    theirs = logits_and_gradients(adapt(load(root / f"{form}-plain")))
    model = adapt(load(root / form))
    unfused = logits_and_gradients(model)
    model.zero_grad()
    report = fuse_layers(model, "reference", forward=partial(model, input_ids=IDS, use_cache=False))
    assert (report.fused_count, report.total) == (14, 14)
    assert sum(len(group) > 1 for group in report.groups) == 4, "q/k/v and gate/up of two layers"
    fused = logits_and_gradients(model)
    assert len(theirs) == len(unfused) == len(fused) == 29
    for wanted, *found in zip(theirs, unfused, fused, strict=True):
        for each in found:
            torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_stay_in_4_bits_and_are_adapted(family: str, form: str, tmp_path: Path) -> None:
    folder = store_in_four_bits(make_mixture(tmp_path / "model", family), form)
    plain = write_dequantized(folder, tmp_path / "plain", form)
    model = load(folder)
    experts = {name: each for name, each in model.named_parameters() if "experts" in name}
    assert len(experts) == 4 and all(isinstance(each, PackedExperts) for each in experts.values())
    for name, each in experts.items():
        wanted = load(plain).get_parameter(name)
        assert torch.equal(each.dequantize(), wanted)
        assert torch.equal(torch.stack([each.dequantize_expert(index) for index in range(4)]), wanted)
    for theirs, ours in zip(logits_and_gradients(adapt(load(plain))), logits_and_gradients(adapt(model)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_operator_has_a_fake_and_a_derivative(root: Path) -> None:
    model = load(root / "act-order")
    layers = [getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj")]
    x = torch.randn(5, 64, requires_grad=True)
    downs, ups = ([torch.randn(*shape, requires_grad=True) for shape in shapes] for shapes in (
        [(4, 64), (2, 64)], [(64, 4), (32, 2)]
    ))  # fmt: skip
    layouts = [number for each in layers for number in each.layout]
    packed = [each.weight.data for each in layers]
    arguments: Any = (x, packed, layouts, [], downs, ups, [0.5, 2.0], 0.0, None, None)
    torch.library.opcheck(torch.ops.zerolora.grouped_forward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("form", FORMS)
def test_the_estimate_counts_the_stored_bytes(root: Path, form: str, tmp_path: Path) -> None:
    mixture = store_in_four_bits(make_mixture(tmp_path / "model", "qwen3_moe"), form)
    for folder in (root / form, mixture):
        model, settings = load(folder, dtype=torch.bfloat16), load_model_config(str(folder), ModelSection())
        shapes = read_shapes(settings, ModelSection(), LoraSection(r=4))
        real = sum(each.nbytes for each in model.parameters())
        scales = sum(
            each.sections()["scales"].nbytes for each in model.parameters() if isinstance(each, PackedExperts)
        )  # in 32 bits here, in 16 in published checkpoints
        found = base_weight_bytes(shapes, placement(packed=False))
        assert real - scales // 2 <= found + 512 * len(shapes.weights) and found <= real + 512 * len(shapes.weights)


def test_layers_that_config_json_leaves_out_are_known_by_each_rule() -> None:
    query, gate = QUERY, "model.layers.1.mlp.gate"
    awq = FourBitFormat("AWQ", 128, True, ("visual", "mlp.gate."))
    assert (
        awq.is_quantized(query) and not awq.is_quantized("visual.blocks.0.attn.qkv") and not awq.is_quantized("lm_head")
    )
    rules = {"-:.*\\.mlp\\.gate$": {}, "+:.*down.*": {"group_size": 64}}
    gptq = parse_four_bit_format(with_quantization(FORMS["gptq"] | {"dynamic": rules}))
    assert (
        isinstance(gptq, FourBitFormat)
        and gptq.is_quantized(query)
        and not gptq.is_quantized(gate)
        and gptq.is_quantized(f"{gate}_proj")
    )
    compressed = parse_four_bit_format(with_quantization(announced("nvfp4", ("lm_head", "re:.*mlp.gate$"))))
    assert (
        isinstance(compressed, FourBitFormat) and compressed.is_quantized(query) and not compressed.is_quantized(gate)
    )


def with_quantization(settings: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig()
    config.quantization_config = settings
    return config


def changed_group(form: str, **changes: Any) -> dict[str, Any]:
    settings = announced(form)
    settings["config_groups"]["group_0"] |= changes
    return settings


INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": (FORMS["gptq"] | {"bits": 3}, "gptq, 3 bits, but only 4 are supported"),
    "marlin": (FORMS["gptq"] | {"checkpoint_format": "marlin"}, "version marlin, but only gptq and gptq_v2"),
    "mixed bits": (FORMS["gptq"] | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq, 8 bits, but only 4 are supported"),
    "gemv": (FORMS["awq"] | {"version": "GEMV"}, "awq, version gemv, but only gemm are supported"),
    "w4a4": (
        changed_group("nvfp4", input_activations=INPUTS),
        "with quantized inputs, as in W4A4, but the only",
    ),
    "mxfp4": (
        changed_group("nvfp4", weights=INPUTS | {"strategy": "group", "group_size": 32}),
        "with 4-bit float weights \(strategy group, group_size 32\), but the only supported",
    ),
    "rotated": (announced("w4a16") | {"transform_config": {"config_groups": {"R1": {}}}}, "with rotated inputs"),
    "sparse": (announced("w4a16") | {"sparsity_config": {"format": "marlin-24"}}, "with sparse weights"),
    "two types": (
        announced("w4a16")
        | {"config_groups": {"a": {"weights": INPUTS}, "b": {"weights": {"num_bits": 8, "type": "float"}}}},
        "layers of several data types",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_read_is_refused_in_one_line_with_the_reason(case: str) -> None:
    settings, reason = UNSUPPORTED[case]
    with pytest.raises(UserError, match=rf"base_model=some/model: is already quantized \(.*{reason}.*\); use the") as e:
        check_kind("some/model", with_quantization(settings))
    assert "\n" not in str(e.value)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "nf4": (
        {"adapter": "qlora"},
        r"quant_type=nf4: .* already stored in GPTQ; use adapter: lora, or the",
    ),
    "fp8": ({"adapter": "qlora", "quantization": {"quant_type": "fp8"}}, r"quant_type=fp8: .* already stored"),
    "dora": ({"lora": {"dora": True}}, r"lora.dora=true: does not support .* stored in GPTQ; remove the"),
    "pissa": ({"lora": {"init": "pissa"}}, r"lora.init=pissa: does not support"),
    "qat": (
        {"training": {"qat": "int8"}},
        r"training.qat=int8: does not support .* stored in GPTQ; use the 16-bit",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_need_other_weights_are_refused_in_one_line(case: str, root: Path) -> None:
    settings, message = SETTINGS[case]
    model_config = load_model_config(str(root / "gptq"), ModelSection())
    check_settings_fit(run_config(root / "gptq"), model_config)
    with pytest.raises(UserError, match=message) as error:
        check_settings_fit(run_config(root / "gptq", **settings), model_config)
    assert "\n" not in str(error.value)


def test_weights_in_4_bits_are_not_trained_themselves(root: Path) -> None:
    model_config = load_model_config(str(root / "awq"), ModelSection())
    with pytest.raises(UserError, match=r"adapter=none: the weights of .* are stored in AWQ .* use adapter: lora"):
        check_kind(str(root / "awq"), model_config, all_trained=True)
    config = run_config(root / "awq", lora={"modules_to_save": ["q_proj"]})
    with pytest.raises(UserError, match=r"modules_to_save=q_proj: the weight of .* is stored in AWQ and cannot be"):
        check_saved_modules(config, model_config, build_empty_model(model_config, ModelSection()))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return changed


def announce(**changes: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"].update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return changed


def drop_codes(stored: dict[str, torch.Tensor]) -> None:
    for name in [name for name in stored if name.endswith((".qweight", ".qzeros", ".scales", ".g_idx"))]:
        del stored[name]


DAMAGED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "scales missing": (
        "gptq",
        tensors(lambda stored: stored.pop(f"{QUERY}.scales")),
        f"{QUERY}.scales is missing; download the model again",
    ),
    "divisor missing": (
        "nvfp4",
        tensors(lambda stored: stored.pop(f"{QUERY}.weight_global_scale")),
        f"{QUERY}.weight_global_scale is missing",
    ),
    "other groups": (
        "awq",
        announce(group_size=48),
        "layers.0.mlp.down_proj.scales has shape (4, 64) in F16, but AWQ in groups of 48 needs (3, 64) in F32; use",
    ),
    "other scales": (
        "w4a16",
        tensors(lambda stored: stored.update({f"{QUERY}.weight_scale": torch.ones(64, 3)})),
        f"{QUERY}.weight_scale has shape (64, 3) in F32, but W4A16 in groups of 32 needs (64, 2)",
    ),
    "codes of another type": (
        "gptq",
        tensors(lambda stored: stored.update({f"{QUERY}.qweight": stored[f"{QUERY}.qweight"].long()})),
        f"{QUERY}.qweight has shape (8, 64) in I64, but GPTQ in groups of 32 needs (8, 64) in I32",
    ),
    "nothing stored": ("gptq", tensors(drop_codes), "config.json says GPTQ, but no tensor is in that format; remove"),
    "another shape": (
        "w4a16-rows",
        tensors(lambda stored: stored.update({
            f"{QUERY}.weight_packed": stored[f"{QUERY}.weight_packed"][:32].clone(),
            f"{QUERY}.weight_scale": stored[f"{QUERY}.weight_scale"][:32].clone(),
        })),
        f"do not match config.json (first: {QUERY}.weight has shape (32, 64), config.json says (64, 64))",
    ),
    "other bytes": (
        "w4a16",
        tensors(lambda stored: stored.update({"lm_head.weight": torch.ones(384, 64, dtype=torch.uint8)})),
        "lm_head.weight is stored as U8, which W4A16 does not use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_checkpoint_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    form, change, line = DAMAGED[case]
    folder = store_in_four_bits(make_model(tmp_path / "model"), form)
    change(folder)
    with pytest.raises(UserError) as error:
        check_weights(str(folder), ModelSection(), load_model_config(str(folder), ModelSection()))
    assert str(error.value).startswith(f"base_model={folder}: ")
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_columns_in_another_order_than_config_json_says_are_found(tmp_path: Path) -> None:
    folder = store_in_four_bits(make_model(tmp_path / "model"), "act-order")
    announce(desc_act=False)(folder)
    with pytest.raises(UserError, match=r"g_idx is not ascending, contrary to config.json; use config.json"):
        load(folder)


@pytest.mark.parametrize("form", FORMS)
def test_merged_into_16_bits_or_the_same_format(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_model(tmp_path / "model")
    run_dir = make_run(tmp_path, base=base, lora={"target_modules": ["q_proj", "o_proj"]})
    plain = write_dequantized(store_in_four_bits(base, form), tmp_path / "plain", form)
    run = find_run(run_dir, allow_mismatch=True)
    wide = merge(run, tmp_path / "wide", dtype="fp32")
    assert "quantization_config" not in (wide / "config.json").read_text()
    named = merge(find_run(run_dir, str(plain), allow_mismatch=True), tmp_path / "named", dtype="fp32")
    first, second = (load_file(folder / "model.safetensors") for folder in (wide, named))
    assert first.keys() == second.keys()
    for name, value in second.items():
        assert torch.equal(first[name], value), name
    assert load_file(merge(run, tmp_path / "half", dtype="bf16") / "model.safetensors")["model.norm.weight"].dtype == (
        torch.bfloat16
    )
    with torch.no_grad():
        trained = load_trained_model(run, load_saved_tokenizer(run), CPU)(IDS).logits
        torch.testing.assert_close(load(wide)(IDS).logits, trained, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    stored = merge(run, tmp_path / "stored", dtype="stored")
    line = re.search(r"changed by ([\d.]+)% \(rounding\) and ([\d.]+)% \(adapter\)", capsys.readouterr().err)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, stored))
    assert before.keys() == after.keys()
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert {name for name in before if "q_proj" not in name and "o_proj" not in name} <= same
    assert f"{QUERY}.{'qweight' if form in ('gptq', 'act-order', 'gptq-rows', 'awq') else 'weight_packed'}" not in same
    written, wanted = load(stored, unpack=True).state_dict(), load(wide).state_dict()
    size = sum(float(each.square().sum()) for name, each in wanted.items() if "_proj" in name)
    lost = sum(float((written[name] - each).square().sum()) for name, each in wanted.items() if "_proj" in name)
    assert line is not None and float(line[2]) > 0
    assert float(line[1]) == pytest.approx(100 * (lost / size) ** 0.5, abs=0.01)


@pytest.mark.parametrize("form", FORMS)
def test_requantised_weights_read_back_as_the_nearest_values(root: Path, form: str, tmp_path: Path) -> None:
    found = parse_four_bit_format(load_model_config(str(root / form), ModelSection()))
    assert isinstance(found, FourBitFormat)
    files = FourBitFiles(SafetensorsFiles(str(root / form), ModelSection()), found, "base_model")
    name = f"{QUERY}.weight"
    base, layout = files.read(name), files.layouts[name]
    wanted = base + 0.3 * base.std() * torch.randn(base.shape, generator=torch.Generator().manual_seed(0))
    parts, written = files.requantize(name, wanted)
    stored = load_file(root / form / "model.safetensors") | {key: each.contiguous() for key, each in parts.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((root / form / "config.json").read_text())
    plain = write_dequantized(tmp_path, tmp_path / "plain", form)
    assert torch.equal(load_file(plain / "model.safetensors")[name], written)
    if not layout.has_order:
        # Each of the 16 codes at every place, by the format's own reader: none is nearer.
        for code in range(16):
            packed = torch.full((layout.rows, layout.cols // 2), code | code << 4, dtype=torch.uint8)
            other = files._dequantize(
                layout, {part: files._read_part(part, name) for part in layout.sections()} | {"codes": packed}
            )
            assert ((written - wanted).abs() <= (other - wanted).abs() + 1e-6).all()


@pytest.mark.parametrize("form", ["awq", "nvfp4"])
def test_experts_and_several_files_are_written_in_the_same_format(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_mixture(tmp_path / "model", "qwen3_moe")
    make_tokenizer(base)
    run_dir = make_run(tmp_path, base=base, lora={"target_modules": ["q_proj"]})
    store_in_four_bits(base, form)
    run = find_run(run_dir, allow_mismatch=True)
    wanted = load(merge(run, tmp_path / "wide", dtype="fp32")).state_dict()
    monkeypatch.setattr("trainer.commands.merged_model.SHARD_SIZE", "100KB")
    stored = merge(run, tmp_path / "stored", dtype="stored")
    assert len(list(stored.glob("*.safetensors"))) > 2
    settings = load_model_config(str(stored), ModelSection())
    assert check_weights(str(stored), ModelSection(), settings) == []
    before = load(base, unpack=True).state_dict()
    for name, each in load(stored, unpack=True).state_dict().items():
        if "q_proj" not in name:
            assert torch.equal(each, before[name]), name
        else:
            assert 0 < (each - wanted[name]).norm() < (before[name] - wanted[name]).norm()


def test_stored_is_refused_for_other_bases(tmp_path: Path) -> None:
    run = find_run(make_run(tmp_path, base=make_model(tmp_path / "model")), allow_mismatch=True)
    with pytest.raises(UserError, match=r"--dtype=stored: .* is not stored as GPTQ, AWQ, W4A16 or"):
        merge(run, tmp_path / "refused", dtype="stored")
    assert not (tmp_path / "refused").exists()
