"""`zerolora adapters`: add adapters to a run that trains several, or remove one."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.job_attempts import RESUME_AUTO
from launcher.supervision.terminal import log
from trainer.config import RunConfig, UserError, load_config
from trainer.config.errors import UserErrors, to_text
from trainer.config.yaml_core import read_yaml
from trainer.contract.restart_record import AdapterChanges, apply_recorded_changes


def adapters(
    action: Annotated[str, typer.Argument(metavar="add|remove", help="`add` or `remove`.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a run with adapters.")],
    target: Annotated[str, typer.Argument(metavar="FILE|NAME", help="File to add (YAML), or adapter name to remove.")],
) -> None:
    """Add adapters to a run that trains several, or remove one. An active run saves, then resumes with the change."""
    if action not in ("add", "remove"):
        raise UserError(f"zerolora adapters {action}: unknown action; use add or remove")
    run, added = run.absolute(), list[dict[str, Any]]()
    changes = AdapterChanges.read(run)
    if changes is None:
        raise UserError(f"{run}: is not a run with several adapters; pass the output_dir of one")
    if action == "add":
        file = read_yaml(Path(target))
        if file.mistakes:
            raise UserErrors([f"{target}:{line}: {problem}" for line, problem in file.mistakes])
        added = file.tree.get("adapters") or [file.tree]
        if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
            raise UserError(f"{target}: adapters={to_text(added)}: must be a list of sections, such as [{{name: b}}]")
    os.chdir(changes.working_directory)
    path, *settings = changes.arguments
    current = apply_recorded_changes(run, load_config(path, settings).config.adapters)
    known = [entry["name"] for entry in current]
    names = {str(entry.get("name")) for entry in added} or {target}
    if action == "add" and (taken := names & {*known}):
        raise UserError(f"{target}: {run} already has an adapter named {min(taken)}; use another name")
    if action == "remove" and (target not in known or len(known) == 1):
        problem = "the only adapter; stop the run" if target in known else f"unknown; use one of {', '.join(known)}"
        raise UserError(f"zerolora adapters remove {target}: {problem}")
    if action == "add":  # prepare only the new adapters: an active run replaces the other adapters' checkpoints
        try:
            load_config(path, [*settings, f"adapters={json.dumps(current + added)}"])
        except UserErrors as errors:
            pattern = r"adapters\.(\d+)(.*) \(command line\)"
            name = lambda match: f"{target}: adapters.{int(match[1]) - len(current)}{match[2]}"  # noqa: E731
            raise UserErrors([re.sub(pattern, name, str(mistake)) for mistake in errors.mistakes]) from None
        options = [*settings, f"adapters={json.dumps(added)}", RESUME_AUTO, "output.overwrite=false"]
        if code := subprocess.run([sys.executable, "-m", "launcher.cli", "prepare", path, *options]).returncode:
            raise typer.Exit(code)
    others = [entry for entry in changes.added if entry["name"] not in names]
    removed = changes.removed if action == "add" else [*changes.removed, target]
    replace(changes, added=others + added, removed=removed).write(run)
    log(f"{run}: will {action} {', '.join(sorted(names))} after the current step, or when the run resumes")


def record_arguments(config: RunConfig, arguments: list[str]) -> None:
    """Record the arguments of a run with several adapters. Discards `zerolora adapters` changes unless it resumes."""
    if config.adapters:
        run_dir, resumes = Path(config.output_dir), config.training.resume_from_checkpoint is not None
        changes = (AdapterChanges.read(run_dir) if resumes else None) or AdapterChanges([], "")
        replace(changes, arguments=arguments, working_directory=os.getcwd()).write(run_dir)
