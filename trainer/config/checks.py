"""Checks of combinations of settings, made before anything is loaded."""

from collections.abc import Iterator

from trainer.config.adapter_settings import read_initial_adapter
from trainer.config.errors import DATA_WANTED, UserError, shown
from trainer.config.sections import RunConfig
from trainer.config.training_sections import TrainingSection
from trainer.config.types import AUTO
from trainer.config.zero import check_extra, gathers_by_layer, why_not_by_layer

ROLES = ("assistant", "user", "system", "tool")
HIGHEST_USUAL_RATE = 1e-2
LARGEST_USUAL_SCALE = 32.0


def check_combinations(config: RunConfig) -> None:
    """Raise UserError for the first combination of settings that cannot work."""
    for mistake in find_invalid_combinations(config):
        raise UserError(mistake)


def find_invalid_combinations(config: RunConfig) -> Iterator[str]:
    """Yield an error message for each combination of settings that cannot work; it begins with one of their names."""
    yield from _check_adapter(config)
    if config.training.qat:
        yield from _check_qat(config)
    yield from _check_zero(config)
    yield from _check_data(config)
    yield from _check_training(config)
    if config.scu.enabled:
        yield from _check_scu(config)


def _check_adapter(config: RunConfig) -> Iterator[str]:
    lora = config.lora
    if not config.base_model.strip():
        yield "base_model='': empty; use a folder or a model on the hub"
    if not config.output_dir.strip():
        yield "output_dir='': empty; use a folder"
    if not lora.target_modules:
        yield "lora.target_modules=[]: no targets; write all-linear or names such as q_proj"
    if "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        yield f"lora.target_modules={shown(lora.target_modules)}: all-linear includes all names; remove it or them"
    if config.adapter == "none":
        return
    if lora.init != "default" and lora.adapter_path:
        yield f"lora.init={lora.init}: the adapter at lora.adapter_path is already initialized; remove one"
    for name in ("rank_pattern", "alpha_pattern"):
        if lora.adapter_path and (pattern := getattr(lora, name)):
            yield f"lora.{name}={shown(pattern)}: the adapter at lora.adapter_path has its own; remove one"
    if config.adapter == "qlora" and lora.init in ("pissa", "pissa_niter_16", "olora"):
        yield f"lora.init={lora.init}: needs full-precision weights; use loftq or default with adapter: qlora"
    if config.adapter == "qlora":
        yield from _check_bits(config)
    if config.adapter == "lora" and lora.init == "loftq":
        yield "lora.init=loftq: prepares an adapter for a 4-bit base; set adapter: qlora, or use pissa"
    reads_base = lora.init in ("pissa", "pissa_niter_16", "olora", "loftq")
    reads_factors = lora.init == "orthogonal" and not gathers_by_layer(config)
    if config.zero.stage == 3 and (reads_base or reads_factors):
        yield f"lora.init={lora.init}: needs unpartitioned weights, which zero.stage=3 does not have; use zero.stage: 2"


def _check_bits(config: RunConfig) -> Iterator[str]:
    quantization, lora = config.quantization, config.lora
    kind = quantization.quant_type
    if quantization.bits == 8 and not quantization.eight_bit:
        yield f"quantization.bits=8: quant_type {kind} has 4; add quantization.quant_type: fp8, or int8"
    if quantization.bits == 4 and quantization.eight_bit:
        yield f"quantization.bits=4: quant_type {kind} has 8; use quantization.quant_type: nf4, or bits: 8"
    if quantization.eight_bit and lora.init == "loftq":
        yield "lora.init=loftq: prepares an adapter for a 4-bit base; use default, or quantization.quant_type: nf4"
    if quantization.eight_bit and lora.dora:
        yield f"lora.dora=true: cannot read base weights in {kind}; use nf4, or turn it off"


def _check_qat(config: RunConfig) -> Iterator[str]:
    """Check that training.qat can round the sum W + s B A."""
    qat, lora = f"training.qat={config.training.qat}", config.lora
    if config.adapter == "none":
        yield f"{qat}: rounds weights with a merged adapter, and adapter is none; use adapter: lora"
        return
    if config.adapter == "qlora":
        base = config.quantization.quant_type
        yield f"{qat}: rounds the merged 16-bit weights, and this base is stored in {base}; use adapter: lora"
    if lora.dora or read_initial_adapter(config).get("use_dora"):
        yield f"{qat}: rounds W + s B A, and DoRA scales that sum by rows; use lora.dora: false"
    if lora.init in ("pissa", "pissa_niter_16", "olora"):
        yield f"{qat}: lora.init={lora.init} changes the base weights that are rounded; use lora.init: default"
    if config.ops.backend in ("cuda", "reference"):
        yield f"ops.backend={config.ops.backend}: {qat} computes the adapted layers itself; use ops.backend: auto"
    if config.training.torch_compile:
        yield f"training.torch_compile=true: cannot trace the rounding of {qat}; turn it off"


