"""`zerolora sweep`: train every combination of settings, one by one, in parallel, or as a SLURM array."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import typer

from launcher.module import exec_module
from launcher.submit import RESUME, expand_sweep, load_run_configs, resolve_name, split_values
from launcher.supervision.terminal import log
from trainer.config import UserError, load_config
from trainer.config.adapter_entries import PER_ADAPTER
from trainer.config.command_line import parse_override
from trainer.config.errors import UserErrors, format_count
from trainer.config.messages import get_setting_type, suggest_override
from trainer.config.values import list_accepted_types
from trainer.contract.default_ranks import list_visible_gpus
from trainer.contract.heartbeat import read_heartbeats
from trainer.contract.json_records import SweptRun, read_sweep, update_sweep
from trainer.contract.launcher_process import export_launcher_identity

POLL_S = 0.5


@dataclass
class SweepRun:
    settings: list[str]
    folder: Path
    digest: str
    exit_code: int | None = None
    process: "subprocess.Popen[bytes] | None" = None
    gpus: Sequence[int] = ()
    log: IO[bytes] | None = None

    @property
    def name(self) -> str:
        return self.folder.name


def sweep(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the runs.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="key=value,value...", help="Values to try; a single value applies to all runs."),
    ] = None,
    gpus_per_run: Annotated[
        int | None, typer.Option(help="Run in parallel with this many GPUs each; default: one by one on all GPUs.")
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit an array of jobs; accepts the options of `zerolora submit`.")
    ] = False,
    combine: Annotated[
        bool, typer.Option("--together", help="Train several runs at once on one base model, as many as fit in memory.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Only show the current results.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and exit.")] = False,
) -> None:
    """Train every combination of the given values, then show the runs in a table and an HTML report, best first."""
    arguments = [*(settings or []), *context.args]
    first_option = next((index for index, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    submit_options = arguments[first_option:]
    if submit_options and not slurm:
        fix = suggest_override(submit_options[0]) or "options of `zerolora submit` need --slurm"
        raise UserError(f"{submit_options[0]}: not an option of `zerolora sweep`; {fix}")
    axes, fixed = split_axes(arguments[:first_option])
    loaded = load_config(config, fixed).config
    folder = Path(loaded.output_dir).absolute()
    if (resumes := loaded.training.resume_from_checkpoint) not in (None, "auto", "latest"):
        raise UserError(f"{RESUME}={resumes}: every run of a sweep resumes from its own folder; remove this setting")
    if not axes and not table:
        problem = next((f"{text} is a single value (a list)" for text in fixed if "," in text), "no values to try")
        forms = "training.learning_rate=1e-4,2e-4 or, for lists, lora.target_modules=[q_proj],[q_proj,v_proj]"
        raise UserError(f"zerolora sweep: {problem}; pass several values, such as {forms}")
    if table:
        exec_module("trainer.monitor.report.sweep_table", [str(folder)])
    if combine and (slurm or gpus_per_run is not None):
        raise UserError("--together: uses all GPUs in one run; remove --slurm or --gpus-per-run")
    if combine:
        check_settings_can_differ(axes)
    runs = plan_runs(config, axes, fixed, folder)
    if slurm:
        _submit_array(config, runs, axes, fixed, folder, submit_options, dry_run=dry_run)
        return
    gpus = list_visible_gpus()
    if combine:
        runs = combine_runs(config, runs, fixed, folder, gpus, dry_run=dry_run)
    slots = split_gpus(gpus, gpus_per_run)
    if dry_run:
        for run in runs:
            typer.echo(shlex.join(["zerolora", *build_train_command(config, run, gpus_per_run)[3:]]))
        return
    train_runs(config, runs, slots, gpus_per_run, folder)
    exec_module("trainer.monitor.report.sweep_table", [str(folder)])


def check_settings_can_differ(axes: Sequence[str]) -> None:
    """Raise UserErrors for settings that all adapters of a joint run share."""
    if shared := [axis for axis in axes if not resolve_name(axis).startswith(PER_ADAPTER)]:
        fix = "use one value for all runs, or remove --together"
        raise UserErrors([f"{axis}: is shared by all adapters of a joint run; {fix}" for axis in shared])


def _submit_array(
    config: Path, runs: list[SweepRun], axes: Sequence[str], fixed: Sequence[str], folder: Path, options: list[str],
    *, dry_run: bool,
) -> None:  # fmt: skip
    tasks = [str(task) for task, run in enumerate(runs) if run.exit_code is None]
    _report_finished_runs(runs)
    if len(tasks) < len(runs) and not any(option.partition("=")[0] == "--array" for option in options):
        options += ["--array", ",".join(tasks)]
    if not tasks and not dry_run:
        exec_module("trainer.monitor.report.sweep_table", [str(folder)])
    arguments = ["submit", str(config), *fixed, *(word for axis in axes for word in ("--sweep", axis)), *options]
    if not tasks:
        return
    command, output = [sys.executable, "-m", "launcher.cli", *arguments], subprocess.DEVNULL if dry_run else None
    if code := subprocess.run([*command, *["--dry-run"] * dry_run], stdout=output).returncode:
        raise typer.Exit(code)
    if dry_run:
        typer.echo(shlex.join(["zerolora", *arguments]))
    else:
        record_runs(folder, runs)
        log(f"to see the results: zerolora sweep {config} {shlex.join(fixed)} --table")


def split_axes(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split settings into those with several values and those fixed for all runs. Raises UserError for invalid ones."""
    axes: list[str] = []
    fixed: list[str] = []
    for text in settings:
        name, equals, values = text.partition("=")
        if not equals or not name:
            raise UserError(f"{text}: must look like key=value,value, such as training.learning_rate=1e-4,2e-4")
        takes_list = tuple in list_accepted_types(get_setting_type(resolve_name(text)) or str)
        several = split_values(values)
        in_brackets = [value.startswith(("[", "{")) for value in several]
        is_axis = all(in_brackets) if takes_list or any(in_brackets) else not values.startswith(('"', "'"))
        (axes if is_axis and len(several) > 1 else fixed).append(text)
    return axes, fixed


