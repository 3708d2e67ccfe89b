"""Tiles of the sequence give the same loss and gradients as the whole, and the MLP is not computed more often."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from tests.engine import adapted_engine, backward, one_rank
from trainer.config import LoraSection, QuantizationSection, RunConfig, TrainingSection, UserError
from trainer.config.checks import check_combinations
from trainer.model.adapter import apply_adapter
from trainer.model.eight_bit import FrozenLinear8bit
from trainer.model.four_bit import quantize_linear
from trainer.parallel.engine.flat_adapter import flatten_adapter
from trainer.patches.fused_lora import fuse_layers
from trainer.patches.norm_mlp_rope import is_gated_mlp
from trainer.patches.recompute import enable_recomputation
from trainer.patches.replace import undo
from trainer.patches.tiled_mlp import tile_feed_forward

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),  # gate and up in one projection
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, head_dim=8)),  # a norm after the MLP
}


def build(architecture: str, targets: tuple[str, ...] = ("all-linear",)) -> Any:
    torch.manual_seed(0)
    model = apply_adapter(MODELS[architecture](), LoraSection(r=4, target_modules=targets), torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:  # B begins at zero, and A would get no gradient
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def one_pass(model: Any, rows: int, length: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss and the gradients of all that is trained."""
    ids = torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    trained = [each for each in model.parameters() if each.requires_grad]
    return loss.detach(), [each.grad for each in trained if each.grad is not None]


@pytest.mark.parametrize("checkpointing", ["none", "non_reentrant", "selective"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(1, 40), (3, 13)])
@pytest.mark.parametrize("architecture", MODELS)
def test_tiles_give_the_loss_and_gradients_of_the_whole(
    architecture: str, rows: int, length: int, fused: bool, flat: bool, checkpointing: str
) -> None:
    whole = one_pass(build(architecture), rows, length)
    model = build(architecture)
    if flat:
        flatten_adapter(model, separate_up=False)
    if fused:
        fuse_layers(
            model, "reference", forward=lambda: model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)
        )
    assert tile_feed_forward(model, 16) == 2
    enable_recomputation(model, TrainingSection.model_validate({"gradient_checkpointing": checkpointing}))
    loss, grads = one_pass(model, rows, length)
    torch.testing.assert_close(loss, whole[0], atol=1e-6, rtol=1e-6)
    if flat:
        spans = model.flat_adapter.list_spans()
        names = [name for name, _ in build(architecture).named_parameters() if name in spans]
        (buffer,) = grads
        grads = [buffer[spans[name][1] : spans[name][1] + spans[name][2]] for name in names]
    assert len(grads) == len(whole[1]) > 0
    for got, wanted in zip(grads, whole[1], strict=True):
        torch.testing.assert_close(got.view_as(wanted), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("gate_proj", "down_proj")])
