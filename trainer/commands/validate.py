"""`zerolora validate CONFIG [key=value ...]`: run every check that comes before training, and describe the run.

`--settings-only` checks neither model nor data.

The model's configuration, tokenizer and targets are checked and the data is tokenized into its cache; no weights are
read, and nothing is written to the run's folder. Exit code 0, or 2 after one line on stderr.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.output_folder import find_obstacle
from trainer.config import CommandParser, RunConfig, UserError, load_config
from trainer.config.command_parser import positive_int
from trainer.contract.default_ranks import default_ranks
from trainer.contract.standard_streams import PROGRESS
from trainer.setup.early_checks import check_early

if TYPE_CHECKING:
    from trainer.data.prepared import Prepared


def findings(config: RunConfig, prepared: "Prepared", ranks: int) -> list[str]:
    """Return lines `name: text` that describe the run with this model, data and number of ranks."""
    import torch

    from trainer.data.prepared import fit_max_length, samples_of
    from trainer.data.step_count import (
        smaller_batch_line,
        step_warnings,
        steps_line,
        with_global_batch,
        with_looks_in_steps,
    )
    from trainer.memory.preflight import describe_cpu_memory
    from trainer.model.adapter import adapted_layers, apply_adapter, rank_lines
    from trainer.model.base import empty_model
    from trainer.model.capacity import too_small
    from trainer.model.stored_fp8 import fp8_form
    from trainer.model.targets import unadapted_layers
    from trainer.patches.mamba import unadapted_lines
    from trainer.tasks.images.model import ImageModel
    from trainer.tasks.images.pipeline import Pipeline

    config = fit_max_length(config, prepared.longest)
    is_image = isinstance(prepared.model_config, Pipeline)
    model: Any
    if is_image:
        model = ImageModel(prepared.model_config)
    else:
        model = empty_model(prepared.model_config, config.model)
        model.tie_weights()  # a tied head is counted once
    size = sum(parameter.numel() for parameter in model.parameters())
    if is_image:
        name = type(model.denoiser).__name__
        lines = [f"model: {config.base_model}: {name} of {model.family.pipeline}, {size:,} parameters"]
    else:
        text_config = prepared.model_config.get_text_config()
        lines = [
            f"model: {config.base_model}: {type(model).__name__}, {size:,} parameters, "
            f"{text_config.num_hidden_layers} layers, context {text_config.max_position_embeddings:,}",
            f"tokenizer: {type(prepared.tokenizer).__name__}, {len(prepared.tokenizer):,} tokens, "
            f"pads with {prepared.tokenizer.pad_token!r}",
        ]
    if config.adapter == "none":
        lines.append("adapter: none, all weights are trained")
    else:
        # A model without weights cannot hold initial values.
        plain = config.lora.model_copy(update={"init": "default", "adapter_path": None})
        peft_type = None if is_image else "CAUSAL_LM"
        peft_model = apply_adapter(model, plain, next(model.parameters()).dtype, task_type=peft_type)
        adapted = adapted_layers(peft_model)
        trained = sum(layer.parameters for layer in adapted)
        where = ", ".join(f"{layer.name} ({layer.count})" for layer in adapted)
        quantised = "an 8-bit base" if config.quantization.eight_bit else "a 4-bit base"
        fp8 = not is_image and fp8_form(prepared.model_config) is not None
        base = "the base as it is stored, in FP8" if fp8 else "the base as it is"
        base = quantised if config.adapter == "qlora" and not fp8 else base
        part = f"{trained:,} parameters ({trained / (size + trained):.2%} of all)"
        lines.append(f"adapter: r={config.lora.r} on {base}, {part}: {where}")
        lines += rank_lines(adapted, config.lora) + unadapted_layers(peft_model, config.lora)
        lines += unadapted_lines(peft_model, quantized=config.adapter == "qlora")
    lines += [f"note: {note}" for note in prepared.notes]
    lines += [f"data: {line}" for line in prepared.data.stats.lines()]
    if not torch.cuda.is_available():
        lines.append(f"memory: {describe_cpu_memory(config, prepared)}")
    samples = samples_of(prepared)
    if config.adapter != "none" and samples is not None:
        small = too_small(trained, prepared.data.stats.target_tokens, config.lora.r)
        lines += [f"warning: {small}"] if small else []
    resolved = with_looks_in_steps(with_global_batch(config, samples, ranks), samples, ranks)
    lines.append(f"steps: {steps_line(resolved.training, samples, ranks)}{_on_more(config)}")
    if smaller := smaller_batch_line(config.training, resolved.training, ranks):
        lines.append(f"note: {smaller}")
    lines += [f"warning: {warning}" for warning in step_warnings(resolved, samples, ranks)]
    lines.append(f"output: {Path(config.output_dir).absolute()}")
    return lines


def _on_more(config: RunConfig) -> str:
    """Describe how adding ranks changes the batch size and the number of steps."""
    if config.training.global_batch_size is not None:
        return ""
    return "; larger batches on more" if config.training.max_steps else "; fewer steps on more"


def _settings_alone(arguments: argparse.Namespace) -> int:
    """Return exit code 0, or 2 after a line for each remaining mistake."""
    path = Path(arguments.config)
    try:
        loaded = load_config(path, arguments.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for note in loaded.notes:
        print(f"note: {note}")
    print(f"OK: the settings of {path}; model and data: {shlex.join(['zerolora', 'validate', str(path)])}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 after one line on stderr."""
    parser = CommandParser(
        prog="zerolora validate", description="Check a configuration, its model and its data without training."
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--ranks", type=positive_int, help="number of ranks of the run (default: as on this machine)")
    parser.add_argument("--settings-only", action="store_true", help="check the settings; no model, no data")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.settings_only:
        return _settings_alone(arguments)
    try:
        ranks = arguments.ranks or default_ranks()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here computes on a device
        # Fast, without importing torch.
        loaded = load_config(arguments.config, arguments.overrides)
        for note in loaded.notes:
            print(f"note: {note}")
        check_early(loaded.config, to_train=False)
        PROGRESS.show("importing")
        from trainer.checkpoint.finished_run import quiet_libraries
        from trainer.setup.preflight import prepare_to_resume

        quiet_libraries()
        prepared, resumption = prepare_to_resume(loaded.config, tell=PROGRESS.show, to_train=False)
        for warning in resumption.warnings:
            print(f"warning: {warning}")
        for line in findings(loaded.config, prepared, ranks):
            print(line)
        if resumption.checkpoint is not None:
            print(f"resume: from {resumption.checkpoint}")
        for note in resumption.notes:
            print(f"resume: {note}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    problem = find_obstacle(loaded.config)
    if problem:
        print(f"OK but for output_dir={loaded.config.output_dir}: {problem}")
    else:
        print(f"OK: {shlex.join(['zerolora', 'train', arguments.config, *arguments.overrides])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
