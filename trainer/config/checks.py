"""Checks of combinations of settings, made before anything is loaded."""

import re
from collections.abc import Iterator

from trainer.config.adapter_settings import read_initial_adapter
from trainer.config.errors import DATA_WANTED, Mistake, UserError, shown
from trainer.config.evaluation_section import ANSWER_METRICS, LOSSES
from trainer.config.optimizers import check_optimizer
from trainer.config.preference_section import WITHOUT_REFERENCE, PreferenceSection, RewardSection
from trainer.config.sections import TRACKERS, RunConfig
from trainer.config.training_sections import TrainingSection
from trainer.config.types import AUTO
from trainer.config.zero import check_extra, engine_stage, gathers_by_layer, why_not_by_layer

ROLES = ("assistant", "user", "system", "tool")
HIGHEST_USUAL_RATE = 1e-2
LARGEST_USUAL_SCALE = 32.0
TILES_NO_GRAPHS = "training.tiled_mlp computes tiles again within the backward pass"
FOUR_BITS = "prepares an adapter for a 4-bit base"


def check_combinations(config: RunConfig) -> None:
    """Raise UserError for the first combination of settings that cannot work."""
    for mistake in find_invalid_combinations(config):
        raise UserError(str(mistake))


def find_invalid_combinations(config: RunConfig) -> Iterator[Mistake]:
    """Yield a mistake for each combination of settings that cannot work."""
    yield from _check_adapter(config)
    if config.training.qat:
        yield from _check_qat(config)
    yield from _check_zero(config)
    yield from _check_data(config)
    yield from _check_preference(config)
    if config.task == "reward":
        yield from _check_reward(config)
    elif config.reward != RewardSection():
        problem = f"has no effect, because task is {config.task}"
        yield Mistake("reward.center", f"{config.reward.center:g}", problem, "set task: reward")
    yield from _check_training(config)
    if config.parallel.sequence > 1:
        yield from _check_sequence(config)
    if config.scu.enabled:
        yield from _check_scu(config)


def _check_adapter(config: RunConfig) -> Iterator[Mistake]:
    lora, targets = config.lora, config.lora.target_modules
    if not config.base_model.strip():
        yield Mistake("base_model", "", "empty", "use a folder or a model on the hub")
    if not config.output_dir.strip():
        yield Mistake("output_dir", "", "empty", "use a folder")
    if not targets:
        yield Mistake("lora.target_modules", targets, "no targets", "write all-linear or names such as q_proj")
    if "all-linear" in targets and len(targets) > 1:
        yield Mistake("lora.target_modules", targets, "all-linear includes all names", "remove one")
    if config.adapter == "none":
        return
    given, keep = "adapter lora.adapter_path", "remove one"
    if lora.init != "default" and lora.adapter_path:
        yield Mistake("lora.init", lora.init, "the adapter at lora.adapter_path is already initialized", keep, given)
    for name in ("rank_pattern", "alpha_pattern"):
        if lora.adapter_path and (pattern := getattr(lora, name)):
            yield Mistake(f"lora.{name}", pattern, "the adapter at lora.adapter_path has its own", keep, given)
    if config.adapter == "qlora" and lora.init in ("pissa", "pissa_niter_16", "olora"):
        fix = "use loftq or default with adapter: qlora"
        yield Mistake("lora.init", lora.init, "needs full-precision weights", fix, "adapter")
    if config.adapter == "qlora":
        yield from _check_bits(config)
    if config.adapter == "lora" and lora.init == "loftq":
        yield Mistake("lora.init", lora.init, FOUR_BITS, "set adapter: qlora, or use pissa", "adapter")
    reads_base = lora.init in ("pissa", "pissa_niter_16", "olora", "loftq")
    reads_factors = lora.init == "orthogonal" and not gathers_by_layer(config)
    if config.zero.stage == 3 and (reads_base or reads_factors):
        problem = "needs unpartitioned weights, which zero.stage=3 does not have"
        yield Mistake("lora.init", lora.init, problem, "use zero.stage: 2", "zero.stage")


