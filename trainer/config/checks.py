"""Check combinations of settings before the model and the data are loaded."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from trainer.config.adapter_settings import read_initial_adapter_settings
from trainer.config.aliases import ALIASES, read_table
from trainer.config.errors import MISSING_DATA, Mistake, UserError, join_choices, to_text
from trainer.config.evaluation_section import ANSWER_METRICS, LOSS_METRICS
from trainer.config.needs import build_unused_settings_mistake, find_unused_settings
from trainer.config.sections import TRACKERS, RunConfig
from trainer.config.task_sections import WITHOUT_REFERENCE
from trainer.config.training_sections import OPTIMIZERS
from trainer.config.types import AUTO
from trainer.config.zero import check_extra, describe_layer_gather_problem, gathers_per_layer

ROLES = ("assistant", "user", "system", "tool")
MAX_TYPICAL_LEARNING_RATE = 1e-2
MAX_TYPICAL_SCALE = 32.0
RULES: dict[str, Any] = read_table(Path(__file__).with_name("rules.yaml"))
TILES_NO_GRAPHS: str = RULES["tiles_no_graphs"]
DERIVED_VALUES: dict[str, Callable[[RunConfig], Any]] = {
    "by_layer": gathers_per_layer,
    "layer_gather_problem": describe_layer_gather_problem,
    "dora": lambda config: config.lora.dora or read_initial_adapter_settings(config).get("use_dora", False),
    "optimizer.library": lambda config: OPTIMIZERS[config.training.optimizer].library,
    "optimizer.needs_matrices": lambda config: OPTIMIZERS[config.training.optimizer].needs_matrices,
    "reference": lambda config: (
        config.preference.reference in ("step", "cached")
        or (config.preference.reference == "auto" and bool({*config.preference.loss} - {*WITHOUT_REFERENCE}))
    ),
    "has_held_out": lambda config: bool(config.dataset.val_split or config.dataset.evaluation),
    "compared": lambda config: (
        DERIVED_VALUES["has_held_out"](config)
        or bool(config.evaluation.tasks and config.training.monitored_metric not in LOSS_METRICS)
    ),
    "uses_beta": lambda config: bool({*config.preference.loss} - {"orpo", "sft"}),
}
"""Functions that derive values from the settings, by their names in rules.yaml."""


def check_combinations(config: RunConfig) -> None:
    """Raise UserError for the first invalid combination of settings."""
    for mistake in find_invalid_combinations(config):
        raise UserError(str(mistake))


def find_invalid_combinations(config: RunConfig) -> Iterator[Mistake]:
    for index, run in enumerate(config.runs):
        names = {name for name, _ in flatten_entry(config.adapters[index])}
        for mistake in (*_apply_rules("together", run), *find_invalid_combinations(run)):
            is_in_entry = mistake.setting in names
            yield replace(mistake, setting=f"adapters.{index}.{mistake.setting}") if is_in_entry else mistake
        for unused in find_unused_settings(run):
            if unused.name in names:
                mistake = build_unused_settings_mistake([unused], unused.unmet.describe_reason(run))
                yield replace(mistake, setting=f"adapters.{index}.{unused.name}")
    if config.adapters:
        yield from _find_unequal_layouts(config)
        return
    yield from _apply_rules("combinations", config)
    yield from check_extra(config.zero.extra)
    library = OPTIMIZERS[config.training.optimizer].library
    if library != "torch" and find_spec(library) is None:
        yield Mistake("training.optimizer", config.training.optimizer, f"needs {library}", f"pip install {library}")
    for task, section in (("preference", config.preference), ("reward", config.reward)):
        if config.task != task and section != (defaults := type(section)()):
            name, value = next((name, value) for name, value in section if value != getattr(defaults, name))
            problem = f"has no effect, because task is {config.task}"
            yield Mistake(f"{task}.{name}", value, problem, f"set task: {task}", "task")
    yield from _check_data(config)
    yield from _check_training(config)
    yield from _check_scores(config)
    if config.scu.enabled:
        yield from _check_scu(config)


def flatten_entry(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of every setting in an entry of `adapters`, with aliases resolved."""
    for key, value in entry.items():
        dotted = prefix + str(key)
        if isinstance(value, dict) and (prefix + str(key)) in RunConfig.model_fields:
            yield from flatten_entry(value, f"{dotted}.")
        else:
            yield ALIASES.get(dotted, dotted), value


def _find_unequal_layouts(config: RunConfig) -> Iterator[Mistake]:
    for index, run in enumerate(config.runs):
        for name in ("dataset.packing", "training.gradient_accumulation_steps"):
            if (value := _read_value(run, name)) != (first := _read_value(config.runs[0], name)):
                fix = f"use {to_text(first)}, as in adapter {config.adapters[0].get('name')}, or train them separately"
                yield Mistake(f"adapters.{index}.{name}", value, "must be the same for all adapters of a run", fix)