def test_an_input_or_weights_without_gradients(targets: tuple[str, ...]) -> None:
    """The first MLP's input needs no gradient if only MLPs are adapted; MLPs need none if only attention is."""
    whole = one_pass(build("llama", targets), 1, 40)
    model = build("llama", targets)
    tile_feed_forward(model, 16)
    enable_recomputation(model, TrainingSection(gradient_checkpointing="non_reentrant"))
    loss, grads = one_pass(model, 1, 40)
    torch.testing.assert_close(loss, whole[0], atol=1e-6, rtol=1e-6)
    assert len(grads) == len(whole[1]) > 0
    for got, wanted in zip(grads, whole[1], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_sums_over_tiles_are_exact_in_bf16() -> None:
    """Sixty-four tiles added in bf16 would lose the small ones; sums are in 32 bits and rounded once."""

    def gradient(tile: int) -> torch.Tensor:
        model = build("llama", ("down_proj",)).bfloat16()
        if tile:
            tile_feed_forward(model, tile)
        return torch.cat([each.flatten() for each in one_pass(model, 1, 512)[1]]).float()

    whole, tiled = gradient(0), gradient(8)
    assert float((whole - tiled).norm() / whole.norm()) < 0.01


def test_a_recomputed_layer_computes_its_mlp_twice_as_without_tiles() -> None:
    """Once in the forward pass and once per tile in the backward pass; the recomputation ends at its input."""
    model = build("llama")
    tokens = []
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.down_proj.register_forward_hook(lambda _, inputs, __: tokens.append(inputs[0].shape[1]))
    tile_feed_forward(model, 16)
    enable_recomputation(model, TrainingSection(gradient_checkpointing="non_reentrant"))
    one_pass(model, 1, 40)
    assert tokens == [16, 16, 8] * 2


@pytest.mark.parametrize(("stage", "flat"), [(0, True), (2, True), (2, False)])
def test_steps_of_an_engine_are_the_same(stage: int, flat: bool, tmp_path: Path) -> None:
    """DeepSpeed reduces each gradient once per backward pass, as it would without tiles."""
    trained = []
    with one_rank(tmp_path):
        for tile in (0, 8):
            engine = adapted_engine("fp32", stage, torch.device("cpu"), flat=flat, learning_rate=1e-2)
            if tile:
                assert tile_feed_forward(engine.module, tile) == 2
            enable_recomputation(engine.module, TrainingSection(gradient_checkpointing="non_reentrant"))
            engine.train()
            for _ in range(3):
                backward(engine)
                engine.step()
            trained.append([each.detach().clone() for each in engine.module.parameters() if each.requires_grad])
    for whole, tiled in zip(*trained, strict=True):
        torch.testing.assert_close(tiled, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["nf4", "fp8", "int8"])
def test_tiles_of_a_quantized_base(kind: str) -> None:
    """The operators quantize the input by the token, and the base is read again for every tile."""
    model = build("llama")
    section = QuantizationSection.model_validate({"quant_type": kind, "double_quant": False})
    for block in model.get_base_model().model.layers:
        for layer in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj):
            if section.is_8bit:
                layer.base_layer = FrozenLinear8bit.from_linear(layer.base_layer, kind, torch.float32)
            else:
                layer.base_layer = quantize_linear(layer.base_layer, section, torch.float32)
    fuse_layers(model, "reference", forward=None)
    loss, grads = one_pass(model, 1, 40)
    model.zero_grad()
    tile_feed_forward(model, 16)
    enable_recomputation(model, TrainingSection(gradient_checkpointing="non_reentrant"))
    tiled_loss, tiled = one_pass(model, 1, 40)
    torch.testing.assert_close(tiled_loss, loss, atol=1e-6, rtol=1e-6)
    for got, wanted in zip(tiled, grads, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"training": {"gradient_checkpointing": False}}, "not supported with training.gradient_checkpointing: none"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout draws one mask for all tokens"),
        ({"zero": {"stage": 3, "gather": "module"}}, "zero.gather: module gathers weights for every tile"),
        ({"training": {"cuda_graphs": "on"}}, "training.tiled_mlp recomputes tiles in the backward pass"),
    ],
)
def test_what_cannot_be_tiled_is_refused(changes: dict[str, Any], problem: str) -> None:
    training = {"gradient_checkpointing": True, "tiled_mlp": 64} | changes.get("training", {})
    data = {"path": "unset.jsonl"}
    settings = {"base_model": "unset", "output_dir": "unset", "dataset": data} | changes | {"training": training}
    with pytest.raises(UserError, match=rf"training.tiled_mlp=64: {problem}; use auto"):
        check_combinations(RunConfig.model_validate(settings))


def test_evaluation_is_tiled_and_all_is_restored() -> None:
    model = build("llama").eval()
    ids = torch.randint(1, 64, (1, 40))
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        tile_feed_forward(model, 16)
        torch.testing.assert_close(model(input_ids=ids).logits, whole, atol=1e-6, rtol=1e-5)
    undo(model)
    assert not any("forward" in vars(module) for module in model.modules() if is_gated_mlp(module))