def _check_bits(config: RunConfig) -> Iterator[Mistake]:
    bits, kind, lora = config.quantization.bits, config.quantization.quant_type, config.lora
    setting = "quantization.quant_type"
    if bits == 8 and not config.quantization.eight_bit:
        yield Mistake("quantization.bits", 8, f"quant_type {kind} has 4", f"add {setting}: fp8, or int8", setting)
    if bits == 4 and config.quantization.eight_bit:
        yield Mistake("quantization.bits", 4, f"quant_type {kind} has 8", f"use {setting}: nf4, or bits: 8", setting)
    if config.quantization.eight_bit and lora.init == "loftq":
        yield Mistake("lora.init", "loftq", FOUR_BITS, f"use default, or {setting}: nf4", f"adapter {setting}")
    if config.quantization.eight_bit and lora.dora:
        yield Mistake("lora.dora", True, f"cannot read base weights in {kind}", "use nf4, or turn it off")


def _check_qat(config: RunConfig) -> Iterator[Mistake]:
    """Check that training.qat can round the sum W + s B A."""
    name, kind, lora = "training.qat", config.training.qat, config.lora
    if config.adapter == "none":
        problem = "rounds weights with a merged adapter, and adapter is none"
        yield Mistake(name, kind, problem, "use adapter: lora", "adapter")
        return
    if config.adapter == "qlora":
        problem = f"rounds the merged 16-bit weights, and this base is stored in {config.quantization.quant_type}"
        yield Mistake(name, kind, problem, "use adapter: lora", "adapter")
    if lora.dora or read_initial_adapter(config).get("use_dora"):
        problem = "rounds W + s B A, and DoRA scales that sum by rows"
        yield Mistake(name, kind, problem, "use lora.dora: false", "lora.dora")
    if lora.init in ("pissa", "pissa_niter_16", "olora"):
        problem = f"lora.init={lora.init} changes the base weights that are rounded"
        yield Mistake(name, kind, problem, "use lora.init: default", "lora.init")
    if config.ops.backend in ("cuda", "reference"):
        problem = f"training.qat={kind} computes the adapted layers itself"
        yield Mistake("ops.backend", config.ops.backend, problem, "use ops.backend: auto", name)
    if config.training.torch_compile:
        problem = f"cannot trace the rounding of training.qat={kind}"
        yield Mistake("training.torch_compile", True, problem, "turn it off", name)


def _check_zero(config: RunConfig) -> Iterator[Mistake]:
    zero = config.zero
    stage, partitioned = "auto" if zero.stage == AUTO else zero.stage, "use zero.stage: 1, 2 or 3"
    if zero.offload_optimizer and zero.stage == 0:
        yield Mistake("zero.offload_optimizer", True, "not possible at stage 0", partitioned, "zero.stage")
    if zero.offload_parameters and zero.stage != 3:
        problem = f"only stage 3 partitions parameters, and zero.stage={stage}"
        yield Mistake("zero.offload_parameters", True, problem, "use 3", "zero.stage")
    yield from check_optimizer(config)
    yield from check_extra(zero.extra)
    why_not = why_not_by_layer(config)
    if zero.gather == "layer" and zero.stage in (0, 1, 2):
        problem = f"only stage 3 partitions the base, and zero.stage={zero.stage}"
        yield Mistake("zero.gather", "layer", problem, "use stage 3, or auto", "zero.stage")
    if zero.gather == "layer" and why_not:
        yield Mistake("zero.gather", "layer", why_not, "use module, or auto")
    if config.adapter == "qlora" and zero.offload_parameters and not gathers_by_layer(config):
        problem = "zero.gather=module cannot offload a quantised base"
        fix = "use zero.gather: layer, adapter: lora, or turn it off"
        yield Mistake("zero.offload_parameters", True, problem, fix, "zero.gather adapter")
    fix = "use zero.stage 0 to 2"
    if zero.stage == 3 and not gathers_by_layer(config) and config.model.added_tokens:
        problem = "the embedding cannot be resized when partitioned"
        yield Mistake("model.added_tokens", None, problem, fix, "zero.stage")
    if config.training.torch_compile and zero.stage == 3:
        problem = "stage 3's gathers break the graph at every layer"
        yield Mistake("training.torch_compile", True, problem, fix, "zero.stage")


