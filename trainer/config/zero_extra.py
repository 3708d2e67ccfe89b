"""Check which of DeepSpeed's keys `zero.extra` may have; those with a setting here are refused."""

from collections.abc import Iterator
from typing import Any

from trainer.config.errors import shown

# DeepSpeed's key -> our setting.
SETTINGS = {
    "train_batch_size": "training.batch_size and training.gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "training.batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_clipping": "training.max_grad_norm",
    "optimizer": "training.optimizer",
    "scheduler": "training.lr_scheduler",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "amp": "training.precision",
    "torch_autocast": "training.precision",
    "activation_checkpointing": "training.gradient_checkpointing",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer": "zero.offload_optimizer",
    "zero_optimization.offload_param": "zero.offload_parameters",
    "zero_optimization.cpu_offload": "zero.offload_optimizer",
    "zero_optimization.cpu_offload_params": "zero.offload_parameters",
    "zero_optimization.overlap_comm": "zero.overlap_comm",
    "zero_optimization.reduce_bucket_size": "zero.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "zero.allgather_bucket_size",
} | {
    f"zero_optimization.{prefix}{key}": ours
    for prefix in ("", "stage3_")
    for key, ours in {
        "prefetch_bucket_size": "zero.prefetch_bucket_size",
        "param_persistence_threshold": "zero.persistence_threshold",
        "max_live_parameters": "zero.max_live_parameters",
    }.items()
}
# Required by our training loop.
FIXED = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
# Parts of DeepSpeed that would replace our step, data or model.
REPLACE = (
    "autotuning", "compile", "compression_training", "curriculum_learning", "data_efficiency", "elasticity",
    "hybrid_engine", "pipeline", "progressive_layer_drop", "sequence_parallel_size", "sparse_attention",
    "tensor_parallel",
)  # fmt: skip


def check_extra(extra: dict[str, Any]) -> Iterator[str]:
    """Yield an error message for each key that has a setting here or is not compatible with our training loop."""
    partition = extra.get("zero_optimization", {})
    if not isinstance(partition, dict):
        yield f"zero.extra.zero_optimization={shown(partition)}: must be a map; the stage is set with zero.stage"
        return
    entries = {**extra, **{f"zero_optimization.{key}": value for key, value in partition.items()}}
    for key, value in entries.items():
        name = f"zero.extra.{key}={shown(value)}"
        if key in SETTINGS:
            yield f"{name}: has a setting here; use {SETTINGS[key]} instead"
        if key in FIXED:
            yield f"{name}: fixed by our optimizer; remove it"
        if key in REPLACE:
            yield f"{name}: this part of DeepSpeed is not supported; remove it"
    if "data_types" in extra:
        yield (
            f"zero.extra.data_types={shown(extra['data_types'])}: makes DeepSpeed use an optimizer that checkpoints "
            "do not support; remove it, or set training.precision: fp32"
        )
