"""ZeRO-3 per layer in one rank: what is gathered when, under every kind of recomputation, and what is free."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import save_family
from tests.tiny import make_model
from tests.unit.test_layer_plan import ARCHITECTURES
from trainer.config import LoraSection, ModelSection, QuantizationSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.parallel.engine.adapter_choice import ATTRIBUTE, DEFAULT, AdapterChoice
from trainer.parallel.engine.layer_gather.shards import LayerShards, get_layer_shards
from trainer.patches.fused_lora import FusionReport, fuse_layers
from trainer.patches.many_adapters import fuse_adapters

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)
UNITS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
FORWARD_AND_BACKWARD = ["model.layers.0", "model.layers.1", "lm_head", "model.layers.0", "model.embed_tokens"]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), vocab_size=4096)


def adapted(folder: Path, *, cut: bool, packed: bool = False) -> Any:
    """The model with an adapter that is the same every time, cut or whole."""
    shards = LayerShards(CPU) if cut else None
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "sdpa"}
    quantization = QuantizationSection() if packed else None
    model = load_base_model(str(folder), ModelSection(), shards=shards, quantization=quantization, **how)
    torch.manual_seed(0)
    model = apply_adapter(model, LoraSection(r=4, init="gaussian"), torch.float32)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    if shards is not None:
        shards.attach(model)
    return model


def gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def gathers(shards: LayerShards, act: Callable[[], object]) -> list[str]:
    """Names of the units that are gathered while `act` runs, in order; never more than two at a time."""
    seen: list[str] = []

    def watched(unit: Any, start: Callable[[], None]) -> None:
        if not unit.is_gathered:
            seen.append(unit.name)
        start()
        assert sum(other.is_gathered for other in shards.units) <= 2

    for unit in shards.units:
        unit.start = partial(watched, unit, unit.start)  # type: ignore[method-assign]
    act()
    for unit in shards.units:
        del unit.start
    return seen


def checkpoint_calls(model: Any, *, reentrant: bool) -> None:
    """Recompute a layer together with its hooks, as older releases of transformers do."""
    if reentrant:
        model.enable_input_require_grads()
    for layer in model.get_base_model().model.layers:
        layer.__class__ = type("Checkpointed", (type(layer),), {"__call__": partial_call(reentrant)})


def partial_call(reentrant: bool) -> Any:
    def call(self: Any, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return checkpoint(partial(nn.Module.__call__, self, **kwargs), hidden, use_reentrant=reentrant)

    return call


@pytest.mark.parametrize("recompute", ["nothing", "forward", "calls", "calls reentrant", "forward reentrant"])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_the_whole_model(folder: Path, packed: bool, recompute: str) -> None:
    expected = gradients(adapted(folder, cut=False, packed=packed))
    model = adapted(folder, cut=True, packed=packed)
    reentrant = "reentrant" in recompute
    if recompute.startswith("forward"):
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    elif recompute.startswith("calls"):
        checkpoint_calls(model, reentrant=reentrant)
    for _ in range(2):
        for grad, wanted in zip(gradients(model), expected, strict=True):
            assert torch.equal(grad, wanted)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "gemma3_text"])
def test_other_architectures_have_the_gradients_of_the_whole_model(tmp_path: Path, model_type: str) -> None:
    """Layers of two kinds, and layers with other norms and shared rotary embeddings."""
    torch.manual_seed(0)
    settings = {**ARCHITECTURES[model_type], "pad_token_id": 0, "tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).save_pretrained(tmp_path)
    model = adapted(tmp_path, cut=True)
    for grad, wanted in zip(gradients(model), gradients(adapted(tmp_path, cut=False)), strict=True):
        assert torch.equal(grad, wanted)
    assert len(model.layer_shards.units) == 5


def test_a_unit_is_gathered_once_a_way_and_one_ahead(folder: Path) -> None:
    """The head stays for the backward pass that follows, and the last layer with it; the embedding for the next."""
    model = adapted(folder, cut=True)
    shards = get_layer_shards(model)
    assert shards is not None
    assert [unit.name for unit in shards.units] == UNITS
    assert not any(unit.is_gathered for unit in shards.units)
    assert gathers(shards, lambda: gradients(model)) == ["model.embed_tokens", *FORWARD_AND_BACKWARD]
    assert [unit.name for unit in shards.units if unit.is_gathered] == ["model.embed_tokens"]
    assert gathers(shards, lambda: gradients(model)) == FORWARD_AND_BACKWARD


def test_without_gradients_the_next_pass_is_ahead(folder: Path) -> None:
    model = adapted(folder, cut=True)
    shards = get_layer_shards(model)
    assert shards is not None
    with torch.no_grad():
        names = gathers(shards, lambda: model(input_ids=IDS, use_cache=False))
    assert names == [*UNITS, "model.embed_tokens"]
    assert [unit.name for unit in shards.units if unit.is_gathered] == ["model.embed_tokens"]


def test_a_tied_head_is_gathered_with_the_embedding(tmp_path: Path) -> None:
    folder = make_model(tmp_path, vocab_size=4096, tie_word_embeddings=True)
    model = adapted(folder, cut=True)
    for grad, wanted in zip(gradients(model), gradients(adapted(folder, cut=False)), strict=True):
        assert torch.equal(grad, wanted)
    assert [unit.name for unit in model.layer_shards.units] == UNITS[:3]


def test_what_is_not_gathered_has_no_memory(folder: Path) -> None:
    model, whole = adapted(folder, cut=True), adapted(folder, cut=False)
    name = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"
    weight, expected = model.get_parameter(name), whole.get_parameter(name)
    assert weight.shape == expected.shape
    assert weight.untyped_storage().nbytes() == 0
    with model.layer_shards.gather([model.get_submodule(name.rpartition(".")[0])]):
        assert torch.equal(weight, expected)
    assert weight.untyped_storage().nbytes() == 0


def test_scales_of_4bit_weights_are_cut_with_them(folder: Path) -> None:
    model = adapted(folder, cut=True, packed=True)
    weight: Any = model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.base_layer.weight")
    for scales in (weight.quant_state.absmax, weight.quant_state.state2.absmax):
        assert scales.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        assert scales.untyped_storage().nbytes() == 0


def test_the_operators_test_themselves_and_find_groups(folder: Path) -> None:
    model = adapted(folder, cut=True)
    report = fuse_layers(model, "reference", forward=lambda: model(input_ids=IDS, use_cache=False))
    assert report.fused_count == 14
    assert sorted(len(group) for group in report.groups) == [1, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("several", [False, True])
def test_layers_with_one_input_in_different_units_are_computed_one_by_one(tmp_path: Path, several: bool) -> None:
    """Gemma 3n's AltUp projections read the same embeddings, but each is gathered for its own call."""
    folder = save_family(tmp_path, "gemma3n_text")
    model, whole = adapted(folder, cut=True), adapted(folder, cut=False)
    assert largest_altup_group(fuse(whole, several)) == 3
    assert largest_altup_group(fuse(model, several)) == 1
    for grad, wanted in zip(gradients(model), gradients(whole), strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-8, rtol=5e-7)