def _check_zero(config: RunConfig) -> Iterator[str]:
    zero = config.zero
    stage = "auto" if zero.stage == AUTO else zero.stage
    if zero.offload_optimizer and zero.stage == 0:
        yield "zero.offload_optimizer=true: not possible at stage 0; use zero.stage: 1, 2 or 3"
    if zero.offload_parameters and zero.stage != 3:
        yield f"zero.offload_parameters=true: only stage 3 partitions parameters, and zero.stage={stage}; use 3"
    if config.training.optimizer == "adamw_8bit" and zero.offload_optimizer:
        yield "training.optimizer=adamw_8bit: its state must stay on the GPU; turn zero.offload_optimizer off"
    if config.training.optimizer == "adamw_8bit" and zero.stage == 0 and config.training.precision in ("bf16", "fp16"):
        yield "training.optimizer=adamw_8bit: not with zero.stage=0 in 16 bits; use zero.stage: 1, 2 or 3"
    yield from check_extra(zero.extra)
    why_not = why_not_by_layer(config)
    if zero.gather == "layer" and zero.stage in (0, 1, 2):
        yield (
            f"zero.gather=layer: only stage 3 partitions the base, and zero.stage={zero.stage}; use stage 3, or auto"
        )
    if zero.gather == "layer" and why_not:
        yield f"zero.gather=layer: {why_not}; use module, or auto"
    if config.adapter == "qlora" and zero.offload_parameters and not gathers_by_layer(config):
        yield (
            "zero.offload_parameters=true: zero.gather=module cannot offload a quantised base; use zero.gather: layer, "
            "adapter: lora, or turn it off"
        )
    if zero.stage == 3 and not gathers_by_layer(config) and config.model.added_tokens:
        yield "model.added_tokens: the embedding cannot be resized when partitioned; use zero.stage 0 to 2"
    if config.training.torch_compile and zero.stage == 3:
        yield "training.torch_compile=true: stage 3's gathers break the graph at every layer; use zero.stage 0 to 2"


def _check_data(config: RunConfig) -> Iterator[str]:
    data = config.dataset
    if data.path and data.mix:
        yield f"dataset.path={shown(data.path)}: dataset.mix is also given; keep one"
    if not data.path and not data.mix:
        yield DATA_WANTED
    for label, source in [("dataset", data), ("dataset.evaluation", data.evaluation)] + [
        (f"dataset.mix.{index}", source) for index, source in enumerate(data.mix)
    ]:
        if source is None:
            continue
        if not source.path and label != "dataset":
            yield f"{label}.path: missing; use a file, a folder or a dataset on the hub"
        if source.weight != 1.0 and not label.startswith("dataset.mix"):
            yield f"{label}.weight={source.weight:g}: only sources of dataset.mix have weights; remove it"
        if source.format == "custom" and not (source.template and "completion" in source.fields):
            yield f"{label}.format=custom: needs {label}.template with {{field}} marks and {label}.fields.completion"
        if unknown := [role for role in source.roles if role not in ROLES]:
            yield f"{label}.roles.{unknown[0]}: unknown role; list your names under {', '.join(ROLES)}"
    if data.batching == "tokens" and (data.packing or data.streaming):
        what = "packing leaves nothing to pad" if data.packing else "the lengths in a stream are unknown"
        yield f"dataset.batching=tokens: {what}; use samples"
    if data.val_split and data.evaluation:
        yield f"dataset.val_split={data.val_split}: dataset.evaluation is also given; keep one"
    if set(data.train_on) - {*ROLES, "last", "all"} or not data.train_on:
        yield f"dataset.train_on={shown(data.train_on)}: choose from assistant, last, user, system, tool, all"
    if "last" in data.train_on and {"assistant", "all"} & set(data.train_on):
        yield f"dataset.train_on={shown(data.train_on)}: last is one of the assistant turns; keep one"
    if data.thinking == "empty" and data.chat_template_kwargs.get("enable_thinking"):
        yield "dataset.thinking=empty: dataset.chat_template_kwargs.enable_thinking is true; remove one"
    if data.streaming and not config.training.max_steps:
        yield "dataset.streaming=true: the length of a stream is unknown; set training.max_steps"
    for name in ("saves_per_epoch", "evals_per_epoch"):
        if data.streaming and (given := getattr(config.training, name)):
            steps = f"training.{name[:4]}_steps"
            yield f"training.{name}={given:g}: the length of a stream is unknown; set {steps} instead"
    if data.streaming and data.val_split:
        yield "dataset.val_split: a stream cannot be split; set dataset.evaluation"


