"""Tokens go to the experts that from_pretrained's model chooses, in bf16, at every stage and in NF4."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import one_rank
from tests.families import save_family
from tests.mixtures import store_dequantised
from trainer.config import LoraSection, ModelSection, QuantizationSection, TrainingSection, ZeroSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.model.expert_layers import find_expert_modules
from trainer.parallel.engine.deepspeed_engine import build_deepspeed_config, start_engine
from trainer.parallel.engine.optimizer import build_optimizer

CPU = torch.device("cpu")
SOME = ("deepseek_v3", "ernie4_5_moe")
"""With a bias of the choice in 32 bits, and with a router in 32 bits."""
OTHERS = (
    "afmoe axk1 deepseek_v2 dots1 exaone_moe flex_olmo glm4_moe glm4_moe_lite gpt_oss granitemoe hunyuan_v1_moe hy_v3 "
    "jamba lfm2_moe minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_moe qwen3_next solar_open"
).split()
ROW = 128
Choices = list[torch.Tensor]


@contextmanager
def watched(model: Any) -> Iterator[Choices]:
    """Record what each module of experts gets besides the hidden states: numbers of experts, or weights of all."""
    found: Choices = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)][1:]
        whole = [each for each in tensors if not each.is_floating_point()]
        found.extend(each.clone() for each in (whole or [each != 0 for each in tensors]))

    hooks = [each.register_forward_pre_hook(record, with_kwargs=True) for each in find_expert_modules(model).values()]
    yield found
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def choose(model: Any, count: int, inner: Any = None) -> Choices:
    draw = torch.Generator().manual_seed(1)
    with watched(inner or model) as found:
        for _ in range(0, count, 16 * ROW):
            model(input_ids=torch.randint(3, 380, (16, ROW), generator=draw), use_cache=False)
    assert found and any(len(each.unique()) > 1 for each in found), "no choice was seen"
    return found


def plain(folder: Path, count: int) -> Choices:
    from transformers import AutoModelForCausalLM

    return choose(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), count)


def check(kind: str, count: int, folder: Path) -> None:
    base = save_family(folder / "model", kind)
    expected = plain(base, count)
    for stage in (0, 2, 3):
        (folder / f"store-{stage}").mkdir()
        with one_rank(folder / f"store-{stage}"):
            section = TrainingSection(precision="bf16")
            zero = ZeroSection.model_validate({"stage": stage} | ({"gather": "module"} if stage == 3 else {}))
            settings = build_deepspeed_config(section, zero, "bf16", on_gpu=False)
            cut = settings if stage == 3 else None
            common: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "attention": None}
            model = load_base_model(str(base), ModelSection(), deepspeed_config=cut, **common)
            adapted = apply_adapter(model, LoraSection(r=2, experts=False), torch.bfloat16)
            engine: Any = start_engine(adapted, build_optimizer(adapted, section, LoraSection(), fused=False), settings)
            engine.eval()
            found = choose(engine, count, engine.module.get_base_model())
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected), f"stage {stage}"
    packed = load_base_model(
        str(base), ModelSection(), dtype=torch.bfloat16, device=CPU, attention=None, quantization=QuantizationSection()
    )
    whole = store_dequantised(base, folder / "dequantised", four_bit=True, precision="bfloat16")
    assert all(map(torch.equal, choose(packed, count), plain(whole, count))), "NF4"


@pytest.mark.parametrize("kind", SOME)
def test_experts_are_those_of_from_pretrained(kind: str, tmp_path: Path) -> None:
    check(kind, 2_000, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [*SOME, *OTHERS])
def test_so_they_are_for_100_000_tokens_in_every_family(kind: str, tmp_path: Path) -> None:
    check(kind, 100_000, tmp_path)
