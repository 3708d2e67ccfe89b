"""FLOPs of a step counted by hand, windows, experts, and what the card could do."""

import pytest
import torch

from trainer.config import LoraSection, ModelSection
from trainer.data.batches import MicroBatch
from trainer.model.adapter import apply_adapter, build_lora_config
from trainer.model.base import build_empty_model, load_model_config
from trainer.monitor.hooks import FinishedStep
from trainer.monitor.mfu import MfuMeter, StepFlops, find_peak_flops

HIDDEN, INNER, LAYERS, KV, VOCABULARY, R = 64, 128, 2, 32, 384, 4
FROZEN = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INNER)
TRAINED = LAYERS * R * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + INNER))


def adapted(name: str = "random:tiny") -> torch.nn.Module:
    from accelerate import init_empty_weights
    from peft import get_peft_model

    model = build_empty_model(load_model_config(name, ModelSection()), ModelSection())
    with init_empty_weights():
        return get_peft_model(model, build_lora_config(LoraSection(r=R)))


def packed(*lengths: int) -> MicroBatch:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return MicroBatch(positions, torch.zeros_like(positions), positions.numel(), position_ids=positions)


def by_hand(tokens: int, targets: int, squares: int) -> float:
    linear = tokens * (4 * FROZEN + 6 * TRAINED) + targets * 4 * VOCABULARY * HIDDEN
    return linear + 6 * LAYERS * HIDDEN * squares


def test_the_sum_by_hand() -> None:
    assert StepFlops(adapted()).count([packed(10, 22), packed(32)]) == by_hand(64, 64, 10**2 + 22**2 + 32**2)


def test_padding_and_tokens_without_loss_cost_nothing() -> None:
    mask = torch.tensor([[1] * 10 + [0] * 6, [1] * 16])
    targets = torch.full((2, 16), -100)
    targets[1, 4:] = 7
    counted = StepFlops(adapted()).count([MicroBatch(mask, targets, 26, attention_mask=mask)])
    assert counted == by_hand(26, 12, 10**2 + 16**2)


def test_flat_factors_count_as_trained() -> None:
    model = adapted()
    before = StepFlops(model).per_token
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert StepFlops(model).per_token == before


def test_a_window_bounds_what_a_token_sees() -> None:
    flops = StepFlops(adapted("random:phi3-mini,sliding_window=8,num_hidden_layers=1"))
    assert list(flops.attention) == [8]
    pairs = sum(2 * min(place, 7) + 1 for place in range(20))
    inside = flops.count([packed(20)]) - 20 * (flops.per_token + flops.per_target)
    assert inside == 6 * flops.attention[8] * pairs


def test_experts_count_by_how_many_a_token_visits() -> None:
    from transformers import MixtralConfig

    def per_token(visited: int, r: int = 0) -> float:
        config = MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=visited,
        )
        model = build_empty_model(config, ModelSection())
        model.requires_grad_(False)
        if r:
            model = apply_adapter(model, LoraSection(r=r, target_modules=("experts",)), torch.float32)
        return StepFlops(model).per_token

    assert per_token(2) - per_token(1) == 4 * 3 * 32 * 48
    adapters = 6 * 4 * ((32 + 96) + (48 + 32))  # of rank 4, trained
    assert per_token(2, r=4) - per_token(2) == 2 * adapters


@pytest.mark.parametrize(
    ("card", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 311.9e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("Some other card", "bf16", None),
        ("NVIDIA H200", "fp32", None),
    ],
)
def test_peaks(card: str, precision: str, peak: float | None) -> None:
    assert find_peak_flops(card, precision) == (pytest.approx(peak) if peak else None)


def test_steps_may_overlap() -> None:
    meter = MfuMeter(StepFlops(adapted()), peak=1e12)
    meter.on_batches(1, [packed(10)])
    meter.on_batches(2, [packed(20)])
    first, second = (FinishedStep(number, 2.0, 1.0, seconds, is_logged=False) for number, seconds in ((1, 0.5), (2, 1)))
    assert meter.after_step(first) == {"perf/mfu": by_hand(10, 10, 100) / 0.5e12}
    assert meter.after_step(second) == {"perf/mfu": by_hand(20, 20, 400) / 1e12}


def test_no_meter_without_a_known_card() -> None:
    assert MfuMeter.for_device(adapted(), torch.device("cpu"), "bf16") is None