def fuse(model: Any, several: bool) -> FusionReport:
    """Fuse the layers, by the code for several adapters if asked."""
    run = partial(model, input_ids=IDS, use_cache=False)
    if not several:
        return fuse_layers(model, "reference", forward=run)
    setattr(model, ATTRIBUTE, choice := AdapterChoice([DEFAULT], selected=DEFAULT))
    return fuse_adapters(model, choice, "reference", forward=run, separate=False, tokens=0)


def largest_altup_group(report: FusionReport) -> int:
    return max(len(group) for group in report.groups if "altup_projections" in group[0])


def test_a_pass_that_failed_does_not_spoil_the_next(folder: Path) -> None:
    model = adapted(folder, cut=True)
    expected = [grad.clone() for grad in gradients(model)]

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    handle = (
        model.get_base_model()
        .model.layers[0]
        .register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    )
    with pytest.raises(ArithmeticError):
        gradients(model)
    handle.remove()
    for grad, wanted in zip(gradients(model), expected, strict=True):
        assert torch.equal(grad, wanted)


def test_a_profile_names_gathers_and_waits(folder: Path) -> None:
    model = adapted(folder, cut=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(model)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["zerolora: gather model.layers.0"] == counts["zerolora: wait for model.layers.0"] == 2
    assert counts["zerolora: gather lm_head"] == 1