def plan_runs(config: Path, axes: Sequence[str], fixed: Sequence[str], folder: Path) -> list[SweepRun]:
    """Return all runs of a sweep; finished ones have exit code 0. Raises UserError for invalid settings."""
    lines = expand_sweep(axes, folder, fixed)
    recorded = {entry.folder: entry for entry in read_sweep(folder)}
    runs = []
    for line, loaded in zip(lines, load_run_configs(config, fixed, lines), strict=True):
        digest = hashlib.sha256(loaded.model_dump_json().encode()).hexdigest()
        run = SweepRun([*fixed, *shlex.split(line)], Path(loaded.output_dir), digest)
        earlier = recorded.get(str(run.folder))
        if earlier and earlier.digest != digest and run.folder.exists():
            raise UserError(f"{run.folder}: an earlier sweep trained it with other settings; use another output_dir")
        if earlier and earlier.digest == digest:
            # Array jobs do not record exit codes, but their ranks do.
            codes = {beat.exit_code for beat in read_heartbeats(run.folder / "logs").values()}
            run.exit_code = 0 if earlier.exit_code == 0 or codes == {0} else None
        runs.append(run)
    return runs


def combine_runs(
    config: Path, runs: Sequence[SweepRun], fixed: Sequence[str], folder: Path, gpus: Sequence[int], *, dry_run: bool
) -> list[SweepRun]:
    """Combine runs evenly into as few joint runs (`adapters`) as the estimated GPU memory allows."""
    waiting = [run for run in runs if run.exit_code is None]
    _report_finished_runs(runs)
    if len(waiting) > 1:
        load_config(config, _combine_settings(waiting, fixed, folder))  # raises if a setting cannot differ per adapter
    if not dry_run:
        record_runs(folder, runs)
    if len(waiting) < 2:
        return waiting
    for parts in range(1, len(waiting) + 1):
        size = -(-len(waiting) // parts)
        settings = _combine_settings(waiting[:size], fixed, folder)
        if not gpus or _fits_gpu(config, settings, gpus[0]):
            break
    groups = [waiting[first : first + size] for first in range(0, len(waiting), size)]
    joint = f"{format_count(len(groups), 'joint run')} of up to {format_count(size, 'adapter')}"
    log(f"training {format_count(len(waiting), 'run')} as {joint}")
    return [SweepRun(_combine_settings(group, fixed, folder), folder, "") for group in groups]


def _combine_settings(runs: Sequence[SweepRun], fixed: Sequence[str], folder: Path) -> list[str]:
    entries = []
    for run in runs:
        varied = [text for text in run.settings if text not in fixed and not text.startswith("output_dir=")]
        entries.append({"name": run.name, **dict(map(parse_override, varied))})
    return [*fixed, f"adapters={json.dumps(entries)}", f"output_dir={folder}"]


def _fits_gpu(config: Path, settings: Sequence[str], gpu: int) -> bool:
    """Return whether a run fits on a GPU according to `zerolora estimate`; True if its model cannot be estimated."""
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    memory = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    command = [sys.executable, "-m", "launcher.cli", "estimate", str(config), *settings, "--json"]
    options = ["--gpu-memory", f"{memory}MiB"] if memory.isdigit() else []
    result = subprocess.run([*command, *options], capture_output=True, text=True)
    try:
        return bool(json.loads(result.stdout)["fits"])
    except (ValueError, KeyError):
        return True  # `zerolora train` checks the memory again


def _report_finished_runs(runs: Sequence[SweepRun]) -> None:
    if finished := sum(run.exit_code == 0 for run in runs):
        log(f"{finished} of {len(runs)} runs are already finished")


def split_gpus(gpus: Sequence[int], gpus_per_run: int | None) -> list[Sequence[int]]:
    """Split GPUs into groups of `gpus_per_run`; return one empty group if each run uses all GPUs or there are none."""
    if gpus_per_run is not None and gpus_per_run < 1:
        raise UserError(f"--gpus-per-run {gpus_per_run}: must be 1 or more")
    if gpus_per_run is None or not gpus:
        return [()]
    if gpus_per_run > len(gpus):
        raise UserError(f"--gpus-per-run {gpus_per_run}: only {format_count(len(gpus), 'GPU')} found here; use fewer")
    return [gpus[first : first + gpus_per_run] for first in range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)]