def _check_data(config: RunConfig) -> Iterator[Mistake]:
    data = config.dataset
    if data.path and data.mix:
        yield Mistake("dataset.path", data.path, "dataset.mix is also given", "keep one", "dataset.mix")
    if not data.path and not data.mix:
        yield DATA_WANTED
    for label, source in [("dataset", data), ("dataset.evaluation", data.evaluation)] + [
        (f"dataset.mix.{index}", source) for index, source in enumerate(data.mix)
    ]:
        if source is None:
            continue
        if not source.path and label != "dataset":
            yield Mistake(f"{label}.path", None, "missing", "use a file, a folder or a dataset on the hub")
        if source.weight != 1.0 and not label.startswith("dataset.mix"):
            problem = "only sources of dataset.mix have weights"
            yield Mistake(f"{label}.weight", f"{source.weight:g}", problem, "remove it")
        if source.format == "custom" and not (source.template and "completion" in source.fields):
            problem = f"needs {label}.template with {{field}} marks and {label}.fields.completion"
            yield Mistake(f"{label}.format", "custom", problem, involves=f"{label}.template {label}.fields.completion")
        if unknown := [role for role in source.roles if role not in ROLES]:
            fix = f"list your names under {', '.join(ROLES)}"
            yield Mistake(f"{label}.roles.{unknown[0]}", None, "unknown role", fix)
    if data.batching == "tokens" and data.packing:
        yield Mistake("dataset.batching", "tokens", "packing leaves nothing to pad", "use samples", "dataset.packing")
    elif data.batching == "tokens" and data.streaming:
        yield Mistake("dataset.batching", "tokens", "the lengths in a stream are unknown", "use samples")
    if data.val_split and data.evaluation:
        problem = "dataset.evaluation is also given"
        yield Mistake("dataset.val_split", data.val_split, problem, "keep one", "dataset.evaluation")
    if set(data.train_on) - {*ROLES, "last", "all"} or not data.train_on:
        yield Mistake("dataset.train_on", data.train_on, "choose from assistant, last, user, system, tool, all")
    if "last" in data.train_on and {"assistant", "all"} & set(data.train_on):
        yield Mistake("dataset.train_on", data.train_on, "last is one of the assistant turns", "keep one")
    if data.thinking == "empty" and data.chat_template_kwargs.get("enable_thinking"):
        variable = "dataset.chat_template_kwargs.enable_thinking"
        yield Mistake("dataset.thinking", "empty", f"{variable} is true", "remove one", variable)
    unknown_length = "the length of a stream is unknown"
    if data.streaming and not config.training.max_steps:
        yield Mistake("dataset.streaming", True, unknown_length, "set training.max_steps", "training.max_steps")
    for name in ("saves_per_epoch", "evals_per_epoch"):
        if data.streaming and (given := getattr(config.training, name)):
            yield Mistake(f"training.{name}", f"{given:g}", unknown_length, f"set training.{name[:4]}_steps instead")
    if data.streaming and data.val_split:
        yield Mistake("dataset.val_split", None, "a stream cannot be split", "set dataset.evaluation")


def _check_preference(config: RunConfig) -> Iterator[Mistake]:
    preference = config.preference
    if config.task != "preference":
        if preference != PreferenceSection():
            [name, *_] = [name for name, value in PreferenceSection() if value != getattr(preference, name)]
            problem = f"has no effect, because task is {config.task}"
            yield Mistake(f"preference.{name}", getattr(preference, name), problem, "set task: preference", "task")
        return
    needs_reference = any(name not in WITHOUT_REFERENCE for name in preference.loss)
    if not preference.beta and {*preference.loss} - {"orpo", "sft"}:
        yield Mistake("preference.beta", 0, "every answer would be equally good", "use 0.1 to start with")
    if "exo_pair" in preference.loss and not preference.label_smoothing:
        problem = "needs preference.label_smoothing above 0"
        yield Mistake("preference.loss", "exo_pair", problem, "0.001 is usual", "preference.label_smoothing")
    if config.dataset.train_on != ("assistant",):
        problem = "pairs train their answers alone"
        yield Mistake("dataset.train_on", config.dataset.train_on, problem, "remove it", "task")
    if config.scu.enabled and config.scu.measure != "kl":
        problem = "compares with a loss per token, not per pair"
        yield Mistake("scu.measure", config.scu.measure, problem, "use kl", "task")
    if preference.share_prompt:
        yield from _check_shared_prompts(config)
    if preference.reference in ("step", "cached") or (preference.reference == "auto" and needs_reference):
        yield from _check_reference(config)
    if "kto" in preference.loss:
        yield from _check_kto(config)
    elif (preference.desirable_weight, preference.undesirable_weight) != (1.0, 1.0):
        name = "desirable_weight" if preference.desirable_weight != 1.0 else "undesirable_weight"
        problem = "has no effect, because preference.loss is not kto"
        yield Mistake(f"preference.{name}", getattr(preference, name), problem, "remove it", "preference.loss")
    if preference.reference == "cached" and config.dataset.streaming:
        problem = "the answers of a stream are unknown before training"
        yield Mistake("preference.reference", "cached", problem, "use step", "dataset.streaming")


