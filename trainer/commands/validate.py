"""`zerolora validate CONFIG [key=value ...]`: every check that comes before training, and what was found.

The model's configuration, tokenizer and targets are looked at and the data is tokenised into its cache; no weight is
read, and nothing is written to the run's folder. Exit code 0, or 2 after one line on stderr.
"""

import os
import shlex
import sys
from pathlib import Path

from trainer.checkpoint.finished_run import quiet_libraries
from trainer.checkpoint.output_folder import obstacle
from trainer.config import CommandParser, RunConfig, UserError, load_config
from trainer.data.prepared import Prepared, samples_of
from trainer.data.step_count import (
    smaller_batch_line,
    step_warnings,
    steps_line,
    with_global_batch,
    with_looks_in_steps,
)
from trainer.preflight import prepare_to_resume


def findings(config: RunConfig, prepared: Prepared) -> list[str]:
    """What the configuration means on this model and data: `name: text` lines."""
    import torch

    from trainer.memory.preflight import on_this_cpu
    from trainer.model.adapter import adapted_layers, apply_adapter, rank_lines
    from trainer.model.base import empty_model
    from trainer.model.targets import unadapted_layers
    from trainer.patches.mamba import unadapted_lines

    text_config = prepared.model_config.get_text_config()
    model = empty_model(prepared.model_config, config.model)
    model.tie_weights()  # a tied head is counted once
    size = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"model: {config.base_model}: {type(model).__name__}, {size:,} parameters, "
        f"{text_config.num_hidden_layers} layers, context {text_config.max_position_embeddings:,}",
        f"tokenizer: {type(prepared.tokenizer).__name__}, {len(prepared.tokenizer):,} tokens, "
        f"pads with {prepared.tokenizer.pad_token!r}",
    ]
    if config.adapter == "none":
        lines.append("adapter: none, all weights are trained")
    else:
        # Values drawn for an adapter, or read for one that exists, have no place on a model without weights.
        plain = config.lora.model_copy(update={"init": "default", "adapter_path": None})
        peft_model = apply_adapter(model, plain, next(model.parameters()).dtype)
        adapted = adapted_layers(peft_model)
        trained = sum(layer.parameters for layer in adapted)
        where = ", ".join(f"{layer.name} ({layer.count})" for layer in adapted)
        base = "a 4-bit base" if config.adapter == "qlora" else "the base as it is"
        part = f"{trained:,} parameters ({trained / (size + trained):.2%} of all)"
        lines.append(f"adapter: r={config.lora.r} on {base}, {part}: {where}")
        lines += rank_lines(adapted, config.lora) + unadapted_layers(peft_model, config.lora)
        lines += unadapted_lines(peft_model, quantized=config.adapter == "qlora")
    lines += [f"note: {note}" for note in prepared.notes]
    lines += [f"data: {line}" for line in prepared.data.stats.lines()]
    if not torch.cuda.is_available():
        lines.append(f"memory: {on_this_cpu(config, prepared)}")
    samples = samples_of(prepared)
    on_one = with_looks_in_steps(with_global_batch(config, samples, 1), samples, 1)
    lines.append(f"steps: {steps_line(on_one.training, samples, 1)}{_on_more(config)}")
    if smaller := smaller_batch_line(config.training, on_one.training, 1):
        lines.append(f"note: {smaller}")
    lines += [f"warning: {warning}" for warning in step_warnings(on_one, samples, 1)]
    lines.append(f"output: {Path(config.output_dir).absolute()}")
    return lines


def _on_more(config: RunConfig) -> str:
    """What more ranks change: the global batch, unless it is set; and with it the number of steps, unless that is."""
    if config.training.global_batch_size is not None:
        return ""
    return "; larger batches on more" if config.training.max_steps else "; fewer steps on more"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on stderr."""
    parser = CommandParser(
        prog="zerolora validate", description="Check a configuration, its model and its data without training."
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here computes on a device
    quiet_libraries()
    try:
        loaded = load_config(arguments.config, arguments.overrides)
        for note in loaded.notes:
            print(f"note: {note}")
        prepared, resumption = prepare_to_resume(loaded.config, to_train=False)
        for warning in resumption.warnings:
            print(f"warning: {warning}")
        for line in findings(loaded.config, prepared):
            print(line)
        if resumption.checkpoint is not None:
            print(f"resume: from {resumption.checkpoint}")
        for note in resumption.notes:
            print(f"resume: {note}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    problem = obstacle(loaded.config)
    if problem:
        print(f"OK but for output_dir={loaded.config.output_dir}: {problem}")
    else:
        print(f"OK: {shlex.join(['zerolora', 'train', arguments.config, *arguments.overrides])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
