"""Check and prepare a run before weights are loaded: the model's configuration, tokenizer, targets, and data.

`zerolora prepare` (trainer/commands/prepare_run.py) runs the checks and fills the cache of tokenized data, which the
ranks reuse. Every failure raises UserError, and nothing is written to the output folder.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainer.checkpoint.adapter_files import describe_adapter_damage
from trainer.checkpoint.checkpoint_files import choose_checkpoint
from trainer.checkpoint.identity import Resumption, plan_resumption
from trainer.checkpoint.output_folder import check_no_conflict, check_output_folder, prefix_errors
from trainer.config import RunConfig, UserError
from trainer.config.adapter_settings import SETTINGS_FILE, read_adapter_settings
from trainer.config.files import UnreadableFileError
from trainer.config.needs import read_switch_value
from trainer.data.prepared import PreparedRun, count_samples, has_images
from trainer.data.sources import disable_retries_without_network
from trainer.data.step_count import list_step_warnings, resolve_global_batch
from trainer.model.base import build_empty_model
from trainer.model.eight_bit import check_fp8_support
from trainer.model.expert_targets import find_expert_targets
from trainer.model.integer_weights import check_torchao
from trainer.model.model_source import build_load_error, check_source
from trainer.monitor.metrics import check_reporters
from trainer.parallel.engine.deepspeed_engine import check_extra_keys, resolve_precision
from trainer.parallel.ranks.sequence_group import check_ranks_divisible
from trainer.setup.kinds import find_model_kind


def prepare(
    config: RunConfig,
    report: Callable[[str], None] = lambda phase: None,
    *,
    for_training: bool = True,
    model_files: PreparedRun | None = None,
) -> PreparedRun:
    """Check the run without loading weights, and tokenize the data. `report` is called with the name of each phase.

    With `for_training=False`, the output folder may already contain a run. `model_files` is the result of the model
    kind's `read_files`; None if not read yet.
    """
    if config.runs:
        check_output_folder(config)
        return _merge_prepared_runs(
            config, [prefix_errors(prepare, run, report, for_training=for_training) for run in config.runs]
        )
    check_settings(config)
    check_folder(config, for_training=for_training)
    _check_adapter_folder(config)
    prepared = find_model_kind(config).prepare(config, report, model_files)
    # A warm-up that is too long for one rank is also too long for more ranks, which take fewer steps.
    list_step_warnings(resolve_global_batch(config, count_samples(prepared), 1), count_samples(prepared), 1)
    return prepared


def _merge_prepared_runs(config: RunConfig, adapters: Sequence[PreparedRun]) -> PreparedRun:
    """Merge the adapters' prepared runs into the first one. Raises UserError for images and adapted experts."""
    if any(map(has_images, adapters)):
        raise UserError("adapters: image models support only one adapter per run; remove adapters")
    model = build_empty_model(adapters[0].model_config, config.model) if config.lora.experts else None
    if model is not None and any(find_expert_targets(model, run.lora) for run in config.runs):
        raise UserError("lora.experts=true: experts can have only one adapter; set lora.experts: false")
    return replace(adapters[0], adapters=tuple(adapters))


def check_settings(config: RunConfig) -> None:
    """Raise UserError for settings that this machine or its installed packages do not support."""
    check_reporters(config.logging)
    check_extra_keys(config.training, config.zero)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolve_precision(config.training.precision, device)
    if config.adapter == "qlora":
        check_fp8_support(config.quantization.quant_type, device)
    if config.training.qat:
        check_torchao(f"training.qat={config.training.qat}")
    kernels = config.model.attn_implementation
    if kernels.startswith("flash_attention") and importlib.util.find_spec("flash_attn") is None:
        raise UserError(f"model.attn_implementation={kernels}: the package flash-attn is not installed; use auto")
    on_gpu = {"lora.init": "loftq", "ops.backend": "cuda", "model.attn_implementation": "flex_attention"}
    for name, value in on_gpu.items() if not torch.cuda.is_available() else ():
        if read_switch_value(config, name) == value:
            raise UserError(f"{name}={value}: needs a GPU, and this machine has none; remove the setting")
    if config.ops.backend == "cuda" and _uses_operators(config):
        import ops

        try:
            ops.check_kernels_available()
        except ValueError as error:
            raise UserError(str(error)) from error


def check_folder(config: RunConfig, *, for_training: bool = True) -> None:
    """Raise UserError if the output folder cannot be used, or lacks the checkpoint to resume from."""
    check_output_folder(config)
    for run in config.runs:
        check_folder(run, for_training=for_training)
    if config.runs:
        return
    choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), verify=False)
    if for_training:
        check_no_conflict(config)


def prepare_to_resume(
    config: RunConfig,
    world_size: int | None = None,
    report: Callable[[str], None] = lambda phase: None,
    *,
    for_training: bool = True,
) -> tuple[PreparedRun, Resumption]:
    """Return the prepared run and the plan for resuming it, after verifying the whole checkpoint if one exists."""
    if world_size is not None:
        check_ranks_divisible(config.parallel.sequence, config.zero, world_size)
        resolve_global_batch(config, None, config.count_data_ranks(world_size))  # raises before the data is read
    check_output_folder(config)
    if config.runs:
        each = [
            prefix_errors(prepare_to_resume, run, world_size, report, for_training=for_training) for run in config.runs
        ]
        return _merge_prepared_runs(config, [prepared for prepared, _ in each]), each[0][1]
    choice = choose_checkpoint(config.training.resume_from_checkpoint, Path(config.output_dir), verify=True)
    prepared = prepare(config, report, for_training=for_training)
    config = config.fit_max_length(prepared.context_length)
    return prepared, plan_resumption(config, prepared, world_size=world_size, choice=choice)


def build_operators(config: RunConfig, report: Callable[[str], None]) -> None:
    if not _uses_operators(config):
        return
    from trainer.patches.installation import load_operators  # imports the operators

    report("loading the operators (compiled on first use)")
    load_operators(config.ops.backend)


def _uses_operators(config: RunConfig) -> bool:
    return config.ops.backend in ("auto", "cuda") and config.adapter != "none" and torch.cuda.is_available()


def _check_adapter_folder(config: RunConfig) -> None:
    path = config.lora.adapter_path
    if path and (Path(path).exists() or path.startswith(("/", "."))):
        if not (Path(path) / SETTINGS_FILE).exists():
            problem = "is a file" if Path(path).is_file() else f"has no {SETTINGS_FILE}"
            raise UserError(f"lora.adapter_path={path}: {problem}; use the folder of a PEFT adapter")
        if damage := describe_adapter_damage(Path(path)):
            raise UserError(f"lora.adapter_path={path}: {damage}")
    elif path:
        _check_adapter_on_hub(path)


def _check_adapter_on_hub(name: str) -> None:
    from transformers.utils import cached_file

    check_source("lora.adapter_path", name)
    disable_retries_without_network(name)
    try:
        file = Path(str(cached_file(name, SETTINGS_FILE)))
    except (OSError, ValueError) as error:
        raise build_load_error("lora.adapter_path", name, error) from None
    try:
        read_adapter_settings(file.parent)
    except UnreadableFileError as error:
        raise UserError(f"lora.adapter_path={name}: {SETTINGS_FILE}: {error.problem}; {error.fix}") from None