def _check_shared_prompts(config: RunConfig) -> Iterator[Mistake]:
    asked = config.preference.share_prompt
    if "kto" in config.preference.loss:
        problem = "kto learns from single answers, and only the answers of a pair share their prompt"
        yield Mistake("preference.share_prompt", asked, problem, "set it to false", "preference.loss")
        return
    for setting, value, usual in (
        ("training.torch_compile", config.training.torch_compile, False),
        ("model.attn_implementation", config.model.attn_implementation, "auto"),
        ("parallel.sequence", config.parallel.sequence, 1),
    ):
        if asked is True and value != usual:
            problem = f"not with preference.share_prompt, which needs {str(usual).lower()}"
            yield Mistake(setting, value, problem, "set preference.share_prompt: auto", "preference.share_prompt")


def _check_reward(config: RunConfig) -> Iterator[Mistake]:
    """Refuse what reward models do not support."""
    lora, training = config.lora, config.training
    if config.adapter == "none":
        yield Mistake("adapter", "none", "reward models are trained as adapters", "use lora or qlora", "task")
    if config.dataset.train_on != ("assistant",):
        problem = "a reward model scores whole answers"
        yield Mistake("dataset.train_on", config.dataset.train_on, problem, "remove it", "task")
    for name, value, default in (
        ("lora.adapter_path", lora.adapter_path, None),
        ("lora.init", lora.init, "default"),
        ("lora.modules_to_save", lora.modules_to_save, ()),
        ("model.added_tokens", config.model.added_tokens, ()),
        ("logging.sample_prompts", config.logging.sample_prompts, ()),
        ("dataset.streaming", config.dataset.streaming, False),
        ("training.qat", training.qat, None),
        ("training.router_aux_loss", training.router_aux_loss, 0.0),
        ("training.torch_compile", training.torch_compile, False),
        ("scu.enabled", config.scu.enabled, False),
    ):
        if value != default:
            yield Mistake(name, value, "reward models do not support it", "remove it", "task")


def _check_kto(config: RunConfig) -> Iterator[Mistake]:
    if config.preference.reference == "none":
        yield Mistake("preference.reference", "none", "kto compares with a reference", "use step", "preference.loss")
    if config.preference.weighting != "none":
        problem = "weights pairs, and kto learns from single answers"
        yield Mistake("preference.weighting", config.preference.weighting, problem, "remove it", "preference.loss")
    if config.preference.length_weight != 1.0:
        problem, given = "shortens the longer answer of a pair, and kto has no pairs", config.preference.length_weight
        yield Mistake("preference.length_weight", f"{given:g}", problem, "remove it", "preference.loss")
    if config.dataset.streaming:
        problem = "labelled answers cannot be streamed"
        yield Mistake("dataset.streaming", True, problem, "set it to false", "preference.loss")


def _check_reference(config: RunConfig) -> Iterator[Mistake]:
    """Check that the base without its adapter, or the adapter from which training starts, can be the reference."""
    fix = "or a loss without a reference, such as preference.loss: simpo"
    involved = "preference.loss preference.reference task"
    if config.adapter == "none":
        problem = "the reference is the model without its adapter"
        yield Mistake("adapter", "none", problem, f"use lora, {fix}", involved)
    if (path := config.lora.adapter_path) and config.preference.reference != "cached":
        problem = "is also the reference, which must be computed before training"
        yield Mistake("lora.adapter_path", path, problem, f"set preference.reference: cached, {fix}", involved)
    if (init := config.lora.init) in ("pissa", "pissa_niter_16", "olora"):
        yield Mistake("lora.init", init, "changes the base, which is the reference", "use default", involved)