def _check_training(config: RunConfig) -> Iterator[str]:
    training = config.training
    if training.offload_activations and training.gradient_checkpointing not in ("non_reentrant", "selective"):
        yield (
            "training.offload_activations=true: not with "
            f"training.gradient_checkpointing={training.gradient_checkpointing}; use non_reentrant or selective"
        )
    if (layers := training.gradient_checkpointing_layers) and training.gradient_checkpointing != "non_reentrant":
        yield (
            f"training.gradient_checkpointing_layers={layers}: not with "
            f"training.gradient_checkpointing={training.gradient_checkpointing}; use non_reentrant"
        )
    if training.gradient_checkpointing == "selective" and config.adapter == "none":
        yield "training.gradient_checkpointing=selective: needs an adapter; use non_reentrant"
    accumulation, total = training.gradient_accumulation_steps, training.global_batch_size
    rows = accumulation * (1 if training.batch_size == AUTO else training.batch_size)
    if accumulation > 1 and total is not None and (total == AUTO or total % rows):
        yield (
            f"training.gradient_accumulation_steps={accumulation}: training.global_batch_size="
            f"{'auto' if total == AUTO else total} decides it; remove one, or set it to null"
        )
    if training.elastic and training.max_restarts == 0:
        yield "training.elastic=true: needs restarts, but training.max_restarts is 0; remove one"
    if training.cuda_graphs == "on" and (why_not := why_no_graphs(config)):
        yield f"training.cuda_graphs=on: {why_not}; use auto"
    yield from _check_evaluation(config)
    if training.best_checkpoint and training.eval_steps and training.save_steps % training.eval_steps:
        yield (
            f"training.save_steps={training.save_steps}: best_checkpoint needs an evaluation at every save; "
            f"use a multiple of eval_steps={training.eval_steps}"
        )
    if training.warmup_steps is not None and training.max_steps and training.warmup_steps >= training.max_steps:
        yield (
            f"training.warmup_steps={training.warmup_steps}: must be less than training.max_steps={training.max_steps}"
            ", or the learning rate never reaches its peak"
        )
    reporters = config.logging.report_to
    if "none" in reporters:
        yield f"logging.report_to={shown(reporters)}: none cannot be combined; remove it or the others"
    unknown = set(reporters) - {"tensorboard", "wandb"}
    if unknown:
        yield f"logging.report_to={shown(reporters)}: choose from tensorboard, wandb, none"


def _check_evaluation(config: RunConfig) -> Iterator[str]:
    training = config.training
    for per_epoch, steps in (("evals_per_epoch", "eval_steps"), ("saves_per_epoch", "save_steps")):
        if (given := getattr(training, per_epoch)) and getattr(training, steps) != getattr(TrainingSection(), steps):
            yield f"training.{per_epoch}={given:g}: training.{steps} is also given; keep one"
    when = "evals_per_epoch" if training.evals_per_epoch else "eval_steps"
    users = {name: getattr(training, name) for name in ("early_stopping", "best_checkpoint") if getattr(training, name)}
    if not (config.dataset.val_split or config.dataset.evaluation):
        also = "" if getattr(training, when) else ", and training.eval_steps"
        wanted = users or ({when: getattr(training, when)} if getattr(training, when) else {})
        for name, value in wanted.items():
            held_out = "nothing is held out; set dataset.val_split or dataset.evaluation"
            yield f"training.{name}={shown(value)}: {held_out}{also}"
    elif users and not getattr(training, when):
        yield "training.eval_steps=0: early_stopping and best_checkpoint need evaluations; set it"


