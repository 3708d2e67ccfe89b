"""What Axolotl, LLaMA-Factory and TRL call alike: optimizers, schedules, DeepSpeed's files, attention, precision."""

import json
import re
from typing import Any

from launcher.importing.translation import Translation

INT8 = (
    "rows of the weights and tokens of their inputs are int8, and so are the products, without LLM.int8's outliers in "
    "16 bits; on Hopper and Ada quantization.quant_type: fp8 is faster"
)

ADAMW = (
    "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit",
    "adamw_anyprecision", "optimi_adamw", "flash_adamw", "adamw_torch_xla", "adamw_torch_npu_fused",
)  # fmt: skip
EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
# 8 bits in another layout, or fewer: the same step, the state a little coarser or finer.
NEAR_EIGHT_BITS = ("adamw_torch_8bit", "ao_adamw_8bit", "adamw_torch_4bit", "ao_adamw_4bit", "ao_adamw_fp8")
SCHEDULES = (
    "linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt",
)  # fmt: skip
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "disabled": "eager"}
REPORTERS = ("wandb", "tensorboard")
QUANTIZED_NAMES = re.compile(r"(?<![A-Za-z])(GPTQ|AWQ|AQLM|EETQ|HQQ|NVFP4|MXFP4)(?![A-Za-z])", re.IGNORECASE)


def optimizer(translation: Translation, *names: str) -> None:
    """AdamW in one of its forms; others are refused."""
    theirs = translation.theirs
    value = theirs.take(*names)
    if value is None:
        return
    name, word = names[0], str(value).lower().removeprefix("optimizernames.")
    if word in ADAMW:
        translation.set("training.optimizer", "adamw", name)
    elif word in EIGHT_BITS or word in NEAR_EIGHT_BITS:
        translation.set("training.optimizer", "adamw_8bit", name)
        if word in NEAR_EIGHT_BITS:
            translation.differs(name, f"{word} of torchao becomes bitsandbytes' AdamW with 8-bit state")
    else:
        raise theirs.refused(name, "only AdamW is offered, in 32 and 8 bits")


def schedule(translation: Translation, name: str, *others: str) -> None:
    """The course of the learning rate."""
    theirs = translation.theirs
    value = theirs.take(name, *others)
    least = theirs.take("cosine_min_lr_ratio")
    if least is not None and float(least) >= 1:
        translation.set("training.lr_scheduler", "constant_with_warmup", "cosine_min_lr_ratio")
    elif least is not None:
        translation.set("training.lr_scheduler", "cosine_with_min_lr", name)
        translation.set("training.min_lr_ratio", least, "cosine_min_lr_ratio")
    elif value is not None and str(value).lower() in SCHEDULES:
        translation.set("training.lr_scheduler", str(value).lower(), name)
    elif value is not None:
        raise theirs.refused(name, f"schedules here are {', '.join(SCHEDULES)}")


def warmup(translation: Translation) -> None:
    """Steps, a fraction of them, or a fraction written as steps."""
    theirs = translation.theirs
    steps, ratio = theirs.take("warmup_steps"), theirs.take("warmup_ratio")
    if isinstance(steps, float) and 0 < steps < 1:
        translation.set("training.warmup_ratio", steps, "warmup_steps")
    elif steps is not None and not (steps == 0 and ratio is not None):
        translation.set("training.warmup_steps", int(steps), "warmup_steps")
    elif ratio is not None:
        translation.set("training.warmup_ratio", ratio, "warmup_ratio")


def attention(translation: Translation, *names: str) -> None:
    """The kernel of attention: all compute the same, so that only plain ones are asked for by name."""
    name = translation.theirs.has(*names)
    value = translation.theirs.tree[name] if name else None
    if name is None or value in (True, "auto"):
        return
    word = ATTENTION.get(str(value))
    if word:
        translation.set("model.attn_implementation", word, name)
    else:
        translation.set("model.attn_implementation", "auto", name)
        translation.differs(name, f"{value} becomes auto, which takes the fastest kernel there is for the same result")


def precision(translation: Translation) -> None:
    """bf16 and fp16, which may be on, off or left to the card."""
    theirs = translation.theirs
    bf16, fp16 = theirs.take("bf16", "bfloat16"), theirs.take("fp16", "float16")
    theirs.take("tf32", "torch_dtype", "dtype", "float32")
    if bf16 is True or bf16 in ("true", "full"):
        translation.set("training.precision", "bf16", "bf16")
    elif bf16 == "auto" or (bf16 is None and not fp16):
        name = "bf16" if bf16 else None
        if name:
            translation.set("training.precision", "auto", name)
        else:
            translation.default("training.precision", "auto")
    elif fp16:
        translation.set("training.precision", "fp16", "fp16")
    else:
        translation.set("training.precision", "fp32", "bf16")