def _check_training(config: RunConfig) -> Iterator[Mistake]:
    training, recompute = config.training, config.training.gradient_checkpointing
    clash, switch = f"not with training.gradient_checkpointing={recompute}", "training.gradient_checkpointing"
    if training.offload_activations and recompute not in ("non_reentrant", "selective"):
        yield Mistake("training.offload_activations", True, clash, "use non_reentrant or selective", switch)
    if (layers := training.gradient_checkpointing_layers) and recompute != "non_reentrant":
        yield Mistake("training.gradient_checkpointing_layers", layers, clash, "use non_reentrant", switch)
    if recompute == "selective" and config.adapter == "none":
        yield Mistake(switch, recompute, "needs an adapter", "use non_reentrant", "adapter")
    accumulation, total = training.gradient_accumulation_steps, training.global_batch_size
    rows = accumulation * (1 if training.batch_size == AUTO else training.batch_size)
    if accumulation > 1 and total is not None and (total == AUTO or total % rows):
        problem = f"training.global_batch_size={'auto' if total == AUTO else total} decides it"
        name, fix = "training.gradient_accumulation_steps", "remove one, or set it to null"
        yield Mistake(name, accumulation, problem, fix, "training.global_batch_size")
    if training.elastic and training.max_restarts == 0:
        problem = "needs restarts, but training.max_restarts is 0"
        yield Mistake("training.elastic", True, problem, "remove one", "training.max_restarts")
    if training.tiled_mlp not in ("auto", False) and (obstacle := find_tile_obstacle(config)):
        yield Mistake("training.tiled_mlp", training.tiled_mlp, obstacle[1], "use auto", obstacle[0])
    if not training.recompute_attention and recompute not in ("non_reentrant", "auto"):
        yield Mistake("training.recompute_attention", False, clash, "use non_reentrant", switch)
    if training.cuda_graphs == "on" and (obstacle := find_graph_obstacle(config)):
        yield Mistake("training.cuda_graphs", "on", obstacle[1], "use auto", obstacle[0])
    yield from _check_evaluation(config)
    if training.best_checkpoint and training.eval_steps and training.save_steps % training.eval_steps:
        problem = "best_checkpoint needs an evaluation at every save"
        involves = "training.best_checkpoint training.eval_steps"
        fix = f"use a multiple of eval_steps={training.eval_steps}"
        yield Mistake("training.save_steps", training.save_steps, problem, fix, involves)
    if training.warmup_steps is not None and training.max_steps and training.warmup_steps >= training.max_steps:
        why = f"must be less than training.max_steps={training.max_steps}, or the learning rate never reaches its peak"
        yield Mistake("training.warmup_steps", training.warmup_steps, why, involves="training.max_steps")
    reporters = config.logging.report_to
    if "none" in reporters:
        yield Mistake("logging.report_to", reporters, "none cannot be combined", "remove it or the others")
    if set(reporters) - {"tensorboard", *TRACKERS}:
        yield Mistake("logging.report_to", reporters, f"choose from tensorboard, {', '.join(TRACKERS)}, none")


def _check_sequence(config: RunConfig) -> Iterator[Mistake]:
    """Refuse settings that are inexact or not supported yet if ranks share a sequence."""
    training = config.training
    for name, value, allowed, reason in (
        ("task", config.task, ("auto", "language", "preference"), "sequences of this task cannot be split yet"),
        ("scu.measure", config.scu.measure, ("delta", "factors"), "its reference text cannot be split yet"),
        ("model.attn_implementation", config.model.attn_implementation, ("auto",), "only auto can exchange heads"),
        ("training.torch_compile", training.torch_compile, (False,), "the exchange of heads cannot be compiled"),
        ("training.router_aux_loss", training.router_aux_loss, (0.0,), "each rank would balance its own part only"),
        ("training.neftune_noise_alpha", training.neftune_noise_alpha, (0.0,), "noise depends on the length"),
        ("training.elastic", training.elastic, (False,), "it may not divide the number of remaining ranks"),
    ):
        if value not in allowed:
            problem = f"not with parallel.sequence={config.parallel.sequence}: {reason}"
            fix = f"use {' or '.join(map(shown, allowed))}, or parallel.sequence: 1"
            yield Mistake(name, value, problem, fix, "parallel.sequence")


