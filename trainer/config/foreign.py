"""Recognise the trainer that a configuration was written for, by the names in it."""

from collections.abc import Mapping
from typing import Any

from trainer.config.sections import RunConfig

# Names that only one trainer has; those that several have prove nothing.
OF_TRAINERS = {
    "LLaMA-Factory": {
        "finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_target", "lora_rank", "quantization_bit",
        "preprocessing_num_workers", "val_size", "stage", "train_dataset", "peft_config", "dist_config", "mask_history",
    },
    "Axolotl": {
        "micro_batch_size", "sequence_len", "datasets", "pretraining_dataset", "lora_target_linear", "val_set_size",
        "saves_per_epoch", "evals_per_epoch", "dataset_prepared_path", "pad_to_sequence_len", "lora_model_dir",
        "load_in_8bit", "num_epochs", "sample_packing", "eval_sample_packing", "flash_attention", "wandb_watch",
    },
    "TRL": {
        "dataset_name", "use_peft", "lora_task_type", "max_seq_length", "dataset_text_field", "assistant_only_loss",
        "completion_only_loss", "dataset_train_split", "dataset_test_split", "dataset_config",
    },
    "accelerate": {"compute_environment", "distributed_type", "mixed_precision", "num_processes"},
}  # fmt: skip
ENOUGH = 2


def written_for(tree: Mapping[Any, Any], *, enough: int = ENOUGH) -> str | None:
    """Return the trainer that a file was written for; None for one of ours, which may have a few of their names.

    A file counts as theirs if it has `enough` of their names, and more than twice as many as of our sections.
    """
    names = {str(name) for name in tree}
    counts = {trainer: len(names & known) for trainer, known in OF_TRAINERS.items()}
    best = max(counts, key=lambda trainer: counts[trainer])
    ours = len(names & set(RunConfig.model_fields) - {"base_model", "adapter", "output_dir", "seed"})
    # LLaMA-Factory has a `dataset`, too, which is no section.
    ours -= isinstance(tree.get("dataset"), str)
    return best if counts[best] >= enough and counts[best] > 2 * ours else None
