"""The flags of the published SCU guide and their defaults, as a configuration: for `zerolora scu-train` and its ranks.

Three flags are ours: --model, --data and --measure. The guide's target was found with the measure `factors`, whose S
starts far above it; with `delta`, the default here, S starts at 0.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from trainer.config.errors import UserError

MODEL = "ibm-granite/granite-4.0-h-1b"
OUTPUT = "./granite_1b_cuda_output"
CONFIG_FILE = "scu-train.yaml"
LOG_FILE = Path("logs", "cuda_optimized_training.log")
# What --test-run allows at most: enough for a checkpoint and a few updates of lambda, and minutes at 1B.
TEST_RUN = {"max_steps": 10, "save_steps": 5, "batch_size": 2, "gradient_accumulation_steps": 2, "block_size": 128}
# The guide's recipes, each with 32 sequences a step, which is what its defaults come to.
CARDS: dict[str, dict[str, Any]] = {
    "rtx3080": {"four_bit": True, "batch_size": 4, "gradient_accumulation_steps": 8},
    "rtx4090": {"bf16": True, "batch_size": 16, "gradient_accumulation_steps": 2},
    "a100": {"bf16": True, "batch_size": 32, "gradient_accumulation_steps": 1},
    "h100": {"bf16": True, "batch_size": 32, "gradient_accumulation_steps": 1},
}
TEST_RECORDS, TEST_HELD_OUT = 128, 16


class _Parser(argparse.ArgumentParser):
    """argparse that complains in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"zerolora scu-train: {message}; --help lists the flags")


def parse(arguments: Sequence[str], *, by_rank: bool = False) -> argparse.Namespace:
    """The flags, `by_rank` with those that launchers add. Raises UserError for one that cannot be."""
    parser = _Parser(
        prog="zerolora scu-train",
        description="Train under the Shannon Control Unit with the flags of its published guide; key=value sets more.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp16", action="store_true", help="16-bit floats (default: what the GPU has)")
    precision.add_argument("--bf16", action="store_true", help="bfloat16 (default: what the GPU has)")
    add("--batch-size", type=int, default=8, help="sequences per GPU and micro-step")
    add("--gradient-accumulation-steps", type=int, default=4, help="micro-steps per optimizer step")
    add("--learning-rate", type=float, default=1e-4, help="peak learning rate")
    add("--max-steps", type=int, default=1000, help="optimizer steps")
    add("--block-size", type=int, default=1024, help="tokens of a sequence; longer texts are split into several")
    add("--lora-r", type=int, default=16, help="rank of the adapter; alpha is twice that")
    add("--multi-gpu", action="store_true", help="all GPUs instead of one")
    add("--torch-compile", action="store_true", help="compile the model")
    add("--4bit-quantization", dest="four_bit", action="store_true", help="QLoRA: the base in 4 bits")
    add("--test-run", action="store_true", help="a few steps on short sequences, to see that everything works")
    add("--check-requirements", action="store_true", help="print what is there and what is missing, and stop")
    add("--resume-from-checkpoint", nargs="?", const="latest", metavar="FOLDER", help="a checkpoint; alone: the latest")
    add("--output-dir", default=OUTPUT, help="folder of the run")
    add("--save-steps", type=int, default=200, help="steps between checkpoints")
    add("--target-s", type=float, default=0.02, help="fraction S that the controller holds")
    add("--kp", type=float, default=0.6, help="proportional gain")
    add("--ki", type=float, default=0.1, help="integral gain")
    add("--control-frequency", type=int, default=5, help="optimizer steps between updates of lambda")
    add("--memory-fraction", type=float, help="fraction of the GPU's memory that the run may take")
    add(
        "--gradient-checkpointing",
        action="store_true",
        help="recompute activations (default: where it does not fit without)",
    )
    add("--cudnn-benchmark", action="store_true", help="let cuDNN try its kernels at the start")
    add("--card", choices=CARDS, help="the guide's recipe for a card; other flags take precedence")
    add("--model", default=MODEL, help="folder or hub name of the base model")
    add("--data", help="file, folder or hub name of the text; without it, Python's standard library")
    add("--measure", choices=("delta", "factors"), default="delta", help="what S counts: the update, or A and B")
    add("--dry-run", action="store_true", help="print the configuration and stop")
    add("overrides", nargs="*", metavar="key=value", help="settings in place of what the flags say")
    if by_rank:
        add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    card = parser.parse_intermixed_args(arguments).card
    parser.set_defaults(**CARDS.get(card, {}))
    return parser.parse_intermixed_args(arguments)


def settings(options: argparse.Namespace, data: str, held_out: str | None) -> dict[str, Any]:
    """The flags as the tree of a YAML file; without a held-out file of its own, 5 % of `data` is held out."""
    given = vars(options)
    limit = {name: min(given[name], most) if options.test_run else given[name] for name, most in TEST_RUN.items()}
    precision = "fp16" if options.fp16 else "bf16" if options.bf16 else "auto"
    dataset: dict[str, Any] = {"path": data, "max_length": limit["block_size"], "too_long": "split"}
    dataset |= {"evaluation": {"path": held_out}} if held_out else {"val_split": 0.05}
    if options.test_run:
        dataset["max_samples"] = TEST_RECORDS
        if held_out:
            dataset["evaluation"]["max_samples"] = TEST_HELD_OUT
    return {
        "base_model": options.model,
        "adapter": "qlora" if options.four_bit else "lora",
        "output_dir": options.output_dir,
        "lora": {"r": options.lora_r, "alpha": 2.0 * options.lora_r},
        "dataset": dataset,
        "training": {
            "max_steps": limit["max_steps"],
            "batch_size": limit["batch_size"],
            "gradient_accumulation_steps": limit["gradient_accumulation_steps"],
            "learning_rate": options.learning_rate,
            "precision": precision,
            "gradient_checkpointing": options.gradient_checkpointing or "auto",
            "torch_compile": options.torch_compile,
            "cudnn_benchmark": options.cudnn_benchmark,
            "memory_fraction": options.memory_fraction,
            "save_steps": limit["save_steps"],
            "resume_from_checkpoint": options.resume_from_checkpoint,
        },
        "scu": {
            "enabled": True,
            "measure": options.measure,
            "law": "published",
            "target": options.target_s,
            "kp": options.kp,
            "ki": options.ki,
            "every": options.control_frequency,
            # The rest of the published recipe for Granite-4.0-H-1B, for which there are no flags.
            "deadband": 0.001,
            "lambda_start": 0.1,
            "lambda_min": 1e-4,
            "lambda_max": 2.0,
            "sigma": 0.01,
        },
        # A bar redrawn ten times a second makes no log.
        "logging": {"progress": "lines"},
    }


def open_log(output: Path) -> IO[bytes]:
    """Open the guide's log in the logs of the run for appending, with a link to it in ./logs, where the guide has it.

    The link is left out where it cannot be made. Raises UserError if the log cannot be written.
    """
    path = output / LOG_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
    except OSError as error:
        raise UserError(f"--output-dir {output}: {path} cannot be written ({error.strerror})") from None
    with suppress(OSError):
        LOG_FILE.parent.mkdir(exist_ok=True)
        if LOG_FILE.is_symlink():
            LOG_FILE.unlink()  # of an earlier run
        LOG_FILE.symlink_to(os.path.relpath(path, LOG_FILE.parent))
    return log
