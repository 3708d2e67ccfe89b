"""Everything that can be known before a weight is loaded: the model's config, the tokenizer, the targets, the data.

`zerolora prepare` (trainer/commands/prepare_run.py) runs the checks and fills the cache of tokenised data; ranks find
both done. Every failure is a UserError: one line, exit code 2, nothing written to the output folder.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
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
from trainer.data import Samples, prepare_data
from trainer.data.conversations import chat_template_of
from trainer.data.prepared import Prepared, fit_max_length, samples_of
from trainer.data.prompt_files import sample_prompts
from trainer.data.reference_text import reference_samples
from trainer.data.step_count import step_warnings, with_global_batch
from trainer.model.adapter import bias_lines, check_added_tokens
from trainer.model.base import check_weights, context_length, empty_model, load_model_config, load_tokenizer
from trainer.model.eight_bit import check_card
from trainer.model.expert_targets import check_router_loss, check_visited
from trainer.model.integer_weights import check_rounded, check_torchao
from trainer.model.model_kind import check_kind
from trainer.model.model_source import check_source, unreadable
from trainer.model.served_layers import serving_notes
from trainer.model.stored_fp8 import check_saved_modules, check_settings_fit
from trainer.model.targets import check_targets
from trainer.monitor.metrics import check_reporters
from trainer.parallel.engine.deepspeed_engine import check_extra_keys, resolve_precision
from trainer.patches.mamba import check_packable
from trainer.patches.packed_attention import check_supported
from trainer.scu.law_settings import build_law
from trainer.tasks.images.pipeline import is_pipeline
from trainer.tasks.images.prepare import prepare_image_run, refuse_image_settings


@dataclass(frozen=True)
class ModelFiles:
    """What the files of a model say, apart from its weights."""

    tokenizer: Any
    model_config: Any
    longest: int | None
    """Tokens that the model was made for."""
    notes: tuple[str, ...]


def prepare(
    config: RunConfig,
    tell: Callable[[str], None] = lambda phase: None,
    *,
    to_train: bool = True,
    model_files: ModelFiles | None = None,
) -> Prepared:
    """Check what can be checked without weights and tokenise the data; `tell` gets each phase. Raises UserError.

    `to_train` false: for a look at a configuration whose output folder may hold a run already. `model_files` is what
    `read_model_files` has found in this process.
    """
    check_settings(config)
    check_folder(config, to_train=to_train)
    _check_adapter_folder(config)
    if is_pipeline(config):
        prepared = prepare_image_run(config, tell)
    else:
        prepared = _prepare_text(config, tell, model_files)
    # More ranks take fewer steps: a warm-up that is too long on one rank is too long on any number.
    step_warnings(with_global_batch(config, samples_of(prepared), 1), samples_of(prepared), 1)
    return prepared


def _prepare_text(config: RunConfig, tell: Callable[[str], None], model_files: ModelFiles | None) -> Prepared:
    if model_files is None:
        tell(f"checking the model {config.base_model}")
        model_files = read_model_files(config)
    refuse_image_settings(config)
    notes, given = model_files.notes, config
    config = fit_max_length(given, model_files.longest)
    if config is not given:
        notes += (f"dataset.max_length is {config.dataset.max_length}, the model's context: shorter than the default",)
    paths = [source.path for source in config.dataset.mix] or [config.dataset.path]
    tell(f"tokenising {', '.join(map(str, paths))}, or finding that done")
    data = prepare_data(
        config.dataset,
        model_files.tokenizer,
        seed=config.seed,
        cache_dir=Path(config.dataset.cache_dir).expanduser(),
        max_length_of_model=model_files.longest,
    )
    if data.stats.records:
        tell(f"{data.stats.records:,} records, {data.stats.documents:,} documents to train on")
    return Prepared(
        model_files.tokenizer,
        model_files.model_config,
        data,
        notes,
        reference_of(config, model_files.tokenizer),
        tuple(sample_prompts(config.logging.sample_prompts)),
        model_files.longest,
    )


def check_settings(config: RunConfig) -> None:
    """Raise UserError for settings that this machine, or its packages, cannot carry out."""
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
            raise UserError(f"{name}={value}: runs on a GPU, and this machine has none; remove it")


def check_folder(config: RunConfig, *, to_train: bool = True) -> None:
    """Raise UserError where the output folder cannot be used, or has no checkpoint to go on from."""
    check_place(config)
    choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), read=False)
    if to_train:
        check_free(config)


def read_model_files(config: RunConfig) -> ModelFiles:
    """The model's configuration and tokenizer, and whether its weights and layers will do. Raises UserError."""
    model_config = load_model_config(config.base_model, config.model)
    check_kind(config.base_model, model_config, all_trained=config.adapter == "none")
    check_settings_fit(config, model_config)
    notes = check_weights(config.base_model, config.model, model_config)
    longest = context_length(model_config)
    tokenizer = load_tokenizer(config.base_model, config.model)
    if config.dataset.chat_template:
        # Saved with the tokenizer, so that whoever loads the adapter writes prompts as it was trained on.
        tokenizer.chat_template = chat_template_of(tokenizer, config.dataset.chat_template)
    empty = empty_model(model_config, config.model)
    check_supported(config.model, empty)
    check_visited(config.base_model, empty)
    if config.adapter != "none":
        check_targets(empty, config.lora)
        notes += bias_lines(empty, config.lora.adapter_path)
        check_added_tokens(empty, config.lora, tokenizer.convert_tokens_to_ids(list(config.model.added_tokens)))
    if config.training.qat:
        check_rounded(empty, config.lora, config.training.qat)
    notes += serving_notes(config, empty)
    check_router_loss(empty, config.training.router_aux_loss, None if config.adapter == "none" else config.lora)
    check_saved_modules(config, model_config, empty)
    if config.adapter == "qlora":
        check_packable(empty)
    if config.dataset.packing:
        check_packing(model_config)
    return ModelFiles(tokenizer, model_config, longest, tuple(notes))


