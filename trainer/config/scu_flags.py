"""Flags and defaults of the published SCU guide, for `zerolora scu-train` and its ranks.

--model, --data and --measure are not in the guide. The guide's target was chosen for the measure `factors`, whose S
(see scu.measure) starts far above the target; with `delta`, the default here, S starts at 0. Checkpoints are saved
every 100 steps instead of 200, because the guide resumes from checkpoint-500.
"""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import IO, Any, NoReturn

from trainer.config.command_line import CommandParser
from trainer.config.errors import Mistake, UserError, UserErrors, join_choices
from trainer.config.files import Positive, read_json, read_value
from trainer.config.load import LoadedConfig, load_config
from trainer.config.values import set_dotted
from trainer.config.yaml_core import read_yaml

CONFIG_FILE = "scu-train.yaml"
LOG_FILE = Path("logs", "cuda_optimized_training.log")
_TABLES = read_yaml(Path(__file__).with_suffix(".yaml")).tree
FLAGS, GPU_RECIPES, TEST_RUN = (_TABLES[name] for name in ("flags", "cards", "test_run"))
SETTINGS_BY_FLAG: dict[str, list[str]] = {name: row["sets"].split() for name, row in FLAGS.items() if "sets" in row}
FLAG_NAMES = {"four_bit": "--4bit-quantization"}
RECORDED_CONFIG_FILE = "training_config.json"
TEST_RECORDS, TEST_HELD_OUT = 128, 16


class _RankParser(CommandParser):
    """Raises errors instead of printing them, so that only one rank prints them."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.describe_error(message))


def parse_flags(arguments: Sequence[str], *, on_rank: bool = False) -> argparse.Namespace:
    """Parse the flags; `given` in the result lists the flags that were typed or set by --card.

    With `on_rank`, also accept flags added by torchrun and DeepSpeed, and raise UserError for invalid flags.
    """
    arguments = [re.sub(r"^--\w+", lambda flag: flag[0].replace("_", "-"), word) for word in arguments]
    parser = _build_parser(on_rank)
    untyped = object()
    names = [action.dest for action in parser._actions if action.dest not in ("help", "overrides")]
    typed = parser.parse_intermixed_args(arguments, argparse.Namespace(**dict.fromkeys(names, untyped)))
    given = {name for name in names if getattr(typed, name) is not untyped}
    options = vars(parser.parse_intermixed_args(arguments))
    card = {
        name: value
        for name, value in GPU_RECIPES.get(options["card"], {}).items()
        if name not in given and not (name in ("fp16", "bf16") and given & {"fp16", "bf16"})
    }
    return argparse.Namespace(**(options | card), given=frozenset(given | card.keys()))


def _build_parser(on_rank: bool) -> CommandParser:
    parser = (_RankParser if on_rank else CommandParser)(
        prog="zerolora scu-train",
        description="Train with the Shannon Control Unit and the flags of its guide; key=value sets other settings.",
        allow_abbrev=False,
    )
    precision = parser.add_mutually_exclusive_group()
    for name, row in FLAGS.items():
        arguments = {key: value for key, value in row.items() if key not in ("sets", "type")}
        if row.get("default") is False:
            arguments["action"] = "store_true"
        else:
            arguments["type"] = float if row.get("type") == "float" else type(row.get("default", ""))
            arguments["help"] += f" (default: {row['default']})" if "default" in row else ""
        group = precision if name in ("fp16", "bf16") else parser
        group.add_argument(FLAG_NAMES.get(name, f"--{name.replace('_', '-')}"), dest=name, **arguments)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any other setting")
    if on_rank:
        parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def build_settings(options: argparse.Namespace, data: str, held_out: str | None) -> dict[str, Any]:
    """Convert the flags to the settings of a YAML file; without a `held_out` file, 5 % of `data` is held out."""
    values = vars(options)
    values = values | {name: min(values[name], limit) for name, limit in TEST_RUN.items() if options.test_run}
    tree: dict[str, Any] = deepcopy(_TABLES["settings"])
    for flag, [name, *others] in SETTINGS_BY_FLAG.items():
        if not others and flag not in ("fp16", "bf16"):
            set_dotted(tree, name, values[flag])
    tree["adapter"] = "qlora" if options.four_bit else "lora"
    tree["lora"] = {"r": options.lora_r, "alpha": 2.0 * max(1, options.lora_r)}
    tree["dataset"]["path"] = data
    tree["dataset"] |= {"evaluation": {"path": held_out}} if held_out else {"val_split": 0.05}
    if options.test_run:
        tree["dataset"]["max_samples"] = TEST_RECORDS
        if held_out:
            tree["dataset"]["evaluation"]["max_samples"] = TEST_HELD_OUT
    tree["training"]["precision"] = "fp16" if options.fp16 else "bf16" if options.bf16 else "auto"
    tree["training"]["gradient_checkpointing"] = options.gradient_checkpointing or "auto"
    return tree


def load_resumed_settings(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the settings of the run to resume with the typed flags; None if none. Raises UserError if damaged."""
    if options.resume_from_checkpoint is None:
        return None
    run, folder = Path(options.output_dir), Path(options.resume_from_checkpoint).expanduser()
    if str(folder) not in ("latest", "auto"):
        run = folder.parent
        if not folder.is_dir():
            raise UserError(f"--resume-from-checkpoint={folder}: no such folder; {_suggest_checkpoints(run)}")
    try:
        tree: dict[str, Any] = read_json(run / RECORDED_CONFIG_FILE)
    except FileNotFoundError:
        problem, fix = f"{run.absolute()} has no {RECORDED_CONFIG_FILE}", "use a checkpoint-N in the folder of a run"
        if (folder / RECORDED_CONFIG_FILE).is_file():
            problem, fix = "is a run, not a checkpoint", _suggest_checkpoints(folder)
        raise UserError(f"--resume-from-checkpoint={options.resume_from_checkpoint}: {problem}; {fix}") from None
    tree["output_dir"] = str(run)
    changed = build_settings(options, options.data or "", None)
    for flag in (*options.given, "resume_from_checkpoint"):
        for name in SETTINGS_BY_FLAG.get(flag, ()):
            set_dotted(tree, name, reduce(getitem, name.split("."), changed))
    return tree


