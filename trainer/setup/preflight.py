"""Checks and preparation before weights are loaded: the model's configuration, tokenizer, targets, and data.

`zerolora prepare` (trainer/commands/prepare_run.py) runs the checks and fills the cache of tokenized data, which the
ranks reuse. Every failure is a UserError, and nothing is written to the output folder.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.adapter_files import find_adapter_damage
from trainer.checkpoint.checkpoint_files import choose_checkpoint
from trainer.checkpoint.output_folder import check_free, check_place
from trainer.checkpoint.resume_comparison import Resumption, plan_resumption
from trainer.config import RunConfig, UserError
from trainer.config.adapter_settings import FILE
from trainer.config.needs import switch_value
from trainer.contract.hub_patience import disable_retries_without_network
from trainer.data import DataStats, Samples, prepare_data
from trainer.data.cache import reference_samples
from trainer.data.conversations import find_chat_template
from trainer.data.prepared import Prepared, count_samples, fit_max_length
from trainer.data.prompt_files import sample_prompts
from trainer.data.step_count import resolve_global_batch, step_warnings
from trainer.data.vision import ImageReader
from trainer.model.adapter import bias_lines, check_added_tokens
from trainer.model.base import check_weights, context_length, empty_model, load_model_config, load_tokenizer
from trainer.model.eight_bit import check_card
from trainer.model.expert_targets import check_router_loss, check_visited
from trainer.model.image_reader import load_image_reader
from trainer.model.integer_weights import check_integer_targets, check_torchao
from trainer.model.model_kind import check_kind
from trainer.model.model_source import check_source, unreadable_error
from trainer.model.served_layers import serving_notes
from trainer.model.stored_fp8 import check_saved_modules, check_settings_fit
from trainer.model.targets import check_targets
from trainer.monitor.metrics import check_reporters
from trainer.parallel.engine.deepspeed_engine import check_extra_keys, resolve_precision
from trainer.parallel.ranks.sequence_group import check_ranks
from trainer.patches.mamba import check_packable
from trainer.patches.packed_attention import check_shareable, check_supported
from trainer.scu.law_settings import build_law
from trainer.tasks.answer_metrics import AnswerMetrics, build_metric
from trainer.tasks.images.pipeline import is_pipeline
from trainer.tasks.images.prepare import prepare_image_run, refuse_image_settings
from trainer.tasks.lm_eval_scores import load_tasks


@dataclass(frozen=True)
class ModelFiles:
    """The content of a model's files, except its weights."""

    tokenizer: Any
    model_config: Any
    longest: int | None
    """Context of the model in tokens."""
    notes: tuple[str, ...]
    images: ImageReader | None = None
    """The processor of a model that is trained on images."""


def prepare(
    config: RunConfig,
    report: Callable[[str], None] = lambda phase: None,
    *,
    to_train: bool = True,
    model_files: ModelFiles | None = None,
) -> Prepared:
    """Check the run without weights, and tokenize the data; `report` gets the name of each phase. Raises UserError.

    With `to_train=False` the output folder may already contain a run. `model_files` is an earlier result of
    `read_model_files` in this process.
    """
    check_settings(config)
    check_folder(config, to_train=to_train)
    _check_adapter_folder(config)
    if is_pipeline(config):
        prepared = prepare_image_run(config, report)
    else:
        prepared = _prepare_text(config, report, model_files)
    # A warm-up that is too long for one rank is also too long for more ranks, which take fewer steps.
    step_warnings(resolve_global_batch(config, count_samples(prepared), 1), count_samples(prepared), 1)
    return prepared


def _prepare_text(config: RunConfig, report: Callable[[str], None], model_files: ModelFiles | None) -> Prepared:
    if model_files is None:
        report(f"checking the model {config.base_model}")
        model_files = read_model_files(config)
    refuse_image_settings(config)
    notes, given = model_files.notes, config
    config = fit_max_length(given, model_files.longest)
    if config is not given:
        notes += (f"dataset.max_length is {config.dataset.max_length}, the model's context, instead of the default",)
    # Before the data is tokenized, which takes long and fills the cache.
    prompts = tuple(sample_prompts(config.logging.sample_prompts))
    if config.evaluation.tasks:
        load_tasks(config.evaluation.tasks)
    for name in config.evaluation.metrics:
        build_metric(name, config.evaluation)
    reference = load_reference(config, model_files.tokenizer)
    paths = [source.path for source in config.dataset.mix] or [config.dataset.path]
    report(f"tokenizing {', '.join(map(str, paths))}, unless it is cached")
    data = prepare_data(
        config.dataset,
        model_files.tokenizer,
        seed=config.seed,
        cache_dir=Path(config.dataset.cache_dir).expanduser(),
        max_length_of_model=model_files.longest,
        check=partial(check_pairs, config),
        images=model_files.images,
    )
    check_images(config, data.stats)
    if config.task == "preference" and data.stats.margins:
        notes += (f"warning: dataset: {data.stats.margins:,} pairs have a margin, which only task: reward uses",)
    if config.evaluation.metrics:
        assert data.evaluation is not None
        AnswerMetrics(config.evaluation, data.evaluation, model_files.tokenizer)
    files = model_files
    return Prepared(files.tokenizer, files.model_config, data, notes, reference, prompts, files.longest, files.images)


