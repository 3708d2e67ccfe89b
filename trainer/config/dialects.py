"""Recognize other trainers' files, and translate those of their settings that depend on the value."""

from collections.abc import Mapping
from typing import Any

from trainer.config.aliases import ALIASES, ELSEWHERE
from trainer.config.errors import UserError, shown
from trainer.config.sections import RunConfig

LORA_TARGETS = "lora.target_modules"
QLORA: dict[str, Any] = {"adapter": "qlora"}
INT8: dict[str, Any] = {"adapter": "qlora", "quantization.quant_type": "int8"}
NOTHING: dict[str, Any] = {}
PREFERENCES = "online methods (PPO, GRPO) are not offered here"
DPO: dict[str, Any] = {"task": "preference"}
KTO = DPO | {"preference.loss": "kto"}
DFT: dict[str, Any] = {"training.loss": "dft"}
ANSWERS, EVERY_TOKEN = {"dataset.train_on": ["assistant"]}, {"dataset.train_on": ["all"]}

# Names -> value -> equivalent settings here. ELSEWHERE has the advice for all other values.
_MEANINGS: dict[str, dict[Any, dict[str, Any]]] = {
    "load_in_4bit": {True: QLORA, False: NOTHING},
    "load_in_8bit": {True: INT8, False: NOTHING},
    "quantization_bit": {4: QLORA, 8: INT8},
    "quantization_method": {"bnb": NOTHING, "bitsandbytes": NOTHING},
    "finetuning_type": {"lora": NOTHING, "full": {"adapter": "none"}},
    "stage": {"sft": NOTHING, "dpo": DPO, "kto": KTO, "rm": {"task": "reward"}},
    "rl": {False: NOTHING, "dpo": DPO}
    | {name: DPO | {"preference.loss": name} for name in ("ipo", "simpo", "orpo", "kto")},
    "lora_target_linear": {True: {LORA_TARGETS: ["all-linear"]}, False: NOTHING},
    "bf16": {True: {"training.precision": "bf16"}, False: NOTHING, "auto": NOTHING},
    "fp16": {True: {"training.precision": "fp16"}, False: NOTHING},
    "resume": {False: NOTHING, True: {"training.resume_from_checkpoint": "latest"}},
    "do_train": {True: NOTHING},
    "save_strategy": {"no": {"training.save_steps": 0}, "epoch": {"training.saves_per_epoch": 1}, "steps": NOTHING},
    "tf32 flash_attention flash_attn": {False: NOTHING, "auto": NOTHING},
    "do_eval push_to_hub group_by_length": {False: NOTHING},
    "pad_to_sequence_len eval_sample_packing": {True: NOTHING, False: NOTHING},
    "train_on_inputs train_on_prompt": {True: EVERY_TOKEN, False: NOTHING},
    "assistant_only_loss completion_only_loss": {True: ANSWERS},
    "loss_type": {"nll": NOTHING, "chunked_nll": NOTHING, "dft": DFT},
    "use_dft_loss": {True: DFT, False: NOTHING},
    "use_eaft_loss use_eaft": {True: {"training.loss": "eaft"}, False: NOTHING},
    "label_smoothing_factor": {0: NOTHING},
    "mask_history": {True: {"dataset.train_on": ["last"]}, False: NOTHING},
    "train_on_eos train_on_eot": {"turn": NOTHING},
}
MEANINGS = {name: values for names, values in _MEANINGS.items() for name in names.split()}
_PREFERENCE_STAGES = ("ppo", "grpo", "gdpo", "reward")


def translate_setting(name: str, value: Any) -> tuple[dict[str, Any], str] | None:
    """Return the settings equivalent to another trainer's setting, and a note; None if `name` is not one of them.

    Raises UserError, with what to write instead, for a value without an equivalent.
    """
    if name not in ELSEWHERE:
        return ({}, f"{name}: empty, ignored") if value is None and name in ALIASES else None
    if value is None or value in ([], {}, ""):
        return {}, f"{name}: empty, ignored"
    written = f"{name}: {shown(value)}"
    word = value.strip().lower() if isinstance(value, str) else value
    for known, settings in MEANINGS.get(name, {}).items():
        # True equals 1 in Python, but they are different values here.
        if (type(known), known) == (type(word), word):
            if not settings:
                return {}, f"{written} has no effect here and is ignored"
            means = ", ".join(f"{ours}: {shown(ours_value)}" for ours, ours_value in settings.items())
            return settings, f"{written} is read as {means}"
    if name in ("rl", "stage") and word in _PREFERENCE_STAGES:
        raise UserError(f"{name}={shown(value)}: {PREFERENCES}")
    raise UserError(f"{name}={shown(value)}: not a setting here; {ELSEWHERE[name]}")


# Names that only one trainer has.
TRAINER_NAMES = {
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


def recognize_trainer(tree: Mapping[Any, Any], *, enough: int = ENOUGH) -> str | None:
    """Return the trainer that a file was written for; None for our files, which may have a few names of others.

    A file is theirs if it has at least `enough` of their names, and more than twice as many as sections of ours.
    """
    names = {str(name) for name in tree}
    counts = {trainer: len(names & known) for trainer, known in TRAINER_NAMES.items()}
    best = max(counts, key=lambda trainer: counts[trainer])
    ours = len(names & set(RunConfig.model_fields) - {"base_model", "adapter", "output_dir", "seed"})
    # LLaMA-Factory also has a `dataset`, which is not a section.
    ours -= isinstance(tree.get("dataset"), str)
    return best if counts[best] >= enough and counts[best] > 2 * ours else None