def build_train_command(config: Path, run: SweepRun, gpus_per_run: int | None) -> list[str]:
    number = ["--num-gpus", str(gpus_per_run)] if gpus_per_run else []
    return [sys.executable, "-m", "launcher.cli", "train", str(config), *run.settings, f"{RESUME}=auto", *number]


def train_runs(
    config: Path, runs: list[SweepRun], slots: list[Sequence[int]], gpus_per_run: int | None, folder: Path
) -> None:
    """Start runs as GPUs become free, until all have finished; if interrupted, stop the active runs."""
    record_runs(folder, runs)
    waiting = [run for run in runs if run.exit_code is None]
    _report_finished_runs(runs)
    export_launcher_identity()
    free = list(slots)
    running: list[SweepRun] = []
    try:
        while waiting or running:
            while waiting and free:
                run = waiting.pop(0)
                run.gpus = free.pop(0)
                where = f" on GPU {', '.join(map(str, run.gpus))}" if run.gpus else ""
                log(f"{runs.index(run) + 1} of {len(runs)}: {run.name}{where}")
                _start_run(config, run, gpus_per_run, folder, inherits_terminal=len(slots) == 1)
                running.append(run)
            time.sleep(POLL_S)
            for run in [run for run in running if run.process and run.process.poll() is not None]:
                running.remove(run)
                free.append(run.gpus)
                assert run.process is not None
                run.exit_code = run.process.returncode
                if run.log:
                    run.log.close()
                if run.exit_code:
                    where = f"; see {folder / run.name}.log" if run.log else ""
                    log(f"{run.name}: exited with code {run.exit_code}{where}")
                record_runs(folder, runs)
    finally:
        processes = [run.process for run in running if run.process]
        for process in processes:  # after Ctrl-C or SIGTERM, each saves a checkpoint and stops
            process.terminate()
        for process in processes:
            process.wait()


def _start_run(config: Path, run: SweepRun, gpus_per_run: int | None, folder: Path, *, inherits_terminal: bool) -> None:
    environment = dict(os.environ)
    if run.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, run.gpus))
    arguments = build_train_command(config, run, gpus_per_run)
    if inherits_terminal:
        run.process = subprocess.Popen(arguments, env=environment, start_new_session=True)
        return
    run.log = (folder / f"{run.name}.log").open("wb")
    arguments.append("logging.progress=lines")
    run.process = subprocess.Popen(
        arguments, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=run.log, stderr=run.log
    )


def record_runs(folder: Path, runs: Sequence[SweepRun]) -> None:
    """Record the runs with their settings and exit codes; keep the records of other sweeps in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run for run in runs if run.folder != folder]  # a joint run records its adapters itself
    update_sweep(folder, [SweptRun(str(run.folder), run.digest, run.exit_code, run.settings) for run in runs])
