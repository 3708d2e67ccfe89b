"""Settings of other trainers whose value decides what they mean: translated, left out with a note, or refused."""

from typing import Any

from trainer.config.aliases import ALIASES, ELSEWHERE
from trainer.config.errors import UserError, shown

LORA_TARGETS = "lora.target_modules"
QLORA: dict[str, Any] = {"adapter": "qlora"}
INT8: dict[str, Any] = {"adapter": "qlora", "quantization.quant_type": "int8"}
NOTHING: dict[str, Any] = {}
PREFERENCES = "preference training (DPO and relatives) is not offered here"
ANSWERS, EVERY_TOKEN = {"dataset.train_on": ["assistant"]}, {"dataset.train_on": ["all"]}

# Names -> value -> the settings it stands for. ELSEWHERE says what to write instead of any other value.
_MEANINGS: dict[str, dict[Any, dict[str, Any]]] = {
    "load_in_4bit": {True: QLORA, False: NOTHING},
    "load_in_8bit": {True: INT8, False: NOTHING},
    "quantization_bit": {4: QLORA, 8: INT8},
    "quantization_method": {"bnb": NOTHING, "bitsandbytes": NOTHING},
    "finetuning_type": {"lora": NOTHING, "full": {"adapter": "none"}},
    "stage": {"sft": NOTHING},
    "lora_target_linear": {True: {LORA_TARGETS: ["all-linear"]}, False: NOTHING},
    "bf16": {True: {"training.precision": "bf16"}, False: NOTHING, "auto": NOTHING},
    "fp16": {True: {"training.precision": "fp16"}, False: NOTHING},
    "resume": {False: NOTHING, True: {"training.resume_from_checkpoint": "latest"}},
    "do_train": {True: NOTHING},
    "save_strategy": {"no": {"training.save_steps": 0}, "epoch": {"training.saves_per_epoch": 1}, "steps": NOTHING},
    "tf32 flash_attention flash_attn": {False: NOTHING, "auto": NOTHING},
    "do_eval push_to_hub group_by_length rl": {False: NOTHING},
    "pad_to_sequence_len eval_sample_packing": {True: NOTHING, False: NOTHING},
    "train_on_inputs train_on_prompt": {True: EVERY_TOKEN, False: NOTHING},
    "assistant_only_loss completion_only_loss": {True: ANSWERS},
    "train_on_eos train_on_eot": {"turn": NOTHING},
    # Its earlier name.
    "ops.liger": {
        "auto": {"ops.elementwise": "auto"},
        "on": {"ops.elementwise": "auto"},
        "off": {"ops.elementwise": "off"},
    },
}
MEANINGS = {name: values for names, values in _MEANINGS.items() for name in names.split()}
_PREFERENCE_STAGES = ("dpo", "ipo", "kto", "orpo", "simpo", "ppo", "grpo", "gdpo", "rm", "reward")


def understood(name: str, value: Any) -> tuple[dict[str, Any], str] | None:
    """Return the settings that another trainer's setting stands for, and a note; None if `name` is not one of them.

    Raises UserError, with what to write instead, for a value that has no counterpart.
    """
    if name not in ELSEWHERE:
        return ({}, f"{name}: empty, left out") if value is None and name in ALIASES else None
    if value is None or value in ([], {}, ""):
        return {}, f"{name}: empty, left out"
    written = f"{name}: {shown(value)}"
    word = value.strip().lower() if isinstance(value, str) else value
    for known, settings in MEANINGS.get(name, {}).items():
        # True equals 1 in Python, and neither is meant by the other.
        if (type(known), known) == (type(word), word):
            if not settings:
                return {}, f"{written} changes nothing here and is left out"
            means = ", ".join(f"{ours}: {shown(ours_value)}" for ours, ours_value in settings.items())
            return settings, f"{written} is read as {means}"
    if name in ("rl", "stage") and word in _PREFERENCE_STAGES:
        raise UserError(f"{name}={shown(value)}: {PREFERENCES}")
    raise UserError(f"{name}={shown(value)}: not a setting here; {ELSEWHERE[name]}")
