"""The operators in PEFT's place: the same numbers, and PEFT's own forward whenever the operators do not apply."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.tiny import make_model
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.patches.fused_lora import FusionReport, check_operators, fuse_layers

IDS = torch.arange(3, 43).view(2, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fuse"), attention_bias=True)


def adapted(folder: Path, *, quantized: bool = False, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    """Return a model with a nonzero B, so that the adapter counts."""
    model = load_base_model(
        str(folder),
        ModelSection(),
        dtype=dtype,
        device=torch.device("cpu"),
        attention="sdpa",
        quantization=QuantizationSection(block_size=64) if quantized else None,
    )
    torch.manual_seed(1)
    model = apply_adapter(model, LoraSection(**({"r": 4, "alpha": 8} | lora)), dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model.train()


def run(model: Any) -> Iterator[Tensor]:
    """Logits and the gradients of all trained tensors."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().square().mean().backward()
    yield logits.detach()
    yield from (parameter.grad for parameter in model.parameters() if parameter.requires_grad)


def fused(model: Any) -> FusionReport:
    return fuse_layers(model, "reference", forward=lambda: model(input_ids=IDS, use_cache=False))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("lora", [{}, {"rslora": True}, {"target_modules": ("q_proj", "down_proj")}])
def test_fused_layers_give_pefts_numbers(folder: Path, quantized: bool, lora: dict[str, Any]) -> None:
    model = adapted(folder, quantized=quantized, **lora)
    expected = list(run(model))
    report = fused(model)
    assert report.fused_count == report.total > 0
    # In 32 bits: the adapter is added to the frozen product, not the product to the adapter.
    torch.testing.assert_close(list(run(model)), expected, atol=1e-8, rtol=5e-7)


def test_siblings_are_found_by_watching(folder: Path) -> None:
    groups = {tuple(name.rsplit(".", 1)[-1] for name in group) for group in fused(adapted(folder)).groups}
    assert groups == {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",)}


def test_what_cannot_be_fused_says_why(folder: Path) -> None:
    report = fused(adapted(folder, dora=True))
    assert report.fused_count == 0
    assert "fused 0 of 14" in report.format_summary()[0]
    assert any("14 layers" in line and "DoRA" in line for line in report.format_summary())
    quantised = adapted(folder, quantized=True)
    for module in quantised.modules():
        if hasattr(module, "quant_state"):
            module.quant_state.quant_type = "fp4"
    assert {reason for _, reason in fused(quantised).rejected} == {"the base is quantized as fp4, not nf4"}


def test_pefts_own_forward_takes_over_when_it_must(folder: Path) -> None:
    """Disabled, merged and several adapters, evaluated after fusing, equal a model that was never fused."""
    ours, theirs = adapted(folder).eval(), adapted(folder).eval()
    fused(ours)

    def same() -> None:
        with torch.no_grad():  # the order of two sums in 32 bits, as above
            torch.testing.assert_close(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits, atol=1e-8, rtol=5e-7)

    same()
    with ours.disable_adapter(), theirs.disable_adapter():
        same()
    ours.merge_adapter()
    theirs.merge_adapter()
    same()
    ours.unmerge_adapter()
    theirs.unmerge_adapter()
    same()
    for model in (ours, theirs):
        torch.manual_seed(5)
        model.add_adapter("second", model.peft_config["default"])
        model.base_model.set_adapter(["default", "second"])
    same()


def test_dropout_acts_in_training_only_and_is_recomputed_alike(folder: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    model = adapted(folder, dropout=0.5)
    fused(model)
    assert not torch.equal(next(run(model)), next(run(model)))
    model.eval()
    assert torch.equal(next(run(model)), next(run(model)))
    model.train()
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    x = torch.randn(2, 5, 64, requires_grad=True)
    torch.manual_seed(3)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, layer.lora_A["default"].weight])
    torch.manual_seed(3)
    y = checkpoint(layer, x, use_reentrant=False)
    recomputed = torch.autograd.grad(y.square().sum(), [x, layer.lora_A["default"].weight])
    assert all(torch.equal(one, two) for one, two in zip(plain, recomputed, strict=True))


def test_bf16_is_as_exact_as_peft(folder: Path) -> None:
    """Errors against the same weights in fp32: ours may be no more than 1.2 times PEFT's own."""
    model, exact = adapted(folder, dtype=torch.bfloat16), adapted(folder)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    truth = list(run(exact))
    theirs = list(run(model))
    fused(model)
    ours = list(run(model))

    def error(got: list[Tensor]) -> Tensor:
        return torch.stack([(g.float() - t).norm() / t.norm() for g, t in zip(got, truth, strict=True)]).mean()

    assert 0 < error(ours) < 1.2 * error(theirs) < 0.05


def test_the_self_test_finds_a_wrong_operator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is dropped is a mismatch, named with its layers."""
    import ops
    from trainer.patches import fused_lora as module

    model = adapted(folder)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    group = module.FusedGroup([module.FusedLayer(layer)])
    check_operators([group])
    right = ops.lora_group
    monkeypatch.setattr(ops, "lora_group", lambda x, w, b, d, u, s, p: right(x, w, b, d, u, [1.0] * len(s), p))
    with pytest.raises(ValueError, match=r"self-test of layers.*128 tokens: output is off by"):
        check_operators([group])


def test_the_self_test_tries_the_kernels_for_many_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong from 4096 tokens on is not seen by fewer."""
    import ops
    from trainer.patches import fused_lora as module

    model = adapted(folder)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    group = module.FusedGroup([module.FusedLayer(layer)])
    check_operators([group], test_many_tokens=True)
    right = ops.lora_group

    def wrong(x, w, b, d, u, s, p):
        return right(x, w, b, d, u, [3.0] * len(s) if len(x) >= module.MANY_TOKENS else s, p)

    monkeypatch.setattr(ops, "lora_group", wrong)
    check_operators([group])
    with pytest.raises(ValueError, match=r"4096 tokens: output is off by"):
        check_operators([group], test_many_tokens=True)


def test_the_self_test_of_a_wide_layer_stays_in_the_range_of_fp16() -> None:
    """4096 tokens are summed into the gradients of the factors, here of Granite's 6448 outputs."""
    from trainer.patches import fused_lora as module

    torch.manual_seed(0)
    model = nn.ModuleDict({"wide": nn.Linear(64, 6448, bias=False, dtype=torch.float16)})
    get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["wide"]), autocast_adapter_dtype=False)
    check_operators([module.FusedGroup([module.FusedLayer(model["wide"])])], test_many_tokens=True)