def _check_evaluation(config: RunConfig) -> Iterator[Mistake]:
    training = config.training
    for per_epoch, steps in (("evals_per_epoch", "eval_steps"), ("saves_per_epoch", "save_steps")):
        if (given := getattr(training, per_epoch)) and getattr(training, steps) != getattr(TrainingSection(), steps):
            problem = f"training.{steps} is also given"
            yield Mistake(f"training.{per_epoch}", f"{given:g}", problem, "keep one", f"training.{steps}")
    when = "evals_per_epoch" if training.evals_per_epoch else "eval_steps"
    interval = getattr(training, when)
    users = {name: getattr(training, name) for name in ("early_stopping", "best_checkpoint") if getattr(training, name)}
    tasks = config.evaluation.tasks  # which need no held-out data
    has_scores = tasks and training.compared_metric not in LOSSES
    if not (config.dataset.val_split or config.dataset.evaluation or has_scores):
        also = "" if interval else " training.eval_steps"
        fix = f"set dataset.val_split or dataset.evaluation{also and f', and{also}'}"
        for name, value in (users or ({when: interval} if interval and not tasks else {})).items():
            involves = f"dataset.val_split dataset.evaluation{also}"
            yield Mistake(f"training.{name}", value, "nothing is held out", fix, involves)
    elif users and not interval:
        problem = "early_stopping and best_checkpoint need evaluations"
        yield Mistake("training.eval_steps", 0, problem, "set it", " ".join(f"training.{name}" for name in users))
    yield from _check_scores(config)


def _check_scores(config: RunConfig) -> Iterator[Mistake]:
    asked, best = config.evaluation, config.training.compared_metric
    for name in asked.metrics:
        if name not in ANSWER_METRICS and not re.fullmatch(r".+\.py:\w+", name):
            fix = f"use {', '.join(ANSWER_METRICS)} or FILE.py:FUNCTION"
            yield Mistake("evaluation.metrics", name, "unknown metric", fix)
        elif name in ("regex", "json_schema") and not getattr(asked, name):
            yield Mistake("evaluation.metrics", name, f"needs evaluation.{name}", "set it", f"evaluation.{name}")
    if asked.metrics and not (config.dataset.val_split or config.dataset.evaluation):
        fix = "set dataset.val_split or dataset.evaluation"
        yield Mistake("evaluation.metrics", asked.metrics, "nothing is held out", fix, "dataset.val_split")
    known = [*LOSSES, *(name.rpartition(":")[2] for name in asked.metrics)]
    if best not in known and not (asked.tasks and "/" in best):
        fix = f"use {', '.join(known)}{' or TASK/METRIC' if asked.tasks else ''}"
        involves = "evaluation.metrics evaluation.tasks"
        yield Mistake("training.best_metric", best, "not a metric of this run", fix, involves)


def _check_scu(config: RunConfig) -> Iterator[Mistake]:
    scu, training = config.scu, config.training
    if config.adapter == "none":
        problem = "the controller needs an adapter, and adapter is none"
        yield Mistake("scu.enabled", True, problem, "use lora or qlora", "adapter")
    if training.weight_decay > 0:
        problem = "a second regularizer next to scu.enabled"
        yield Mistake("training.weight_decay", training.weight_decay, problem, "set it to 0", "scu.enabled")
    if training.gradient_checkpointing == "reentrant" and config.zero.stage and scu.controller != "none":
        # Its nested backward passes give DeepSpeed an adapter's gradient in two parts; stages 1 to 3 accept only one.
        name, fix = "training.gradient_checkpointing", "use non_reentrant"
        yield Mistake(name, "reentrant", "not with scu.enabled", fix, "scu.enabled")
    if scu.lambda_min >= scu.lambda_max:
        problem = f"must be below scu.lambda_max={scu.lambda_max}"
        yield Mistake("scu.lambda_min", scu.lambda_min, problem, involves="scu.lambda_max")
    elif not scu.lambda_min <= float(scu.lambda_start) <= scu.lambda_max:
        problem = f"must be between scu.lambda_min={scu.lambda_min} and scu.lambda_max={scu.lambda_max}"
        yield Mistake("scu.lambda_start", scu.lambda_start, problem, involves="scu.lambda_min scu.lambda_max")
    if scu.measure != "kl" and scu.target != "auto" and scu.target >= 1.0:
        yield Mistake("scu.target", scu.target, "must be below 1, a fraction of information", "use 0.01 to start with")
    if scu.target == "auto" and scu.measure == "delta" and scu.law == "published" and scu.controller == "pi":
        problem, fix = "published targets are for measure: factors", "use a number, or use scu.law: logit"
        yield Mistake("scu.target", "auto", problem, fix, "scu.measure scu.law")
    if scu.measure != "kl" and (loss := config.training.loss) != "nll":
        problem = f"scu.measure={scu.measure} needs the loss in bits of data"
        yield Mistake("training.loss", loss, problem, "use nll, or scu.measure: kl", "scu.measure scu.enabled")
    if scu.measure == "kl":
        yield from _check_kl(config)
        return  # measured in bits per token, without scu.tokens
    if config.dataset.streaming and not scu.tokens:
        fix = "set it to the target tokens of one epoch"
        yield Mistake("scu.tokens", None, "the tokens of a stream cannot be counted", fix)