def _check_scu(config: RunConfig) -> Iterator[str]:
    scu = config.scu
    if config.adapter == "none":
        yield "scu.enabled=true: the controller needs an adapter, and adapter is none; use lora or qlora"
    if config.training.weight_decay > 0:
        yield (
            f"training.weight_decay={config.training.weight_decay}: a second regularizer next to scu.enabled; set it "
            "to 0"
        )
    if config.training.gradient_checkpointing == "reentrant" and config.zero.stage and scu.controller != "none":
        # Its nested backward passes give DeepSpeed an adapter's gradient in two parts; stages 1 to 3 accept only one.
        yield "training.gradient_checkpointing=reentrant: not with scu.enabled; use non_reentrant"
    if scu.lambda_min >= scu.lambda_max:
        yield f"scu.lambda_min={scu.lambda_min}: must be below scu.lambda_max={scu.lambda_max}"
    elif not scu.lambda_min <= float(scu.lambda_start) <= scu.lambda_max:
        yield (
            f"scu.lambda_start={scu.lambda_start}: must be between scu.lambda_min={scu.lambda_min} "
            f"and scu.lambda_max={scu.lambda_max}"
        )
    if scu.measure != "kl" and scu.target != "auto" and scu.target >= 1.0:
        yield f"scu.target={scu.target}: must be below 1, a fraction of information; use 0.01 to start with"
    if scu.target == "auto" and scu.measure == "delta" and scu.law == "published" and scu.controller == "pi":
        yield "scu.target=auto: published targets are for measure: factors; use a number, or use scu.law: logit"
    if scu.measure != "kl" and config.training.loss != "nll":
        loss = f"training.loss={config.training.loss}"
        yield f"{loss}: scu.measure={scu.measure} needs the loss in bits of data; use nll, or scu.measure: kl"
    if scu.measure == "kl":
        yield from _check_kl(config)
        return  # measured in bits per token, without scu.tokens
    if config.dataset.streaming and not scu.tokens:
        yield "scu.tokens: the tokens of a stream cannot be counted; set it to the target tokens of one epoch"


def _check_kl(config: RunConfig) -> Iterator[str]:
    if config.scu.law == "published" and config.scu.controller == "pi":
        yield "scu.law=published: not with scu.measure: kl, which has its own law; remove it"
    if config.lora.init in ("pissa", "pissa_niter_16", "olora"):
        yield f"lora.init={config.lora.init}: changes the base, which scu.measure: kl needs; use default"
    if noise := config.training.neftune_noise_alpha:
        problem = "scu.measure: kl would measure the noise as divergence from the base; set it to 0"
        yield f"training.neftune_noise_alpha={noise:g}: {problem}"
    if config.training.offload_activations:
        # The pass over the reference text would overwrite the activations of the previous pass in host memory.
        yield "training.offload_activations=true: not with scu.measure: kl; turn it off"


def why_no_graphs(config: RunConfig) -> str | None:
    """Return the setting that rules out CUDA graphs, and why; None if they are possible."""
    training = config.training
    if config.adapter == "none":
        return "adapter: none trains all weights, and captured graphs need an adapter in one buffer"
    if not config.ops.flat:
        return "ops.flat: false gives every factor a separate gradient"
    if config.zero.stage == 3:
        return "zero.stage: 3 gathers weights within a pass"
    if training.torch_compile:
        return "training.torch_compile uses its own graphs"
    if training.gradient_checkpointing == "reentrant":
        return "reentrant checkpointing runs a separate backward pass for every layer"
    if training.offload_activations:
        return "training.offload_activations copies on another stream"
    if training.router_aux_loss:
        return "training.router_aux_loss is a second result of the pass"
    if training.qat:
        return "training.qat draws dropout on the host"
    return None


def unusual_settings(config: RunConfig) -> list[str]:
    """Return a warning for each setting far from usual values, which is allowed."""
    training, lora = config.training, config.lora
    lines = []
    if training.learning_rate > HIGHEST_USUAL_RATE:
        lines.append(
            f"training.learning_rate={training.learning_rate:g}: far above what AdamW trains with (1e-5 to 1e-3); "
            "expect the loss to rise"
        )
    if config.adapter != "none" and lora.adapter_path is None:
        scale = lora.alpha / (lora.r**0.5 if lora.rslora else lora.r)
        if scale > LARGEST_USUAL_SCALE:
            lines.append(
                f"lora.alpha={lora.alpha:g}: scales the update by {scale:g} at lora.r={lora.r}; 1 or 2 are usual, so "
                "expect the loss to rise"
            )
    if training.torch_compile and config.adapter != "none" and config.ops.backend != "peft":
        lines.append(
            "training.torch_compile=true: disables our fused operations (shared-input projections in one call, the "
            "adapter in one buffer, norms, SwiGLU, rotary embedding), which are faster and take less memory "
            "(docs/lab/performance.md); remove it, or measure: `zerolora bench training.torch_compile=true`"
        )
    if training.adam_epsilon > 1e-3:
        lines.append(
            f"training.adam_epsilon={training.adam_epsilon:g}: larger than most gradients; 1e-8 is usual, and "
            "hardly anything will be learnt"
        )
    return lines
