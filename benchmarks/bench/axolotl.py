"""Axolotl's model for `benchmarks.bench.peers`: its own loader on a configuration like its examples.

Its packages are pinned to other versions than zerolora's, so it needs a folder of its own:
`pip install --target FOLDER axolotl`, or tests/bench/pack_axolotl.sh without a registry, and
`zerolora bench --peer axolotl --peer-packages axolotl=FOLDER`.
"""

from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.bench.assignment import Case
from benchmarks.bench.unsloth import draw_weights, write_sparse_checkpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load_axolotl_model(case: Case, folder: Path) -> Any:
    """Load Axolotl's model from a sparse checkpoint of zeros and draw its weights in place."""
    from axolotl.cli.config import load_cfg
    from axolotl.loaders import ModelLoader, load_tokenizer
    from peft.tuners.lora import LoraLayer

    checkpoint = folder / "axolotl" / case.base_model.replace(":", "-")
    if not (checkpoint / "config.json").exists():
        write_sparse_checkpoint(case.base_model, checkpoint)
    path = folder / "axolotl" / f"{case.name.replace(' ', '-')}.yaml"
    path.write_text(yaml.safe_dump(_configuration(case, checkpoint)))
    cfg = load_cfg(str(path))
    model, _ = ModelLoader(cfg, load_tokenizer(cfg)).load()
    with torch.no_grad():
        draw_weights(model)
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters("default", True)  # the adapter exists already and was drawn too
    return model


def _configuration(case: Case, checkpoint: Path) -> dict[str, Any]:
    """Return the settings its documentation recommends for LoRA on one GPU: its LoRA kernels, and Liger's others.

    Only what pip installs: Flash Attention 2 must be compiled, and its fork of cut cross-entropy is only on git.
    Liger's SwiGLU would be replaced by `lora_mlp_kernel`.
    """
    return {
        "base_model": str(checkpoint),
        "adapter": "qlora" if case.four_bit else "lora",
        "load_in_4bit": case.four_bit,
        "lora_r": case.rank,
        "lora_alpha": case.alpha,
        "lora_dropout": 0.0,
        "lora_target_modules": list(TARGETS) if case.targets == ["all-linear"] else case.targets,
        "lora_mlp_kernel": True,
        "lora_qkv_kernel": True,
        "lora_o_kernel": True,
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_rope": True,
        "liger_rms_norm": True,
        "liger_fused_linear_cross_entropy": True,
        "sequence_len": case.length,
        "sample_packing": False,
        "micro_batch_size": case.batch_size,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": 1e-4,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "constant",
        "bf16": case.bf16,
        "attn_implementation": "sdpa",
        "gradient_checkpointing": case.recompute,
        "datasets": [{"path": str(checkpoint), "type": "completion"}],
        "output_dir": str(checkpoint.parent / "out"),
    }