def reference_of(config: RunConfig, tokenizer: Any) -> Samples | None:
    """The texts of scu.reference. Raises UserError, also for a law of the SCU that means nothing."""
    if not config.scu.enabled:
        return None
    # A size below 2B stands in for the model's, which is counted when its weights are there.
    build_law(config.scu, total_steps=1, base_parameters=1)
    if config.scu.reference is None:
        return None
    return reference_samples(config.dataset, tokenizer, config.scu.reference, setting="scu.reference", seed=config.seed)


def prepare_to_resume(
    config: RunConfig,
    world_size: int | None = None,
    tell: Callable[[str], None] = lambda phase: None,
    *,
    to_train: bool = True,
) -> tuple[Prepared, Resumption]:
    """`prepare`, and what comes before and after it where a checkpoint is resumed; each byte of it is read."""
    check_place(config)
    choice = choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), read=True)
    prepared = prepare(config, tell, to_train=to_train)
    config = fit_max_length(config, prepared.longest)
    return prepared, plan_resumption(config, prepared, world_size=world_size, choice=choice)


def begin_to_build(config: RunConfig) -> None:
    """Compile the CUDA operators, if this run is to use them, beside whatever comes until they are needed.

    UserError where they are asked for and cannot be built.
    """
    if not _uses_operators(config):
        return
    import ops

    assert config.ops.backend in ("auto", "cuda")
    try:
        ops.start_build(config.ops.backend)
    except ValueError as error:
        raise UserError(str(error)) from error


def build_operators(config: RunConfig, tell: Callable[[str], None]) -> None:
    """Wait until the CUDA operators are built, if this run is to use them, for ranks that are to find them built."""
    if not _uses_operators(config):
        return
    import ops

    assert config.ops.backend in ("auto", "cuda")
    tell("building the operators, or finding them built")
    try:
        ops.load(config.ops.backend)
    except ValueError as error:
        raise UserError(str(error)) from error


def _uses_operators(config: RunConfig) -> bool:
    return config.ops.backend in ("auto", "cuda") and config.adapter != "none" and torch.cuda.is_available()


def check_packing(model_config: Any) -> None:
    """Models whose layers carry a state along the sequence let documents of a pack see each other."""
    text_config = model_config.get_text_config()
    layer_types = {str(kind) for kind in getattr(text_config, "layer_types", None) or ()}
    layer_types |= {str(kind) for kind in getattr(text_config, "layers_block_type", None) or ()}
    recurrent = sorted(kind for kind in layer_types if not kind.endswith("attention") or kind == "linear_attention")
    state_space = [name for name in ("ssm_state_size", "mamba_d_state", "state_size") if hasattr(text_config, name)]
    if recurrent or state_space:
        what = ", ".join(recurrent or state_space)
        raise UserError(
            f"dataset.packing=true: this model has recurrent layers ({what}) that carry one document into the next; "
            "set dataset.packing: false"
        )


def _check_adapter_folder(config: RunConfig) -> None:
    path = config.lora.adapter_path
    if path and (Path(path).exists() or path.startswith(("/", "."))):
        if not (Path(path) / FILE).exists():
            raise UserError(f"lora.adapter_path={path}: no {FILE} there; name the folder of a PEFT adapter")
        if problem := find_adapter_damage(Path(path)):
            raise UserError(f"lora.adapter_path={path}: {problem}")
    elif path:
        _check_adapter_on_hub(path)


def _check_adapter_on_hub(name: str) -> None:
    """Raise UserError where the hub, or its cache, does not give an adapter's settings: before weights are loaded."""
    from peft import PeftConfig

    check_source("lora.adapter_path", name)
    disable_retries_without_network(name)
    try:
        PeftConfig.from_pretrained(name)
    except Exception as error:  # what its values make of PEFT's classes is as bad as a file that is not there
        raise unreadable("lora.adapter_path", name, error) from None
