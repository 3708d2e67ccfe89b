"""`zerolora scu-train`: the flags and defaults of the published SCU guide, as a configuration for `zerolora train`.

The flags become OUTPUT/logs/scu-train.yaml, which `zerolora train` then runs; what it shows is also written to
logs/cuda_optimized_training.log, below the current folder, where the guide's script has it.
Three options are ours: --model, --data and --measure. The guide's target was found with the measure `factors`, whose S
starts far above it; with `delta`, the default here, S starts at 0.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from launcher.doctor.requirements import check_requirements
from launcher.supervision.stop_signals import PASSED_ON
from launcher.supervision.supervisor import EXIT_OK
from trainer.config import UserError, load_config
from trainer.config.yaml_core import dump
from trainer.contract.launcher_process import tie_children_to_this_process

MODEL = "ibm-granite/granite-4.0-h-1b"
OUTPUT = "./granite_1b_cuda_output"
CONFIG_FILE = "scu-train.yaml"
LOG_FILE = Path("logs", "cuda_optimized_training.log")
# The demonstration's data, made from the standard library on first use; the launcher itself imports no trainer.
DEMO_DATA = (
    "import os; from pathlib import Path; from trainer.demo import demo_data; "
    "print(*demo_data(Path(os.environ.get('ZEROLORA_CACHE') or '~/.cache/zerolora').expanduser()), sep='\\n')"
)
# What --test-run allows at most: enough for a checkpoint and a few updates of lambda, and minutes at 1B.
TEST_RUN = {"max_steps": 10, "save_steps": 5, "batch_size": 2, "gradient_accumulation_steps": 2, "block_size": 128}
TEST_RECORDS, TEST_HELD_OUT = 128, 16


class _Parser(argparse.ArgumentParser):
    """argparse that complains in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"zerolora scu-train: {message}; --help lists the flags")


def run(arguments: Sequence[str]) -> int:
    """The command; its exit code is that of `zerolora train`, or of the check. Raises UserError."""
    options = parse(arguments)
    if options.check_requirements:
        return check_requirements(options.output_dir, options.model)
    overrides = list(options.overrides)
    tree = settings(options, *_data(options))
    text = dump(tree)
    with tempfile.TemporaryDirectory() as folder:
        # Checked before anything is written where the run will be.
        draft = Path(folder) / CONFIG_FILE
        draft.write_text(text, encoding="utf-8")
        output = Path(load_config(draft, overrides, with_lines=False).config.output_dir)
    config = output / "logs" / CONFIG_FILE
    train = ["train", str(config), *overrides, *([] if options.multi_gpu else ["--num-gpus", "1"])]
    header = f"# zerolora {shlex.join(train)}\n"
    if options.dry_run:
        print(header + text, end="")
        return EXIT_OK
    try:
        LOG_FILE.parent.mkdir(exist_ok=True)
        LOG_FILE.open("ab").close()
    except OSError as error:
        raise UserError(f"{LOG_FILE}: {error.strerror}; start this in a folder where the log can be written") from None
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(header + text, encoding="utf-8")
    print(f"the same as: zerolora {shlex.join(train)}", flush=True)
    return _logged([sys.executable, "-m", "launcher.cli", *train], LOG_FILE)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags. Raises UserError for one that is unknown or has a value it cannot have."""
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
    add("--block-size", type=int, default=1024, help="longest sequence in tokens")
    add("--lora-r", type=int, default=16, help="rank of the adapter; alpha is twice that")
    add("--multi-gpu", action="store_true", help="all GPUs instead of one")
    add("--torch-compile", action="store_true", help="compile the model")
    add("--4bit-quantization", dest="four_bit", action="store_true", help="QLoRA: the base in 4 bits")
    add("--test-run", action="store_true", help="a few steps on short sequences, to see that everything works")
    add("--check-requirements", action="store_true", help="print what is there and what is missing, and stop")
    add("--resume-from-checkpoint", nargs="?", const="latest", metavar="FOLDER", help="a checkpoint; alone: the latest")
    add("--output-dir", default=OUTPUT, help="folder of the run")
    add("--save-steps", type=int, default=200, help="steps between checkpoints")
    add("--target-s", type=float, default=0.02, help="share S that the controller holds")
    add("--kp", type=float, default=0.6, help="proportional gain")
    add("--ki", type=float, default=0.1, help="integral gain")
    add("--control-frequency", type=int, default=5, help="optimizer steps between updates of lambda")
    add("--memory-fraction", type=float, help="share of the GPU's memory that the run may take")
    add("--gradient-checkpointing", action="store_true", help="recompute activations: less memory, more time")
    add("--model", default=MODEL, help="folder or hub name of the base model")
    add("--data", help="file, folder or hub name of the text; without it, Python's standard library")
    add("--measure", choices=("delta", "factors"), default="delta", help="what S counts: the update, or A and B")
    add("--dry-run", action="store_true", help="print the configuration and stop")
    add("overrides", nargs="*", metavar="key=value", help="settings in place of what the flags say")
    return parser.parse_intermixed_args(arguments)


def settings(options: argparse.Namespace, data: str, held_out: str | None) -> dict[str, Any]:
    """The flags as the tree of a YAML file; without a held-out file of its own, 5 % of `data` is held out."""
    given = vars(options)
    limit = {name: min(given[name], most) if options.test_run else given[name] for name, most in TEST_RUN.items()}
    precision = "fp16" if options.fp16 else "bf16" if options.bf16 else "auto"
    dataset: dict[str, Any] = {"path": data, "max_length": limit["block_size"]}
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
            "gradient_checkpointing": options.gradient_checkpointing,
            "torch_compile": options.torch_compile,
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


def _data(options: argparse.Namespace) -> tuple[str, str | None]:
    """The training text, and the held-out text where it is a file of its own."""
    if options.data is not None:
        return options.data, None
    made = subprocess.run([sys.executable, "-c", DEMO_DATA], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise UserError("--data: the standard library's text could not be made (see above); name a file of your own")
    train, held_out = made.stdout.splitlines()[-2:]
    return train, held_out


def _logged(command: Sequence[str], log_path: Path) -> int:
    """Run a command, copy what it says to this terminal and to the end of a log, pass signals on; its exit code."""
    tie_children_to_this_process()
    with open(log_path, "ab") as log:
        # A session of its own: Ctrl-C reaches it once, through us.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

        def forward(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, forward) for number in PASSED_ON}
        streams = ((process.stdout, 1), (process.stderr, 2))
        copiers = [threading.Thread(target=_copy, args=(stream, fd, log)) for stream, fd in streams]
        for copier in copiers:
            copier.start()
        try:
            code = process.wait()
            for copier in copiers:
                copier.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _copy(stream: IO[bytes], fd: int, log: IO[bytes]) -> None:
    for line in iter(stream.readline, b""):
        log.write(line)
        log.flush()
        try:
            os.write(fd, line)
        except OSError:
            continue  # the terminal is gone; the run goes on, and the log has the rest