def check_images(config: RunConfig, stats: DataStats) -> None:
    """Raise UserError for settings that do not work with images yet."""
    if not (stats.with_images or (stats.evaluation or stats).with_images):
        return
    fixes: dict[str, tuple[Any, ...]] = {
        "parallel.sequence": (config.parallel.sequence, 1),
        "evaluation.metrics": (list(config.evaluation.metrics), []),
        "model.attn_implementation": (config.model.attn_implementation, "auto", "sdpa"),
    }
    for name, (value, *possible) in fixes.items():
        if value not in possible:
            raise UserError(f"{name}={value}: does not work with images, which dataset has; set it to {possible[0]}")


def check_pairs(config: RunConfig, stats: DataStats) -> None:
    """Raise UserError if the data has pairs of answers and the task is another, or the reverse."""
    wanted = config.task in ("preference", "reward")
    if not wanted and stats.desirable + stats.undesirable:
        raise UserError(
            f"task={config.task}: dataset has answers labelled true or false, which is preference data; set task: "
            "preference and preference.loss: kto, or, to learn every answer, the dataset.format of the records without "
            "labels, such as prompt_completion or messages"
        )
    for label, part in (("dataset", stats), ("dataset.evaluation", stats.evaluation or stats)):
        if part.pairs and not wanted:
            raise UserError(
                f"task={config.task}: {label} has pairs of a chosen and a rejected answer, which is preference data; "
                f"set task: preference, or, to learn the chosen answers alone, {label}.fields: {{prompt: prompt, "
                "completion: chosen} with your names of these fields"
            )
        if part.pairs and wanted:
            _check_labels(config, part, label)
        if wanted and part.pairs < part.documents:
            by_label = config.task == "preference" and "kto" in config.preference.loss
            needed = "answers labelled true or false" if by_label else "pairs of a chosen and a rejected answer"
            raise UserError(
                f"task={config.task}: {part.documents - part.pairs:,} of {part.documents:,} records of {label} are no "
                f"{needed}; correct or remove them, or use task: language"
            )


def _check_labels(config: RunConfig, part: DataStats, label: str) -> None:
    """Raise UserError unless answers have labels if and only if the loss is `kto`, and labels of both kinds."""
    labelled, loss = part.desirable + part.undesirable, next(iter(config.preference.loss))
    if config.task == "reward":
        if labelled:
            raise UserError(
                f"task=reward: {labelled:,} records of {label} have one answer with a label, and a reward model learns "
                "from pairs; use task: preference with preference.loss: kto"
            )
        return
    if loss != "kto" and labelled:
        raise UserError(
            f"preference.loss={loss}: {labelled:,} records of {label} have one answer with a label, not a pair; use kto"
        )
    if loss == "kto" and labelled < part.pairs:
        raise UserError(
            f"preference.loss=kto: {part.pairs - labelled:,} of {part.pairs:,} records of {label} are pairs, not "
            f"answers with a label; to use both answers of each pair set {label}.format: unpaired"
        )
    if loss == "kto" and not (part.desirable and part.undesirable) and label == "dataset":
        only = "true" if part.desirable else "false"
        raise UserError(
            f"preference.loss=kto: all {labelled:,} labels of {label} are {only}; give answers of both labels"
        )


def check_settings(config: RunConfig) -> None:
    """Raise UserError for settings that this machine or its packages do not support."""
    check_reporters(config.logging)
    check_extra_keys(config.training, config.zero)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolve_precision(config.training.precision, device)
    if config.adapter == "qlora":
        check_card(config.quantization.quant_type, device)
    if config.training.qat:
        check_torchao(f"training.qat={config.training.qat}")
    kernels = config.model.attn_implementation
    if kernels.startswith("flash_attention") and importlib.util.find_spec("flash_attn") is None:
        raise UserError(f"model.attn_implementation={kernels}: the package flash-attn is not installed; use auto")
    on_gpu = {"lora.init": "loftq", "ops.backend": "cuda", "model.attn_implementation": "flex_attention"}
    for name, value in on_gpu.items() if not torch.cuda.is_available() else ():
        if switch_value(config, name) == value:
            raise UserError(f"{name}={value}: needs a GPU, and this machine has none; remove it")
    if config.ops.backend == "cuda" and _uses_operators(config):
        import ops

        try:
            ops.check_requested()
        except ValueError as error:
            raise UserError(str(error)) from error


