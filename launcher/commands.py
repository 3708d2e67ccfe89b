"""The subcommands of `zerolora`. Those that need torch run in a new process image (launcher/module.py)."""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from launcher.adapters import adapters
from launcher.doctor.command import doctor
from launcher.importing.command import import_
from launcher.job_attempts import build_resume_settings
from launcher.module import exec_module
from launcher.plan import LaunchRequest
from launcher.presets import init
from launcher.scu_train import run as run_scu_train
from launcher.start import get_version, start
from launcher.status import status
from launcher.submit import submit
from launcher.supervision.terminal import log
from launcher.sweep import sweep
from trainer.config import UserError, dump_yaml, load_config
from trainer.config.command_line import EMPTY_VALUE, TEXTS, describe_unknown_option
from trainer.config.errors import convert_path_error, format_one_line
from trainer.config.messages import suggest_override
from trainer.config.settings_reference import build_json_schema, format_reference
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_USAGE
from trainer.contract.restart_record import apply_recorded_changes

# Subcommand -> (module, summary). `zerolora X --help` shows the module's own help.
MODULES = {
    "validate": ("trainer.commands.validate", "Check a configuration without training, and explain what it does."),
    "estimate": ("trainer.commands.estimate", "Estimate a run's memory and disk use at each ZeRO stage; needs no GPU."),
    "inspect": ("trainer.commands.inspect", "Show examples as the model sees them, with trained tokens in color."),
    "prepare": ("trainer.commands.prepare_run", "Check a configuration and tokenize its data."),
    "eval": ("trainer.commands.evaluate", "Evaluate base model and adapter on held-out data: loss and perplexity."),
    "generate": ("trainer.commands.generate", "Generate responses to prompts with a trained adapter."),
    "chat": ("trainer.commands.chat", "Chat with a trained adapter."),
    "merge": ("trainer.commands.merge", "Merge an adapter into its base model and save it as safetensors."),
    "report": ("trainer.monitor.report", "Write an HTML report of one or more runs."),
    "export": ("trainer.commands.export", "Export an adapter: peft, vllm, sglang, gguf-lora, hf, gguf, ollama."),
    "serve": ("trainer.commands.serve", "Serve a run with vLLM, SGLang or llama.cpp (OpenAI-compatible API)."),
    "push": ("trainer.commands.push", "Upload adapter, tokenizer and model card to the Hugging Face Hub."),
    "ops": ("ops.builder", "Build or list the fused operators."),
    "bench": ("benchmarks.bench", "Measure speed and memory of training on this machine, and compare other trainers."),
    "tier": ("benchmarks.tiers", "Test training on this machine's GPU in six tiers, each with pass/fail limits."),
    "compare": ("benchmarks.compare", "Compare SCU controllers by held-out bits per token, with confidence intervals."),
}
GROUPS = {
    "Train": ("init", "import", "validate", "estimate", "train", "sweep", "adapters", "config"),
    "Data": ("inspect", "prepare"),
    "After training": ("eval", "generate", "chat", "merge", "report", "export", "serve", "push"),
    "Cluster": ("doctor", "submit", "status"),
    "Developer": ("ops", "bench", "tier", "compare", "scu-train"),
}
"""Commands by group title, in the order of `zerolora --help`."""
# Typer's type names -> metavars in --help.
METAVARS = {"<int>": "N", "<str>": "TEXT", "<list[str]>": "TEXT", "<path>": "FILE"}

UsageError: Any = typer.BadParameter.__base__
"""Click's UsageError; some versions of Typer bundle Click."""

Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Settings to override.")]

HELP_OPTIONS = ["-h", "--help"]
app = typer.Typer(
    name="zerolora",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_OPTIONS},
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"zerolora {get_version()}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")]


