"""Check a text run and prepare its data before weights are loaded (image runs: trainer/tasks/images/prepare.py)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import RunConfig, UserError
from trainer.config.adapter_settings import read_initial_adapter_settings
from trainer.config.errors import to_text
from trainer.config.needs import find_other_task_settings
from trainer.data.cache import PreparedData, prepare_data, prepare_reference
from trainer.data.conversations import load_chat_template
from trainer.data.grouping import DataStats
from trainer.data.prepared import PreparedRun
from trainer.data.prompt_files import format_prompt, read_sample_prompts
from trainer.data.samples import Samples
from trainer.memory.decisions import Machine
from trainer.memory.planner import Planner
from trainer.model.adapter import check_added_tokens, list_bias_warnings, load_initial_adapter
from trainer.model.answers import check_prompt_length, encode_prompt
from trainer.model.base import (
    build_empty_model,
    check_weights,
    get_context_length,
    has_rotary_positions,
    load_model_config,
    load_tokenizer,
)
from trainer.model.expert_targets import check_experts_per_token, check_router_loss
from trainer.model.image_reader import load_image_reader
from trainer.model.integer_weights import check_integer_targets
from trainer.model.model_kind import check_kind
from trainer.model.published_shapes import PREFIX, find_shape
from trainer.model.random_weights import build_random_config
from trainer.model.served_layers import list_serving_warnings
from trainer.model.stored_settings import check_saved_modules, check_settings_fit
from trainer.model.targets import check_targets
from trainer.patches.mamba import check_quantizable, has_scan_kernels, is_mamba_2
from trainer.patches.packed_attention import check_attention_supported, check_sequence_parallel_support
from trainer.scu.law_settings import build_law
from trainer.tasks.answer_metrics import AnswerMetrics, build_metric
from trainer.tasks.images.pipeline import INDEX
from trainer.tasks.language import LanguageTask
from trainer.tasks.lm_eval_scores import load_tasks
from trainer.tasks.preference import PreferenceTask
from trainer.tasks.reward import RewardTask

TASKS = {"preference": PreferenceTask, "reward": RewardTask}


def find_task(config: RunConfig) -> type[LanguageTask]:
    return TASKS.get(config.task, LanguageTask)


def prepare_text_run(config: RunConfig, report: Callable[[str], None], files: PreparedRun | None) -> PreparedRun:
    if files is None:
        report(f"checking the model {config.base_model}")
        files = read_model_files(config)
    check_no_image_settings(config)
    notes, original = files.notes, config
    config = original.fit_max_length(files.context_length)
    if config is not original:
        notes += (f"dataset.max_length: {config.dataset.max_length}, the model's context length, replaces the default",)
    elif files.context_length is not None and original.dataset.max_length > files.context_length:
        setting = f"dataset.max_length={original.dataset.max_length}"
        problem = (
            f"the model's context is {files.context_length} tokens; adapters may learn little from longer documents"
        )
        notes += (f"warning: {setting}: {problem}. Reduce it, or set model.rope_scaling.",)
    # Check these before tokenizing the data, which may take a long time.
    prompts = tuple(read_sample_prompts(config.logging.sample_prompts))
    if config.evaluation.tasks:
        load_tasks(config.evaluation.tasks)
    for name in config.evaluation.metrics:
        build_metric(name, config.evaluation)
    reference = load_reference(config, files.tokenizer)
    paths = [source.path for source in config.dataset.mix] or [config.dataset.path]
    report(f"preparing the data in {', '.join(map(str, paths))}")
    check = find_task(config).check_data
    data = tokenize(config, files, check=lambda stats: check(config, stats))
    check_images(config, data.stats)
    notes += tuple(check(config, data.stats))
    if config.evaluation.metrics:
        assert data.evaluation is not None
        AnswerMetrics(config.evaluation, data.evaluation, files.tokenizer)
    for prompt in prompts:
        try:
            ids = encode_prompt(files.tokenizer, config.dataset, prompt, data.stats.prompt_text)
            check_prompt_length(ids, files.context_length)
        except UserError as error:
            raise UserError(f"logging.sample_prompts={to_text(format_prompt(prompt))}: {error}") from None
    return replace(files, data=data, notes=notes, reference=reference, sample_prompts=prompts)


def check_no_image_settings(config: RunConfig) -> None:
    """Raise UserError if a language model's run has settings for image models."""
    for setting in find_other_task_settings(config, "language" if config.task == "auto" else config.task):
        raise UserError(
            f"{setting.name}={to_text(setting.value)}: only for image models; base_model={config.base_model} is not "
            f"one (it has no {INDEX}); remove the setting"
        )


def tokenize(config: RunConfig, files: PreparedRun, **checks: Callable[[DataStats], object]) -> PreparedData:
    """Tokenize the data with the model's tokenizer and image processor, or read it from the cache."""
    return prepare_data(
        config.dataset,
        files.tokenizer,
        seed=config.seed,
        cache_dir=Path(config.dataset.cache_dir).expanduser(),
        model_max_length=None if has_rotary_positions(files.model_config) else files.context_length,
        image_reader=files.images,
        **checks,
    )


def check_images(config: RunConfig, stats: DataStats) -> None:
    """Raise UserError for settings that do not work with images, or that have no effect without them."""
    if not (stats.with_images or (stats.evaluation or stats).with_images):
        pixels = ((f"dataset.{name}", getattr(config.dataset, name)) for name in ("min_pixels", "max_pixels"))
        for name, value in (*((f"vision.{name}", value) for name, value in config.vision), *pixels):
            if value not in ("none", False, None):
                problem = "has no effect, because no record has an image; remove the setting"
                raise UserError(f"{name}={to_text(value)}: {problem}")
        return
    fixes: dict[str, tuple[Any, ...]] = {
        "parallel.sequence": (config.parallel.sequence, 1),
        "evaluation.metrics": (list(config.evaluation.metrics), []),
        "model.attn_implementation": (config.model.attn_implementation, "auto", "sdpa"),
    }
    for name, (value, *possible) in fixes.items():
        if value not in possible:
            raise UserError(f"{name}={value}: not supported for data with images; use {possible[0]}")