def find_feature_problem(feature: Literal["graphs", "tiles"], config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that rules out CUDA graphs or tiled MLPs, and the reason; None if they are possible."""
    return next(((mistake.setting, mistake.problem) for mistake in _apply_rules(feature, config)), None)


def _apply_rules(group: str, config: RunConfig) -> Iterator[Mistake]:
    """Yield a mistake for each setting that breaks a rule in the section `group` of rules.yaml."""
    for rule in RULES[group]:
        when, unless, only = (rule.get(name, {}) for name in ("when", "unless", "only"))
        if not all(_matches(config, name, values) for name, values in when.items()):
            continue
        if any(_matches(config, name, values) for name, values in unless.items()):
            continue
        broken = [name for name, values in rule.get("never", {}).items() if _matches(config, name, values)]
        broken += [name for name, values in only.items() if not _matches(config, name, values)]
        for name in [*broken, *([rule["report"]] if "report" in rule else [])]:
            allowed = join_choices(map(to_text, only.get(name, ())))
            texts = (rule.get(text, "").replace("{allowed}", allowed) for text in ("problem", "fix"))
            problem, fix = (re.sub(r"\{([a-z_.]+)\}", lambda m: to_text(_read_value(config, m[1])), s) for s in texts)
            involves = " ".join([*when, *unless, rule.get("involves", "")])
            value = _read_value(config, name)
            yield Mistake(name, f"{value:g}" if isinstance(value, float) else value, problem, fix, involves)


def _read_value(config: RunConfig, name: str) -> Any:
    if name in DERIVED_VALUES:
        return DERIVED_VALUES[name](config)
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part)
    return value.strip() if isinstance(value, str) else "auto" if value == AUTO else value


def _matches(config: RunConfig, name: str, values: Collection[Any]) -> bool:
    value = _read_value(config, name)
    if isinstance(value, (tuple, Mapping)):
        return list(value) in values or any(element in values for element in value)
    return value in values


def _check_data(config: RunConfig) -> Iterator[Mistake]:
    data = config.dataset
    if not data.path and not data.mix:
        yield replace(MISSING_DATA, involves="dataset.mix")
    for label, source in [("dataset", data), ("dataset.evaluation", data.evaluation)] + [
        (f"dataset.mix.{index}", source) for index, source in enumerate(data.mix)
    ]:
        if source is None:
            continue
        if not source.path and label != "dataset":
            yield Mistake(f"{label}.path", None, "missing", "use a file, a folder or a dataset on the Hub")
        if source.weight != 1.0 and not label.startswith("dataset.mix"):
            problem = "only applies to sources of dataset.mix"
            yield Mistake(f"{label}.weight", f"{source.weight:g}", problem, "remove it")
        if source.format == "custom" and not (source.template and "completion" in source.fields):
            problem = f"needs {label}.template with {{field}} placeholders and {label}.fields.completion"
            yield Mistake(f"{label}.format", "custom", problem, involves=f"{label}.template {label}.fields.completion")
        if unknown := [role for role in source.roles if role not in ROLES]:
            fix = f"use the keys {', '.join(ROLES)}, and list the names in your data as their values"
            yield Mistake(f"{label}.roles.{unknown[0]}", None, "unknown role", fix)
        counts = Counter(name for names in source.roles.values() for name in {*names})
        for name in [name for name, count in counts.items() if count > 1]:
            yield Mistake(f"{label}.roles", source.roles, f"{name} is listed under several roles", "list it once")
    if set(data.train_on) - {*ROLES, "last", "all"}:
        yield Mistake(
            "dataset.train_on", data.train_on, "unknown role", "choose from assistant, last, user, system, tool, all"
        )


def _check_training(config: RunConfig) -> Iterator[Mistake]:
    training = config.training
    accumulation, total = training.gradient_accumulation_steps, training.global_batch_size
    rows = accumulation * (1 if training.batch_size == AUTO else training.batch_size)
    if accumulation > 1 and total is not None and (total == AUTO or total % rows):
        problem = f"training.global_batch_size={'auto' if total == AUTO else total} already determines it"
        name, fix = "training.gradient_accumulation_steps", "remove one of them, or set one to null"
        yield Mistake(name, accumulation, problem, fix, "training.global_batch_size")
    if training.tiled_mlp not in ("auto", False) and (refusal := find_feature_problem("tiles", config)):
        yield Mistake("training.tiled_mlp", training.tiled_mlp, refusal[1], "use auto", refusal[0])
    if training.cuda_graphs == "on" and (refusal := find_feature_problem("graphs", config)):
        yield Mistake("training.cuda_graphs", "on", refusal[1], "use auto", refusal[0])
    if training.best_checkpoint and training.eval_steps and training.save_steps % training.eval_steps:
        problem = "best_checkpoint needs an evaluation at every save"
        involves = "training.best_checkpoint training.eval_steps"
        fix = f"use a multiple of eval_steps={training.eval_steps}"
        yield Mistake("training.save_steps", training.save_steps, problem, fix, involves)
    is_stable = training.lr_scheduler == "warmup_stable_decay" and training.warmup_steps is None
    if is_stable and training.warmup_ratio + training.decay_ratio > 1:
        why = f"plus training.warmup_ratio={training.warmup_ratio:g} exceeds 1"
        yield Mistake("training.decay_ratio", training.decay_ratio, why, "lower one of them")
    if training.warmup_steps is not None and training.max_steps and training.warmup_steps >= training.max_steps:
        why = f"must be below training.max_steps={training.max_steps}, so that the learning rate reaches its peak"
        yield Mistake("training.warmup_steps", training.warmup_steps, why, involves="training.max_steps")
    if set(config.logging.report_to) - {"tensorboard", "none", *TRACKERS}:
        fix = f"choose from tensorboard, {', '.join(TRACKERS)}, none"
        yield Mistake("logging.report_to", config.logging.report_to, "unknown tracker", fix)


def _check_scores(config: RunConfig) -> Iterator[Mistake]:
    evaluation, best = config.evaluation, config.training.monitored_metric
    known = [*LOSS_METRICS, *(name.rpartition(":")[2] for name in evaluation.metrics)]
    for name in evaluation.metrics:
        if name not in ANSWER_METRICS and not re.fullmatch(r".+\.py:\w+", name):
            fix = f"use {', '.join(ANSWER_METRICS)} or FILE.py:FUNCTION"
            yield Mistake("evaluation.metrics", name, "unknown metric", fix)
        elif ":" in name and known.count(metric := name.rpartition(":")[2]) > 1:
            yield Mistake("evaluation.metrics", name, f"another metric is also named {metric}", "rename the function")
    if best not in known and not (evaluation.tasks and "/" in best):
        fix = f"use {', '.join(known)}{' or TASK/METRIC' if evaluation.tasks else ''}"
        involves = "evaluation.metrics evaluation.tasks"
        yield Mistake("training.best_metric", best, "not a metric of this run", fix, involves)


def _check_scu(config: RunConfig) -> Iterator[Mistake]:
    scu = config.scu
    if scu.lambda_min >= scu.lambda_max:
        problem = f"must be below scu.lambda_max={scu.lambda_max}"
        yield Mistake("scu.lambda_min", scu.lambda_min, problem, involves="scu.lambda_max")
    elif not scu.lambda_min <= float(scu.lambda_start) <= scu.lambda_max:
        problem = f"must be between scu.lambda_min={scu.lambda_min} and scu.lambda_max={scu.lambda_max}"
        yield Mistake("scu.lambda_start", scu.lambda_start, problem, involves="scu.lambda_min scu.lambda_max")
    if scu.measure != "kl" and scu.target != "auto" and scu.target >= 1.0:
        yield Mistake(
            "scu.target", scu.target, "must be below 1, because it is a fraction of information", "start with 0.01"
        )


def describe_unusual_settings(config: RunConfig) -> list[str]:
    if config.runs:
        entries = zip(config.adapters, config.runs, strict=True)
        return [f"{entry['name']}: {warning}" for entry, run in entries for warning in describe_unusual_settings(run)]
    training, lora, scu = config.training, config.lora, config.scu
    warnings = []
    if scu.enabled and scu.target != "auto" and scu.controller in ("linear", "cosine", "none"):
        # Only a warning: `zerolora compare` runs every controller with the settings from one file.
        problem = f"has no effect with scu.controller: {scu.controller}; use controller: pi, or remove scu.target"
        warnings.append(f"scu.target={scu.target:g}: {problem}")
    if training.learning_rate > MAX_TYPICAL_LEARNING_RATE:
        warnings.append(
            f"training.learning_rate={training.learning_rate:g}: far above the usual rates of AdamW (1e-5 to 1e-3); "
            "expect the loss to rise"
        )
    if config.adapter != "none" and lora.adapter_path is None:
        scale = lora.alpha / (lora.r**0.5 if lora.rslora else lora.r)
        if scale > MAX_TYPICAL_SCALE:
            warnings.append(
                f"lora.alpha={lora.alpha:g}: scales the update by {scale:g} at lora.r={lora.r}, where 1 or 2 is usual; "
                "expect the loss to rise"
            )
    data, held_out = config.dataset, config.dataset.evaluation
    if held_out and all(getattr(held_out, name) == getattr(data, name) for name in ("path", "name", "split")):
        warnings.append(f"dataset.evaluation.path={held_out.path}: is the training data, so it cannot show overfitting")
    return warnings