@app.callback()
def zerolora(version: Version = False) -> None:
    """Fine-tune Hugging Face models with LoRA and QLoRA, from one GPU to many machines, from one YAML file."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")],
    overrides: Overrides = None,
    launcher: Annotated[str, typer.Option(help="auto, local, hostfile, slurm or mpi.")] = "auto",
    hostfile: Annotated[Path | None, typer.Option(help="File of hosts, one per line: `gpu-a slots=8`.")] = None,
    include: Annotated[str | None, typer.Option(help="Hosts or GPUs to use: `gpu-a@gpu-b:0,2`.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Hosts or GPUs to exclude.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Use only the first N hosts.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="Use only N GPUs of each host, or N CPU ranks.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Rendezvous host; default: the first.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Rendezvous port; default: a free one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the launcher's command and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all messages before the first step.")] = False,
    is_job_attempt: Annotated[
        bool, typer.Option("--job-start", hidden=True, help="Set by the script of `zerolora submit`.")
    ] = False,
) -> None:
    """Train an adapter on the GPUs of this machine, of the hosts in a hostfile, or of a SLURM job."""
    if config.exists() and not config.is_file() and not config.is_dir():
        raise UserError(f"{config}: is a pipe, which only one rank could read; pass a regular file")
    settings = list(overrides or [])
    loaded = load_config(config, settings)
    if is_job_attempt and (resume_settings := build_resume_settings(loaded.config, os.environ)):
        settings += resume_settings
        loaded = load_config(config, settings)
    entries = loaded.config.adapters if loaded.config.training.resume_from_checkpoint else ()
    changed = apply_recorded_changes(Path(loaded.config.output_dir), entries)
    if changed != list(entries):
        settings.append(f"adapters={json.dumps(changed)}")
        loaded = load_config(config, settings)
    request = LaunchRequest(launcher, hostfile, include, exclude, num_nodes, num_gpus, master_addr, master_port)
    arguments = [str(config), *settings]
    raise typer.Exit(
        start(arguments, loaded, request, ["--verbose"] * verbose, dry_run=dry_run, is_job_attempt=is_job_attempt)
    )


@app.command("config")
def show_config(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Every setting with type, default and meaning.")] = False,
    as_json: Annotated[bool, typer.Option("--json-schema", help="The JSON schema, for completion in editors.")] = False,
) -> None:
    """Print the resolved configuration, or a reference of all settings."""
    if schema and as_json:
        raise UserError("--schema: cannot be combined with --json-schema; remove one")
    if (schema or as_json) and config:
        raise UserError(f"{config}: {'--schema' if schema else '--json-schema'} takes no file; remove one of them")
    if schema:
        typer.echo(format_reference(width=Console().width))
    elif as_json:
        typer.echo(json.dumps(build_json_schema(), indent=2))
    elif config is None:
        raise UserError("zerolora config: no configuration file; pass one, or add --schema")
    else:
        loaded = load_config(config, overrides or [])
        for note in loaded.notes:
            log(f"note: {note}")
        typer.echo(dump_yaml(loaded.config), nl=False)


EXTRA_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
for _command in (init, submit, status, doctor, adapters):
    app.command()(_command)
app.command("import", context_settings=EXTRA_ARGUMENTS)(import_)
app.command("sweep", context_settings=EXTRA_ARGUMENTS)(sweep)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@app.command("scu-train", add_help_option=False, context_settings=PASS_THROUGH)
def scu_train(context: typer.Context) -> None:
    """Train with the Shannon Control Unit (SCU), using the flags of its published guide."""
    raise typer.Exit(run_scu_train(context.args))


def _add_module_command(name: str, module: str, text: str) -> None:
    def run_module(context: typer.Context) -> None:
        if find_spec(module.partition(".")[0]) is None:
            raise UserError(f"zerolora {name}: not installed; run `pip install -e .` in a checkout of zerolora")
        for argument in context.args[:1]:
            if argument.endswith((".yaml", ".yml")) and not Path(argument).exists():
                load_config(Path(argument))  # report a missing file before the module imports torch
        exec_module(module, context.args)

    app.command(name, help=text, add_help_option=False, context_settings=PASS_THROUGH)(run_module)


for _name, _row in MODULES.items():
    _add_module_command(_name, *_row)


def _consume_stripped(option: Any, consume: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Return Click's value of an argument without the spaces around it. Raises UserError for an empty value."""
    value, source = consume(*arguments)
    option.typed = value = value.strip() if isinstance(value, str) else value
    if value == "":
        raise UserError(f"{option.metavar if option.param_type_name == 'argument' else option.opts[0]}: {EMPTY_VALUE}")
    return value, source