def check_folder(config: RunConfig, *, to_train: bool = True) -> None:
    """Raise UserError if the output folder cannot be used, or has no checkpoint to resume."""
    check_place(config)
    choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), read=False)
    if to_train:
        check_free(config)


def read_model_files(config: RunConfig) -> ModelFiles:
    """Read the model's configuration and tokenizer, and check its weights and layers. Raises UserError."""
    model_config = load_model_config(config.base_model, config.model)
    is_full = config.adapter == "none"
    check_kind(config.base_model, model_config, all_trained=is_full, may_score=config.model.has_score)
    check_settings_fit(config, model_config)
    notes = check_weights(config.base_model, config.model, model_config)
    longest = context_length(model_config)
    tokenizer = load_tokenizer(config.base_model, config.model)
    if config.dataset.chat_template:
        # Saved with the tokenizer, so that the adapter is used with the prompts it was trained on.
        tokenizer.chat_template = find_chat_template(tokenizer, config.dataset.chat_template)
    empty = empty_model(model_config, config.model)
    check_supported(config.model, empty)
    if config.parallel.sequence > 1:
        check_shareable(config.parallel.sequence, empty)
    check_visited(config.base_model, empty)
    if config.adapter != "none":
        check_targets(empty, config.lora)
        notes += bias_lines(empty, config.lora.adapter_path)
        check_added_tokens(empty, config.lora, tokenizer.convert_tokens_to_ids(list(config.model.added_tokens)))
    if config.training.qat:
        check_integer_targets(empty, config.lora, config.training.qat)
    notes += serving_notes(config, empty)
    check_router_loss(empty, config.training.router_aux_loss, None if config.adapter == "none" else config.lora)
    check_saved_modules(config, model_config, empty)
    if config.adapter == "qlora":
        check_packable(empty)
    images = load_image_reader(config, tokenizer, model_config)
    return ModelFiles(tokenizer, model_config, longest, tuple(notes), images)


def load_reference(config: RunConfig, tokenizer: Any) -> Samples | None:
    """Load the texts of scu.reference; raises UserError, also for an invalid law of the SCU."""
    if not config.scu.enabled:
        return None
    # Any size below 2B; the model's parameters are counted when its weights are loaded.
    build_law(config.scu, total_steps=1, base_parameters=1)
    if config.scu.reference is None:
        return None
    return reference_samples(config.dataset, tokenizer, config.scu.reference, setting="scu.reference", seed=config.seed)


def prepare_to_resume(
    config: RunConfig,
    world_size: int | None = None,
    report: Callable[[str], None] = lambda phase: None,
    *,
    to_train: bool = True,
) -> tuple[Prepared, Resumption]:
    """Prepare a run, and check the checkpoint that it resumes, if any, by reading all of it."""
    if world_size is not None:
        check_ranks(config, world_size)
    check_place(config)
    choice = choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), read=True)
    prepared = prepare(config, report, to_train=to_train)
    config = fit_max_length(config, prepared.longest)
    return prepared, plan_resumption(config, prepared, world_size=world_size, choice=choice)


def build_operators(config: RunConfig, report: Callable[[str], None]) -> None:
    """Build the CUDA operators for the ranks if this run uses them."""
    if not _uses_operators(config):
        return
    from trainer.patches.installation import load_operators  # imports the operators

    report("building the operators, unless they are cached")
    load_operators(config)


def _uses_operators(config: RunConfig) -> bool:
    return config.ops.backend in ("auto", "cuda") and config.adapter != "none" and torch.cuda.is_available()


def _check_adapter_folder(config: RunConfig) -> None:
    path = config.lora.adapter_path
    if path and (Path(path).exists() or path.startswith(("/", "."))):
        if not (Path(path) / FILE).exists():
            raise UserError(f"lora.adapter_path={path}: has no {FILE}; use the folder of a PEFT adapter")
        if problem := find_adapter_damage(Path(path)):
            raise UserError(f"lora.adapter_path={path}: {problem}")
    elif path:
        _check_adapter_on_hub(path)


def _check_adapter_on_hub(name: str) -> None:
    from peft import PeftConfig

    check_source("lora.adapter_path", name)
    disable_retries_without_network(name)
    try:
        PeftConfig.from_pretrained(name)
    except Exception as error:  # invalid values raise any exception in PEFT
        raise unreadable_error("lora.adapter_path", name, error) from None