def read_resumed_ranks(run_dir: Path) -> int:
    """Return the number of ranks in the run to resume; 1 if it has no record."""
    try:
        return read_value(run_dir / "run.json", "world_size", Positive)
    except FileNotFoundError:
        return 1


def _suggest_checkpoints(run_dir: Path) -> str:
    steps = sorted(int(path.name[11:]) for path in run_dir.glob("checkpoint-*") if path.name[11:].isdigit())
    names = join_choices(str(run_dir / f"checkpoint-{step}") for step in steps)
    return f"use {names}" if names else f"{run_dir.absolute()} has no checkpoints; remove the flag"


def load_flag_config(path: Path, options: argparse.Namespace) -> LoadedConfig:
    """Load the configuration generated from the flags. Raises UserErrors that name flags instead of settings."""
    try:
        return load_config(path, options.overrides, with_lines=False)
    except UserErrors as errors:
        flags = {SETTINGS_BY_FLAG[flag][0]: flag for flag in reversed(SETTINGS_BY_FLAG) if flag in options.given}
        raise UserErrors([_name_flag(mistake, flags) for mistake in errors.mistakes]) from None


def _name_flag(mistake: Mistake | str, flags: Mapping[str, str]) -> Mistake | str:
    """Name the flag instead of the setting in a mistake, unless the value came from a `key=value` override."""
    if isinstance(mistake, str) or mistake.location or mistake.setting not in flags:
        return mistake
    flag = flags[mistake.setting]
    return replace(mistake, name=FLAG_NAMES.get(flag, f"--{flag.replace('_', '-')}"))


def open_log(output: Path) -> IO[bytes]:
    """Open the guide's log in the run's folder for appending.

    Also links to it from ./logs, where the guide expects it, if the link can be created. Raises UserError if
    the log cannot be written.
    """
    path = output / LOG_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        raise UserError(f"--output-dir {output}: {problem}; use another folder") from None
    with suppress(OSError):
        LOG_FILE.parent.mkdir(exist_ok=True)
        if LOG_FILE.is_symlink():
            LOG_FILE.unlink()  # the link from an earlier run
        LOG_FILE.symlink_to(os.path.relpath(path, LOG_FILE.parent))
    return log
