"""What single settings cannot say of themselves: combinations that cannot work, refused before anything is loaded."""

from trainer.config.errors import UserError, shown
from trainer.config.gather import gathers_by_layer, why_not_by_layer
from trainer.config.sections import RunConfig
from trainer.config.types import AUTO
from trainer.config.zero_extra import check_extra


def check_combinations(config: RunConfig) -> None:
    """Raise UserError for the first combination of settings that cannot work."""
    _check_adapter(config)
    _check_zero(config)
    _check_data(config)
    _check_training(config)
    if config.scu.enabled:
        _check_scu(config)


def _check_adapter(config: RunConfig) -> None:
    lora = config.lora
    if not config.base_model.strip():
        raise UserError("base_model='': empty; name a folder or a model on the hub")
    if not config.output_dir.strip():
        raise UserError("output_dir='': empty; name a folder")
    if not lora.target_modules:
        raise UserError("lora.target_modules=[]: no targets; write all-linear or names such as q_proj")
    if "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        raise UserError(
            f"lora.target_modules={shown(lora.target_modules)}: all-linear stands alone; remove it or the names"
        )
    if config.adapter == "none":
        if lora.adapter_path:
            raise UserError(f"lora.adapter_path={lora.adapter_path}: adapter is none; set adapter: lora")
        return
    if lora.init != "default" and lora.adapter_path:
        raise UserError(f"lora.init={lora.init}: the adapter at lora.adapter_path has its values already; remove one")
    if config.adapter == "qlora" and lora.init in ("pissa", "pissa_niter_16", "olora"):
        raise UserError(
            f"lora.init={lora.init}: needs full-precision weights; use loftq or default with adapter: qlora"
        )
    if config.adapter == "lora" and lora.init == "loftq":
        raise UserError("lora.init=loftq: prepares an adapter for a 4-bit base; set adapter: qlora, or use pissa")
    reads_base = lora.init in ("pissa", "pissa_niter_16", "olora", "loftq")
    reads_factors = lora.init == "orthogonal" and not gathers_by_layer(config)
    if config.zero.stage == 3 and (reads_base or reads_factors):
        raise UserError(
            f"lora.init={lora.init}: needs each weight whole, which zero.stage=3 never has; use zero.stage: 2"
        )


def _check_zero(config: RunConfig) -> None:
    zero = config.zero
    stage = "auto" if zero.stage == AUTO else zero.stage
    if zero.offload_optimizer and zero.stage == 0:
        raise UserError("zero.offload_optimizer=true: stage 0 keeps the optimizer whole; use zero.stage: 1, 2 or 3")
    if zero.offload_parameters and zero.stage != 3:
        raise UserError(
            f"zero.offload_parameters=true: only stage 3 partitions parameters, and zero.stage={stage}; use 3"
        )
    if config.training.optimizer == "adamw_8bit" and zero.offload_optimizer:
        raise UserError(
            "training.optimizer=adamw_8bit: its state must stay on the GPU; turn zero.offload_optimizer off"
        )
    if config.training.optimizer == "adamw_8bit" and zero.stage == 0 and config.training.precision in ("bf16", "fp16"):
        raise UserError(
            "training.optimizer=adamw_8bit: cannot be with zero.stage=0 in 16 bits; use zero.stage: 1, 2 or 3"
        )
    check_extra(zero.extra)
    why_not = why_not_by_layer(config)
    if zero.gather == "layer" and zero.stage in (0, 1, 2):
        raise UserError(
            f"zero.gather=layer: only stage 3 partitions the base, and zero.stage={zero.stage}; use stage 3, or auto"
        )
    if zero.gather == "layer" and why_not:
        raise UserError(f"zero.gather=layer: {why_not}; use module, or auto")
    if config.adapter == "qlora" and zero.offload_parameters and not gathers_by_layer(config):
        raise UserError(
            "zero.offload_parameters=true: zero.gather=module cannot offload 4-bit weights; use zero.gather: layer, "
            "adapter: lora, or turn it off"
        )
    if zero.stage == 3 and not gathers_by_layer(config) and config.model.added_tokens:
        raise UserError("model.added_tokens: the embedding cannot be resized when partitioned; use zero.stage 0 to 2")
    if config.training.torch_compile and zero.stage == 3:
        raise UserError(
            "training.torch_compile=true: stage 3's gathers break the graph at every layer; use zero.stage 0 to 2"
        )