def read_model_files(config: RunConfig) -> PreparedRun:
    """Read the model's configuration and tokenizer, and check its weights and layers."""
    model_config = load_model_config(config.base_model, config.model)
    is_full = config.adapter == "none"
    check_kind(config.base_model, model_config, all_trained=is_full, allow_score_head=config.model.has_score)
    check_settings_fit(config, model_config)
    notes = check_weights(config.base_model, config.model, model_config)
    context_length = get_context_length(model_config)
    tokenizer = _read_tokenizer(config)
    empty = build_empty_model(model_config, config.model)
    check_attention_supported(config.model, empty)
    layers = config.training.gradient_checkpointing_layers
    if layers is not None and layers > (available := empty.config.get_text_config().num_hidden_layers):
        problem = f"the model has only {available} layers; remove the setting to recompute all"
        raise UserError(f"training.gradient_checkpointing_layers={layers}: {problem}")
    if config.parallel.sequence > 1:
        check_sequence_parallel_support(config.parallel.sequence, empty)
    check_experts_per_token(config.base_model, empty)
    if config.adapter != "none":
        check_targets(empty, config.lora)
        warnings = list_bias_warnings(empty, config.lora.adapter_path)
        warnings += list_serving_warnings(config.export.target, config.lora, config.model.added_tokens, empty)
        notes += [f"warning: {warning}" for warning in warnings]
        check_added_tokens(empty, config.lora, tokenizer.convert_tokens_to_ids(list(config.model.added_tokens)))
    if config.training.qat:
        check_integer_targets(empty, config.lora, config.training.qat)
    check_router_loss(empty, config.training.router_aux_loss, None if config.adapter == "none" else config.lora)
    check_saved_modules(config, model_config, empty)
    if config.adapter == "qlora":
        check_quantizable(empty)
    initial, rows = read_initial_adapter_settings(config), empty.config.get_text_config().vocab_size
    # Other initializations need the weights, and embeddings on the meta device cannot grow.
    if initial and initial.get("init_lora_weights", True) is True and len(tokenizer) <= rows:
        load_initial_adapter(build_empty_model(model_config, config.model), config.lora)
    images = load_image_reader(config.base_model, config.model, config.dataset, tokenizer, model_config)
    return PreparedRun(tokenizer, model_config, None, tuple(notes), context_length=context_length, images=images)


def load_reference(config: RunConfig, tokenizer: Any) -> Samples | None:
    """Check the SCU's settings, and return the samples from scu.reference; None if the SCU or scu.reference is off."""
    if not config.scu.enabled:
        return None
    # Parameters are only counted when the weights are loaded; any number below 2B leads to the same checks.
    build_law(config.scu, total_steps=1, base_parameters=1)
    if config.scu.reference is None:
        return None
    return prepare_reference(config.dataset, tokenizer, config.scu.reference, setting="scu.reference", seed=config.seed)


def read_model_config(config: RunConfig) -> tuple[Any, str]:
    """Load the model's configuration or, if it cannot be read, the published shape for its name, with a note."""
    try:
        return load_model_config(config.base_model, config.model), ""
    except UserError:
        shape = find_shape(config.base_model)
        if shape is None:
            raise
        note = f"{config.base_model} cannot be read here; using the published shape {shape}"
        return build_random_config(PREFIX + shape), note


def build_unprepared_planner(config: RunConfig, machine: Machine) -> tuple[Planner, list[str]]:
    """Build a planner for a run that has not been prepared. Return it with notes on its assumptions."""
    model_config, note = read_model_config(config)
    config = config.fit_max_length(get_context_length(model_config))
    prepared, reason = PreparedRun(None, model_config, None), ""
    try:
        prepared = read_data(config)
        prepared = replace(prepared, reference=load_reference(config, prepared.tokenizer))
    except UserError as error:
        reason = f" ({error})"
    planner = Planner.from_run(machine, config, prepared)
    label = "every sequence counts as" if reason else "every sequence of the stream counts as"
    label = "longest sequence in the data:" if planner.lengths.samples else label
    scan = ""
    if any(is_mamba_2(module) for module in planner.shapes.model.modules()):
        plain = "run in plain torch; the kernels in the extra `mamba` need less memory"
        scan = f"Mamba layers {'use mamba-ssm' if has_scan_kernels() else plain}"
    return planner, [line for line in (note, f"{label} {planner.lengths.longest:,} tokens{reason}", scan) if line]


def read_data(config: RunConfig) -> PreparedRun:
    """Read a run's tokenizer and data without checking its model."""
    tokenizer, model_config = _read_tokenizer(config), load_model_config(config.base_model, config.model)
    images = load_image_reader(config.base_model, config.model, config.dataset, tokenizer, model_config)
    context_length = get_context_length(model_config)
    files = PreparedRun(tokenizer, model_config, None, context_length=context_length, images=images)
    return replace(files, data=tokenize(config.fit_max_length(context_length), files))


def _read_tokenizer(config: RunConfig) -> Any:
    tokenizer = load_tokenizer(config.base_model, config.model)
    if config.dataset.chat_template:
        # The template is saved with the tokenizer, so that prompts are formatted as in training.
        tokenizer.chat_template = load_chat_template(tokenizer, config.dataset.chat_template)
    return tokenizer
