"""`python -m trainer.validate CONFIG [key=value ...]`: every check that comes before training, and what was found.

The model's configuration, tokenizer and targets are looked at and the data is tokenised into its cache; no weight is
read, and nothing is written to the run's folder. Exit code 0, or 2 after one line on stderr.
"""

import math
import os
import sys
from pathlib import Path

# Before any library that asks DeepSpeed for a device: nothing here computes on one.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from trainer.config import AUTO, CommandParser, RunConfig, UserError, load_config
from trainer.finished_run import quiet_libraries
from trainer.output_folder import obstacle
from trainer.prepare import Prepared, prepare_to_resume


def findings(config: RunConfig, prepared: Prepared) -> list[str]:
    """What the configuration means on this model and data: `name: text` lines."""
    import torch

    from trainer.adapt import adapted_layers, apply_adapter
    from trainer.memory.check import on_this_cpu
    from trainer.model import empty_model

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
        adapted = adapted_layers(apply_adapter(model, plain, next(model.parameters()).dtype))
        trained = sum(layer.parameters for layer in adapted)
        where = ", ".join(f"{layer.name} ({layer.count})" for layer in adapted)
        base = "a 4-bit base" if config.adapter == "qlora" else "the base as it is"
        part = f"{trained:,} parameters ({trained / (size + trained):.2%} of all)"
        lines.append(f"adapter: r={config.lora.r} on {base}, {part}: {where}")
    lines += [f"note: {note}" for note in prepared.notes]
    lines += [f"data: {line}" for line in prepared.data.stats.lines()]
    if not torch.cuda.is_available():
        lines.append(f"memory: {on_this_cpu(config, prepared)}")
    lines.append(f"steps: {_steps(config, prepared)}")
    lines.append(f"output: {Path(config.output_dir).absolute()}")
    return lines


def _steps(config: RunConfig, prepared: Prepared) -> str:
    """The optimizer steps on one rank, which more ranks divide."""
    training, samples = config.training, prepared.data.stats.samples
    each = f"batch_size {training.batch_size} x accumulation {training.gradient_accumulation_steps}"
    if training.batch_size == AUTO:
        epochs = f"{training.epochs:g} epochs of {samples:,} sequences"
        return f"{training.max_steps or epochs}; batch_size is chosen at the start"
    if training.max_steps:
        return f"{training.max_steps:,}, {each} x GPUs sequences in each"
    steps = math.ceil(training.epochs * samples / training.batch_size / training.gradient_accumulation_steps)
    return f"{steps:,} on one GPU, {each} sequences in each; fewer on more GPUs"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on stderr."""
    parser = CommandParser(
        prog="zerolora validate", description="Check a configuration, its model and its data without training."
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
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
        print(f"OK: zerolora train {' '.join([arguments.config, *arguments.overrides])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
