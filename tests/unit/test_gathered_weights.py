"""What DeepSpeed leaves gathered at stage 3 (`zero.gather: module`), with each way of recomputing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import backward, one_rank, tiny_model
from trainer.config import LoraSection, TrainingSection, ZeroSection
from trainer.model.adapter import apply_adapter
from trainer.parallel.engine.deepspeed_engine import build_deepspeed_config, start_engine
from trainer.parallel.engine.optimizer import build_optimizer
from trainer.patches.deepspeed_workarounds import install_workarounds
from trainer.patches.recompute import enable_recomputation


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", ["none", "non_reentrant", "selective"])
def test_no_frozen_weight_stays_gathered_after_the_backward_pass(recomputed: str, tmp_path: Path) -> None:
    """DeepSpeed's issue 8148 says so of recomputed layers."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    section = TrainingSection.model_validate({"gradient_checkpointing": recomputed, "precision": "fp32"})
    with one_rank(tmp_path):
        model: Any = apply_adapter(tiny_model(torch.float32, torch.device("cpu")), LoraSection(r=4), torch.float32)
        enable_recomputation(model, section)
        zero = ZeroSection(stage=3, gather="module", persistence_threshold=0)
        optimizer = build_optimizer(model, section, LoraSection(), fused=False)
        engine: Any = start_engine(model, optimizer, build_deepspeed_config(section, zero, "fp32", on_gpu=False))
        install_workarounds(engine)
        weights = {name: each for name, each in engine.module.named_parameters() if not each.requires_grad}

        def gathered() -> set[str]:
            return {name for name, each in weights.items() if each.ds_status != ZeroParamStatus.NOT_AVAILABLE}

        seen: list[set[str]] = []
        for layer in engine.module.get_base_model().model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(lambda *_: seen.append(gathered()))
        for _ in range(2):
            backward(engine)
            assert gathered() == set()
            engine.step()
        assert seen and all(seen), "no weight was ever gathered"
