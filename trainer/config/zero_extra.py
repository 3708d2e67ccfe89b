"""`zero.extra`: which of DeepSpeed's keys it may hold; those that a setting here writes would be written twice."""

from collections.abc import Iterator
from typing import Any

from trainer.config.errors import shown

# DeepSpeed's key -> what says it here.
SETTINGS_OF = {
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
# What training here relies on.
FIXED = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
# Parts of DeepSpeed that replace the step, the data or the model that are ours.
REPLACE = (
    "autotuning", "compile", "compression_training", "curriculum_learning", "data_efficiency", "elasticity",
    "hybrid_engine", "pipeline", "progressive_layer_drop", "sequence_parallel_size", "sparse_attention",
    "tensor_parallel",
)  # fmt: skip


def extra_mistakes(extra: dict[str, Any]) -> Iterator[str]:
    """A line for each key that a setting here writes, or that training here cannot do with."""
    partition = extra.get("zero_optimization", {})
    if not isinstance(partition, dict):
        yield f"zero.extra.zero_optimization={shown(partition)}: must be a map; the stage is set with zero.stage"
        return
    entries = {**extra, **{f"zero_optimization.{key}": value for key, value in partition.items()}}
    for key, value in entries.items():
        name = f"zero.extra.{key}={shown(value)}"
        if key in SETTINGS_OF:
            yield f"{name}: is set with {SETTINGS_OF[key]}; use that, and remove it here"
        if key in FIXED:
            yield f"{name}: the optimizer here needs it as it is; remove it"
        if key in REPLACE:
            yield f"{name}: this part of DeepSpeed cannot run within training here; remove it"
    if "data_types" in extra:
        yield (
            f"zero.extra.data_types={shown(extra['data_types'])}: DeepSpeed then takes an optimizer whose state "
            "no checkpoint here knows; leave it out, or set training.precision: fp32"
        )
