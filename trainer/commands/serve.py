"""`zerolora serve RUN`: export a run for an installed server (vLLM, SGLang or llama.cpp), and start the server.

The server replaces this process. Its OpenAI-compatible API is at /v1, with the run's folder name as the model name.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from trainer.checkpoint.adapter_files import WEIGHTS
from trainer.checkpoint.finished_run import FinishedRun, add_run_arguments, find_run, silence_libraries
from trainer.commands.export.__main__ import export
from trainer.commands.export.servers import build_lora_arguments
from trainer.config import CommandParser, UserError, reports_errors
from trainer.config.command_line import parse_port_number
from trainer.config.errors import to_text
from trainer.setup.kinds import check_task_supports

MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
SERVERS = (*MODULES, "llama.cpp")
PROGRAM = "llama-server"
HOST_NAME = re.compile(r"(?!-)[\w-]+(\.[\w-]+)*", re.ASCII)
FIND_MODULES = "import importlib.util as u, sys; print(*(name for name in sys.argv[1:] if u.find_spec(name)))"
"""Python code that prints which of the modules passed as arguments are installed."""


@dataclass(frozen=True)
class Server:
    name: str
    command: tuple[str, ...]


def find_server(requested: str, python: str) -> Server:
    """Return the requested server, or with `auto` the first installed one. Raises UserError if it is not installed."""
    try:
        command = [python, "-c", FIND_MODULES, *MODULES]
        modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        raise UserError(f"--python {python}: cannot be started; pass the path of a Python interpreter") from None
    installed = {name: Server(name, (python, "-m", MODULES[name])) for name in modules}
    if program := shutil.which(PROGRAM):
        installed["llama.cpp"] = Server("llama.cpp", (program,))
    for name in SERVERS if requested == "auto" else (requested,):
        if name in installed:
            return installed[name]
    if requested == "llama.cpp":
        raise UserError(f"--server llama.cpp: {PROGRAM} is not on PATH; install llama.cpp, or use another server")
    names, package = ("vllm and sglang", "vllm") if requested == "auto" else (requested, requested)
    other = f", or put {PROGRAM} (llama.cpp) on PATH" if requested == "auto" else ""
    fix = f"`pip install {package}` in a separate environment, and pass its Python with --python{other}"
    raise UserError(f"--server {requested}: {names} not found by {python}; {fix}")


def parse_host(text: str) -> str:
    with suppress(ValueError):
        return str(ip_address(text))
    if not HOST_NAME.fullmatch(text) or text.rpartition(".")[2].isdecimal():
        raise argparse.ArgumentTypeError(f"{to_text(text)}: must be a host name or IP address without port or brackets")
    return text


def split_server_options(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: a quote is not closed, or it ends in a backslash") from None


def export_once(run: FinishedRun, format_: str, output: Path) -> Path:
    """Export the run unless `output` exists. Raises UserError if `output` is older than the adapter."""
    if not output.exists():
        export(run, format_, output)
        print(f"exported to {output}")
    elif output.stat().st_mtime < (run.folder / WEIGHTS).stat().st_mtime:
        raise UserError(f"{output}: is older than the adapter; delete the old export to export again")
    return output


def prepare_server_command(run: FinishedRun, server: Server, folder: Path, *, merged: bool) -> list[str]:
    """Export the run into `folder`, and return the command that serves it, without host and port."""
    name = run.run_dir.resolve().name
    if server.name == "llama.cpp":
        model = export_once(run, "gguf", folder / "export.gguf")
        return [*server.command, "-m", str(model), "--alias", name, "--jinja"]
    model_option = "--model" if server.name == "vllm" else "--model-path"
    if merged:
        model = export_once(run, "hf", folder / "export-hf")
        return [*server.command, model_option, str(model), "--served-model-name", name]
    if scaling := run.config.model.rope_scaling:
        raise UserError(
            f"model.rope_scaling.type={scaling.type}: the server would load the base model without it; pass --merged"
        )
    adapter = export_once(run, server.name, folder / f"export-{server.name}")
    command = [*server.command, model_option, run.config.base_model, *build_lora_arguments(server.name, adapter, name)]
    if run.config.model.revision:
        command += ["--revision", run.config.model.revision]
    if (template := adapter / "chat_template.jinja").exists():
        command += ["--chat-template", str(template)]
    return command


@reports_errors(RuntimeError)
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="zerolora serve", description="Serve a run with vLLM, SGLang or llama.cpp (OpenAI-compatible API)."
    )
    add_run_arguments(parser, "location of the full-precision base model, if it was moved")
    parser.add_argument("--server", choices=("auto", *SERVERS), default="auto", help="default: first installed")
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="Python interpreter with vLLM or SGLang installed"
    )
    parser.add_argument("--merged", action="store_true", help="serve the merged model instead of the adapter")
    help_ = "address to listen on (default: 127.0.0.1, this machine only)"
    parser.add_argument("--host", type=parse_host, default="127.0.0.1", help=help_)
    parser.add_argument("--port", type=parse_port_number, default=8000, help="(default: 8000)")
    parser.add_argument("--dry-run", action="store_true", help="export, print the server's command and stop")
    parser.add_argument(
        "--options", type=split_server_options, default="", metavar="TEXT",
        help="additional server options, such as '--max-model-len 8192'",
    )  # fmt: skip
    options = parser.parse_args(argv)
    silence_libraries()
    run = find_run(options.run, options.base_model, allow_mismatch=options.allow_mismatch)
    check_task_supports(run, "serve")
    server = find_server(options.server, options.python)
    command = prepare_server_command(run, server, options.run, merged=options.merged)
    command += ["--host", options.host, "--port", str(options.port), *options.options]
    print(shlex.join(command), flush=True)
    if not options.dry_run:
        os.execv(command[0], command)