def reporters(translation: Translation, name: str) -> None:
    """Who hears of the loss; what is written to files is written anyway."""
    value = translation.theirs.take(name)
    if value is None:
        return
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    known = [word for word in words if word in REPORTERS]
    if unknown := [word for word in words if word not in (*REPORTERS, "none", "all")]:
        translation.leave_out(name, f"{', '.join(unknown)}: reports go to wandb and tensorboard")
    translation.set("logging.report_to", known or "none", name)


def experts(translation: Translation, *names: str) -> None:
    """Experts in one tensor get an adapter there only if they are named: PEFT's all-linear means layers."""
    value = translation.theirs.take(*names)
    if value:
        listed = value.split(",") if isinstance(value, str) else list(value)
        translation.set("lora.target_parameters", [name.strip() for name in listed], names[0])
    elif translation.settings["lora.target_modules"].value == ["all-linear"]:
        translation.default("lora.experts", False)


def deepspeed(translation: Translation, name: str = "deepspeed") -> None:
    """The stage and the offload of a file of DeepSpeed's, from its content where it is there, else from its name."""
    theirs = translation.theirs
    value = theirs.take(name)
    if value is None:
        return
    settings = value if isinstance(value, dict) else _read_json(translation, str(value))
    if settings is not None:
        zero = settings.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        offload = {part: (zero.get(part) or {}).get("device") in ("cpu", "nvme") for part in _OFFLOAD}
    else:
        found = re.search(r"(?:zero|z|stage)[_-]?([0-3])", str(value), re.IGNORECASE)
        if found is None:
            raise theirs.refused(name, "is not there, and its name does not say the stage; put it beside this file")
        stage, everything = int(found.group(1)), bool(re.search("offload", str(value), re.IGNORECASE))
        offload = dict.fromkeys(_OFFLOAD, everything)
        if stage < 3:
            offload["offload_param"] = False
        translation.differs(name, f"the file is not there: stage {stage} is read off its name")
    set_stage(translation, name, stage, optimizer=offload["offload_optimizer"], parameters=offload["offload_param"])


_OFFLOAD = ("offload_optimizer", "offload_param")


def set_stage(translation: Translation, name: str, stage: int, *, optimizer: bool, parameters: bool) -> None:
    """ZeRO's stage, and what is kept in host memory."""
    translation.set("zero.stage", stage, name)
    if optimizer and stage:
        translation.set("zero.offload_optimizer", True, name)
        if (
            translation.settings.get("training.optimizer")
            and translation.settings["training.optimizer"].value != "adamw"
        ):
            translation.set("training.optimizer", "adamw", name)
            translation.differs(name, "an optimizer in host memory has 32-bit state")
    if stage == 3 and "training.torch_compile" in translation.settings:
        del translation.settings["training.torch_compile"]
        translation.leave_out("torch_compile", "stage 3's gathers break the graph at every layer")
    if parameters and stage == 3:
        translation.set("zero.offload_parameters", True, name)


def fsdp(translation: Translation) -> None:
    """Fully sharded parameters are ZeRO's stage 3, sharded gradients stage 2."""
    theirs = translation.theirs
    plain, config = theirs.take("fsdp"), theirs.take("fsdp_config")
    theirs.take("fsdp_version", "fsdp_final_state_dict_type", "fsdp_transformer_layer_cls_to_wrap")
    if plain is None and config is None:
        return
    name = "fsdp_config" if config else "fsdp"
    words = plain if isinstance(plain, list) else str(plain or "").split()
    settings = config if isinstance(config, dict) else {}
    strategy = str(settings.get("fsdp_sharding_strategy") or settings.get("sharding_strategy") or "FULL_SHARD")
    stage = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2}.get(strategy.upper(), 3)
    offload = bool(settings.get("fsdp_offload_params") or settings.get("offload_params") or "offload" in words)
    set_stage(translation, name, stage, optimizer=offload, parameters=offload)
    translation.differs(name, f"FSDP's sharding becomes DeepSpeed's ZeRO stage {stage}, which computes the same")


def _read_json(translation: Translation, path: str) -> dict[str, Any] | None:
    for folder in (
        translation.theirs.folder,
        translation.theirs.folder.parent,
        translation.theirs.folder.parent.parent,
    ):
        file = folder / path
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                return None
            return content if isinstance(content, dict) else None
    return None
