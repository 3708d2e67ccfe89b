"""Describe a prepared run for `zerolora validate`: model, adapter, data, steps and output folder."""

from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.data.prepared import PreparedRun, count_samples
from trainer.data.step_count import (
    describe_steps,
    list_step_warnings,
    resolve_eval_and_save_steps,
    resolve_global_batch,
)
from trainer.model.adapter import (
    apply_empty_adapter,
    build_capacity_warning,
    list_rank_warnings,
    summarize_adapted_layers,
)
from trainer.model.stored_settings import find_stored_format
from trainer.model.targets import describe_unadapted_layers
from trainer.parallel.engine.adapter_choice import DEFAULT
from trainer.patches.mamba import describe_unadapted_weights
from trainer.setup.kinds import find_model_kind


def describe_run(config: RunConfig, prepared: PreparedRun, ranks: int) -> list[str]:
    if config.runs:
        by_run = [describe_run(run, data, ranks) for run, data in zip(config.runs, prepared.adapters, strict=True)]
        shared = [line for line in by_run[0] if all(line in lines for lines in by_run)]
        named = zip((Path(run.output_dir).name for run in config.runs), by_run, strict=True)
        return shared + [f"{name}: {line}" for name, lines in named for line in lines if line not in shared]
    config = config.fit_max_length(prepared.context_length)
    model, lines = find_model_kind(config).describe(config, prepared)
    trained, rank = None, config.lora.r
    if config.adapter == "none":
        lines.append("adapter: none, all weights are trained")
    else:
        trained, rank, adapter_lines = _describe_adapter(config, model)
        lines += adapter_lines
    lines += [note if note.startswith("warning: ") else f"note: {note}" for note in prepared.notes]
    lines += [f"data: {line}" for line in prepared.data.stats.format_summary()]
    samples, data_ranks = count_samples(prepared), config.count_data_ranks(ranks)
    if trained is not None and samples is not None:
        warning = build_capacity_warning(trained, prepared.data.stats.target_tokens, rank)
        lines += [f"warning: {warning}"] if warning else []
    resolved = resolve_eval_and_save_steps(resolve_global_batch(config, samples, data_ranks), samples, data_ranks)
    lines.append(f"steps: {describe_steps(resolved.training, samples, data_ranks)}")
    lines += [f"warning: {warning}" for warning in list_step_warnings(resolved, samples, data_ranks, config)]
    lines.append(f"output: {Path(config.output_dir).absolute()}")
    return lines


def _describe_adapter(config: RunConfig, model: Any) -> tuple[int, int, list[str]]:
    size = sum(parameter.numel() for parameter in model.parameters())
    dtype, task_type = next(model.parameters()).dtype, find_model_kind(config).find_task_class(config).peft_type
    peft_model = apply_empty_adapter(model, config.lora, dtype, task_type=task_type)
    rank = peft_model.peft_config[DEFAULT].r
    adapted = summarize_adapted_layers(peft_model)
    trained = sum(layer.parameters for layer in adapted)
    where = ", ".join(f"{layer.name} ({layer.count})" for layer in adapted)
    if (stored := find_stored_format(model.config)) is not None:
        base = f"a base stored in {stored.name}"
    elif config.adapter == "qlora":
        base = "an 8-bit base" if config.quantization.is_8bit else "a 4-bit base"
    else:
        base = "an unquantized base"
    part = f"{trained:,} parameters ({trained / (size + trained):.2%} of all)"
    lines = [f"adapter: r={rank} on {base}, {part}: {where}"]
    lines += list_rank_warnings(config.lora) + describe_unadapted_layers(peft_model, config.lora)
    return trained, rank, lines + describe_unadapted_weights(peft_model)
