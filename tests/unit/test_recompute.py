"""Recomputation draws the random numbers again that the forward pass drew, wherever a model draws them."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from trainer.config import LoraSection
from trainer.config.training_sections import TrainingSection
from trainer.model.adapter import apply_adapter
from trainer.patches.recompute import disable_recomputation, enable_recomputation, find_feed_forward_modules

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# Neither has a dropout module: both call torch's function with a number from their settings.
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48, attention_dropout=0.3)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, dropout=0.3)),
}


ALL = LoraSection(r=4)


def gradients(
    architecture: str, checkpointing: str, seed: int, lora: LoraSection = ALL, layers: int | None = None
) -> list[torch.Tensor]:
    """Return the adapter's gradients after one pass with random numbers from `seed` on."""
    torch.manual_seed(0)
    model = apply_adapter(MODELS[architecture](), lora, torch.float32)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:  # B begins at zero, and A would get no gradient
        torch.nn.init.normal_(parameter, std=0.1)
    settings = {"gradient_checkpointing": checkpointing, "gradient_checkpointing_layers": layers}
    enable_recomputation(model, TrainingSection.model_validate(settings))
    model.train()
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [parameter.grad for parameter in trained if parameter.grad is not None]


@pytest.mark.parametrize("architecture", MODELS)
def test_dropout_that_is_no_module_is_drawn_again(architecture: str) -> None:
    kept, recomputed, other = (
        gradients(architecture, kind, seed) for kind, seed in (("none", 2), ("non_reentrant", 2), ("none", 3))
    )
    assert len(kept) == len(recomputed) > 0
    for ours, expected in zip(recomputed, kept, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-7, rtol=1e-5)
    # Loose on purpose: other random numbers must give other gradients by far.
    assert any(not torch.allclose(a, b, rtol=0.1) for a, b in zip(kept, other, strict=True)), "nothing was dropped"


@pytest.mark.parametrize("count", [1, 2, 99])
def test_only_the_first_layers_are_computed_again(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are the same, and the forward pass of a layer runs twice for as many as were asked for."""
    kept = gradients("llama", "none", 2)
    model = apply_adapter(MODELS["llama"](), ALL, torch.float32)
    calls: list[int] = []
    for index, layer in enumerate(model.get_base_model().model.layers):
        layer.self_attn.register_forward_hook(lambda *_, index=index: calls.append(index))
    settings = TrainingSection.model_validate({"gradient_checkpointing": True, "gradient_checkpointing_layers": count})
    line = enable_recomputation(model, settings)
    assert line is not None and f"the first {min(count, 2)} of 2 layers" in line
    model.train()
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert calls == [0, 1, *reversed(range(min(count, 2)))]
    recomputed = gradients("llama", "non_reentrant", 2, layers=count)
    assert all(map(torch.equal, kept, recomputed)) and len(kept) > 0
    disable_recomputation(model)
    calls.clear()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert calls == [0, 1]


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")])
def test_feed_forward_parts_without_an_adapter_are_recomputed_too(targets: tuple[str, ...]) -> None:
    lora = LoraSection(r=4, target_modules=targets)
    kept, recomputed = (gradients("llama", kind, 2, lora) for kind in ("none", "selective"))
    assert len(kept) == len(recomputed) > 0
    for ours, expected in zip(recomputed, kept, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-7, rtol=1e-5)
    model = apply_adapter(MODELS["llama"](), lora, torch.float32)
    assert [type(part).__name__ for part in find_feed_forward_modules(model)] == ["LlamaMLP", "LlamaMLP"]