def _check_kl(config: RunConfig) -> Iterator[Mistake]:
    measure, lora = "scu.measure", config.lora
    if config.scu.reference is None:
        problem = "scu.measure: kl needs texts on which the model should stay near the base"
        yield Mistake("scu.reference", None, problem, "set it to their file", measure)
    if config.scu.law == "published" and config.scu.controller == "pi":
        yield Mistake("scu.law", "published", "not with scu.measure: kl, which has its own law", "remove it", measure)
    if lora.init in ("pissa", "pissa_niter_16", "olora"):
        yield Mistake("lora.init", lora.init, "changes the base, which scu.measure: kl needs", "use default", measure)
    if noise := config.training.neftune_noise_alpha:
        problem = "scu.measure: kl would measure the noise as divergence from the base"
        yield Mistake("training.neftune_noise_alpha", f"{noise:g}", problem, "set it to 0", measure)
    if config.training.offload_activations:
        # The pass over the reference text would overwrite the activations of the previous pass in host memory.
        yield Mistake("training.offload_activations", True, "not with scu.measure: kl", "turn it off", measure)


def find_graph_obstacle(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that rules out CUDA graphs, and why; None if they are possible."""
    training, switch = config.training, "training.gradient_checkpointing"
    no_adapter = "adapter: none trains all weights, and captured graphs need an adapter in one buffer"
    obstacles = (
        (config.task in ("preference", "reward"), "task", f"task: {config.task} weights answers only after the pass"),
        (config.adapter == "none", "adapter", no_adapter),
        (not config.ops.flat, "ops.flat", "ops.flat: false gives every factor a separate gradient"),
        (config.zero.stage == 3, "zero.stage", "zero.stage: 3 gathers weights within a pass"),
        (config.parallel.sequence > 1, "parallel.sequence", "parallel.sequence exchanges heads within a pass"),
        (training.torch_compile, "training.torch_compile", "training.torch_compile uses its own graphs"),
        (
            training.gradient_checkpointing == "reentrant",
            switch,
            "reentrant checkpointing runs a separate backward pass for every layer",
        ),
        (
            training.offload_activations,
            "training.offload_activations",
            "training.offload_activations copies on another stream",
        ),
        (
            training.router_aux_loss,
            "training.router_aux_loss",
            "training.router_aux_loss is a second result of the pass",
        ),
        (training.qat, "training.qat", "training.qat draws dropout on the host"),
        (training.tiled_mlp not in ("auto", False), "training.tiled_mlp", TILES_NO_GRAPHS),
    )
    return next(((setting, why) for applies, setting, why in obstacles if applies), None)


def find_tile_obstacle(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that rules out tiles of gated MLPs, and why; None if they are possible."""
    training, recompute = config.training, config.training.gradient_checkpointing
    obstacles = (
        (
            recompute not in ("non_reentrant", "selective", "auto"),
            "training.gradient_checkpointing",
            f"not with training.gradient_checkpointing: {recompute}",
        ),
        (
            config.adapter != "none" and config.lora.dropout,
            "lora.dropout",
            "lora.dropout draws one mask for all tokens",
        ),
        (engine_stage(config) == 3, "zero.gather", "zero.gather: module gathers weights for every tile"),
        (training.torch_compile, "training.torch_compile", "training.torch_compile traces each layer whole"),
        (training.qat, "training.qat", "training.qat rounds the weights for every tile"),
        (training.cuda_graphs == "on", "training.cuda_graphs", TILES_NO_GRAPHS),
    )
    return next(((setting, why) for applies, setting, why in obstacles if applies), None)


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
    data, held_out = config.dataset, config.dataset.evaluation
    if held_out and all(getattr(held_out, name) == getattr(data, name) for name in ("path", "name", "split")):
        lines.append(f"dataset.evaluation.path={held_out.path}: is the training data, and shows no overfitting")
    return lines