def build_command() -> Any:
    command: Any = typer.main.get_command(app)
    command.commands = {name: command.commands[name] for names in GROUPS.values() for name in names}
    for group, names in GROUPS.items():
        for name in names:
            command.commands[name].rich_help_panel = group
    for subcommand in (command, *command.commands.values()):
        context = typer.Context(subcommand, help_option_names=HELP_OPTIONS)
        for option in subcommand.get_params(context):
            if option.name not in TEXTS:
                option.consume_value = partial(_consume_stripped, option, option.consume_value)
            if option.param_type_name == "argument":
                option.display_type_rich = lambda ctx: None
            else:
                type_name = option.display_type_rich(context).replace("<int range>", "<int>").partition(" ")[0]
                option.metavar = "" if option.is_flag else METAVARS.get(type_name, option.metavar)
    return command


def main() -> int:
    """Run the command line and return its exit code; for a user error, print one line to stderr and return 2."""
    try:
        home = os.path.expanduser("~")  # which bash does not expand after `--output=`
        words = [re.sub("^(--[a-z-]+=)~(?=/|$)", lambda option: option[1] + home, word) for word in sys.argv[1:]]
        # In standalone mode, Typer would draw a box around each error.
        return int(build_command()(args=words or ["--help"], prog_name="zerolora", standalone_mode=False) or 0)
    except UsageError as error:
        hint = error.ctx.command_path if error.ctx else " ".join(["zerolora", *sys.argv[1:2]])
        mistake = format_one_line(_describe_usage_error(error))
        log(f"error: {mistake}{' See' if mistake.endswith(('.', '?')) else '; see'} `{hint} --help`")
        return EXIT_USAGE
    except typer.Abort:
        log("error: aborted at a prompt")
        return EXIT_FAILED
    except UserError as error:
        log(f"error: {error}")
        return EXIT_USAGE
    except OSError as error:
        if path_mistake := convert_path_error(error):
            log(f"error: {path_mistake}")
            return EXIT_USAGE
        if error.filename is None:
            raise  # launcher/entry.py handles write errors on standard output
        log(f"error: {error}")
        return EXIT_FAILED


def _describe_usage_error(error: Any) -> str:
    option = getattr(error, "option_name", None)  # of -seed=1, Click only names -s
    option = next((word for word in sys.argv if option and len(option) == 2 and word.startswith(option)), option)
    override = suggest_override(option) if option else None
    names = {*getattr(getattr(error, "param", None), "opts", ())}
    message = error.format_message()
    if unknown := re.match(r"No such command '(.+\.ya?ml)'", message):
        return f"{unknown[1]}: not a command; to train with this file, run `zerolora train {unknown[1]}`"
    if message.startswith("Missing "):
        return f"{error.param.metavar}: missing; pass {error.param.help[:1].lower()}{error.param.help[1:-1]}"
    if message.endswith("requires an argument."):
        return f"{option}: has no value; write one after it"
    if names and "Input should be " in message:  # pydantic's message omits the value
        bound = re.sub("greater than or equal to (.*)", r"\1 or more", message.rpartition("Input should be ")[2])
        bound = "a whole number" if "valid integer" in message else re.sub("less.* to (.*)", r"\1 or less", bound)
        return f"{error.param.opts[0]} {error.param.typed}: must be {bound}"
    if option and not names and not override:
        parameters = error.ctx.command.params if error.ctx else ()
        return describe_unknown_option(option, (name for each in parameters for name in each.opts if name[:1] == "-"))
    if surplus := re.match(r"Got unexpected extra argument\S* \((.*)\)", message):
        return f"{surplus[1]}: not an argument of this command; remove it"
    return f"{option}: {override}" if override else message