def _check_data(config: RunConfig) -> None:
    data = config.dataset
    if bool(data.path) == bool(data.mix):
        problem = "both given" if data.path else "nothing to train on"
        raise UserError(f"dataset.path={shown(data.path)}, dataset.mix of {len(data.mix)}: {problem}; give one of them")
    for label, source in [("dataset", data), ("dataset.evaluation", data.evaluation)] + [
        (f"dataset.mix.{index}", source) for index, source in enumerate(data.mix)
    ]:
        if source is None:
            continue
        if not source.path and not (label == "dataset" and data.mix):
            raise UserError(f"{label}.path: missing; name a file, a folder or a data set on the hub")
        if source.format == "custom" and not (source.template and "completion" in source.fields):
            raise UserError(
                f"{label}.format=custom: needs {label}.template with {{field}} marks and {label}.fields.completion"
            )
        if source.template and source.format not in ("custom", "auto"):
            raise UserError(f"{label}.template: only format: custom uses it, and {label}.format={source.format}")
    if data.val_split and data.evaluation:
        raise UserError(f"dataset.val_split={data.val_split}: dataset.evaluation is given as well; keep one")
    unknown = set(data.train_on) - {"assistant", "user", "system", "tool", "all"}
    if unknown or not data.train_on:
        raise UserError(f"dataset.train_on={shown(data.train_on)}: roles are assistant, user, system, tool, or all")
    if data.streaming and not config.training.max_steps:
        raise UserError("dataset.streaming=true: the end of a stream is not known; set training.max_steps")
    if data.streaming and data.val_split:
        raise UserError("dataset.val_split: a stream cannot be split; give dataset.evaluation")


def _check_training(config: RunConfig) -> None:
    training = config.training
    if training.offload_activations and training.gradient_checkpointing not in ("non_reentrant", "selective"):
        raise UserError(
            f"training.offload_activations=true: moves what gradient checkpointing keeps, and "
            f"training.gradient_checkpointing={training.gradient_checkpointing}; use non_reentrant or selective"
        )
    if training.gradient_checkpointing == "selective" and config.adapter == "none":
        raise UserError("training.gradient_checkpointing=selective: needs an adapter; use non_reentrant")
    accumulation, together = training.gradient_accumulation_steps, training.global_batch_size
    rows = accumulation * (1 if training.batch_size == AUTO else training.batch_size)
    if accumulation > 1 and together is not None and (together == AUTO or together % rows):
        raise UserError(
            f"training.gradient_accumulation_steps={accumulation}: training.global_batch_size="
            f"{'auto' if together == AUTO else together} decides it; remove one, or set it to null"
        )
    evaluates = bool(config.dataset.val_split or config.dataset.evaluation)
    for name, wanted in (
        ("early_stopping", training.early_stopping),
        ("best_checkpoint", training.best_checkpoint),
        ("eval_steps", training.eval_steps),
    ):
        if wanted and not evaluates:
            raise UserError(
                f"training.{name}={shown(wanted)}: nothing is held out; set dataset.val_split or dataset.evaluation"
            )
    if (training.early_stopping or training.best_checkpoint) and not training.eval_steps:
        raise UserError("training.eval_steps=0: early_stopping and best_checkpoint look at evaluations; set it")
    if training.best_checkpoint and training.save_steps and training.save_steps % training.eval_steps:
        raise UserError(
            f"training.save_steps={training.save_steps}: best_checkpoint saves where it evaluated; "
            f"use a multiple of eval_steps={training.eval_steps}"
        )
    if training.warmup_steps is not None and training.max_steps and training.warmup_steps > training.max_steps:
        raise UserError(
            f"training.warmup_steps={training.warmup_steps}: more than training.max_steps={training.max_steps}; "
            "warm up for fewer"
        )
    reporters = config.logging.report_to
    if "none" in reporters:
        raise UserError(f"logging.report_to={shown(reporters)}: none stands alone; remove it or the others")
    unknown = set(reporters) - {"tensorboard", "wandb"}
    if unknown:
        raise UserError(f"logging.report_to={shown(reporters)}: choose from tensorboard, wandb, none")


def _check_scu(config: RunConfig) -> None:
    scu = config.scu
    if config.adapter == "none":
        raise UserError("scu.enabled=true: adapter is none, and the controller steers an adapter; use lora or qlora")
    if config.training.weight_decay > 0:
        raise UserError(
            f"training.weight_decay={config.training.weight_decay}: two regularisers would fight; 0 while scu.enabled"
        )
    if config.training.gradient_checkpointing == "reentrant" and config.zero.stage and scu.controller != "none":
        # Its nested backward passes hand an adapter's gradient to DeepSpeed in two pieces, and stages 1 to 3 take one.
        raise UserError("training.gradient_checkpointing=reentrant: not with scu.enabled; use non_reentrant")
    if scu.lambda_min >= scu.lambda_max:
        raise UserError(f"scu.lambda_min={scu.lambda_min}: must be below scu.lambda_max={scu.lambda_max}")
    if not scu.lambda_min <= scu.lambda_start <= scu.lambda_max:
        raise UserError(
            f"scu.lambda_start={scu.lambda_start}: must lie between scu.lambda_min={scu.lambda_min} "
            f"and scu.lambda_max={scu.lambda_max}"
        )
    if scu.target == "auto" and scu.measure == "delta" and scu.controller == "pi":
        raise UserError(
            "scu.target=auto: published targets are for measure: factors; give a number, 0.01 to start with"
        )
    if config.dataset.streaming and not scu.tokens:
        raise UserError("scu.tokens: the tokens of a stream cannot be counted; give the target tokens of one epoch")
