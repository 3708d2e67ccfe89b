"""`zerolora submit`: fill in slurm/train.sbatch for a run, and submit it with sbatch."""

import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher.status import COMMENT
from launcher.supervision.terminal import say
from launcher.targets.local import SAFE_PATH
from trainer.config import RunConfig, UserError, load_config
from trainer.config.aliases import ALIASES
from trainer.contract.home import HOME
from trainer.contract.whole_files import write_whole

TEMPLATE = HOME / "slurm" / "train.sbatch"
JOB_SCRIPT, SWEEP_FILE = "job.sbatch", "sweep.txt"
_TIME = re.compile(r"(?:(?P<days>[0-9]{1,9})-)?(?P<rest>[0-9]{1,9}(?::[0-9]{1,9}){0,2})")
MAX_GRACE_S = 65535
# SLURM checks limits every half minute, and sends the signal up to a minute early.
EARLIER_S = 60
SHORTEST_S = 30
MAX_RUNS = 1000
RESUME = "training.resume_from_checkpoint"
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


def sbatch_options(named: Mapping[str, str | int | None], more: Sequence[str]) -> list[str]:
    """Return sbatch's options, without those left to the cluster (None). Raises UserError for empty or long ones."""
    for name, value in named.items():
        if isinstance(value, str) and not value.strip():
            raise UserError(f"--{name} {value!r}: must not be empty; leave it out for SLURM's default")
    given = [*(f"--{name}={value}" for name, value in named.items() if value is not None), *more]
    for option in given:
        if len(option.splitlines()) != 1 or not option.startswith("-"):  # each is a comment line of the script
            raise UserError(
                f"{'--sbatch ' * (option[:1] != '-')}{option!r}: must be one line, with its dashes, such as --mem=0"
            )
    return ["--requeue", "--open-mode=append", *given]


def check_job(time: str, grace: int, gpus: int, ranks: int | None) -> None:
    """Raise UserError for ranks in addition to GPUs, and for a time limit that leaves no step before `grace`."""
    if gpus and ranks is not None:
        raise UserError("--ranks-per-node: must be left out with GPUs (a rank each); or set --gpus-per-node 0")
    limit_s = parse_time_limit(time)
    if limit_s is not None and limit_s < grace + EARLIER_S + SHORTEST_S:
        raise UserError(
            f"--time {time}: is {limit_s} s; the last {grace} (--grace) and up to {EARLIER_S} before are for saving, "
            f"so no step would be completed; use --time {-(-(grace + 600) // 60)} or a smaller --grace"
        )


def parse_time_limit(time: str) -> int | None:
    """Return sbatch's time limit in seconds, None for no limit. Raises UserError for malformed text."""
    if time.lower() in ("unlimited", "infinite", "0"):
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise UserError(f"--time {time}: must read MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 12:00:00")
    days, rest = int(found["days"] or 0), [int(part) for part in found["rest"].split(":")]
    if found["days"]:
        hours, minutes, seconds = [*rest, 0, 0][:3]
    else:
        # One number means minutes, two mean minutes and seconds.
        hours, minutes, seconds = rest if len(rest) == 3 else [0, *rest, 0][:3]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_task_ranges(tasks: str) -> list[range]:
    """Parse `0,3-5,8-12:2` as sbatch does, into lazy ranges because their ends may be far apart."""
    numbers = []
    for part in tasks.split(","):
        found = _TASKS.fullmatch(part)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            raise UserError(f"--array {tasks}: must read 0-7, 0,3,5 or 0-12:2, with %2 for two at a time")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        numbers.append(range(first, last + 1, max(step, 1)))
    return numbers


def _check_array(array: str | None, lines: list[str]) -> None:
    if array is not None:
        last = max(tasks[-1] for tasks in parse_task_ranges(array.partition("%")[0]))
        if lines and last >= len(lines):
            raise UserError(f"--array {array}: there are {len(lines)} runs, numbered from 0; end at {len(lines) - 1}")
    if array is not None and not lines and not array.endswith("%1"):
        raise UserError(
            f"--array {array}: its tasks would train in one folder at the same time; give each its settings with "
            f"--sweep key=value,value, or run them one after the other: --array {array}%1"
        )


def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Settings to override.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs, and so ranks, per node; 0: none.")] = 8,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node, without GPUs.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores per rank.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of one start; the job is then queued again.")] = "24:00:00",
    grace: Annotated[int, typer.Option(min=1, max=MAX_GRACE_S, help="Seconds before the limit, for saving.")] = 300,
    partition: Annotated[str | None, typer.Option(help="SLURM's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM's account.")] = None,
    qos: Annotated[str | None, typer.Option(help="SLURM's quality of service.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the output folder's name.")] = None,
    array: Annotated[str | None, typer.Option(help="Tasks of an array, `0-7%2`; default with --sweep: all.")] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="Values to try, `seed=1,2,3`; may be repeated.")] = None,
    dependency: Annotated[str | None, typer.Option(help="SLURM's dependency, such as `afterok:123`.")] = None,
    max_requeues: Annotated[int, typer.Option(min=0, help="How often the job may be queued again.")] = 20,
    sbatch: Annotated[list[str] | None, typer.Option(help="Any option of sbatch, `--mem=0`; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and stop.")] = False,
) -> None:
    """Submit a SLURM job that trains, saves before its time limit, is queued again, and resumes."""
    given = list(overrides or [])
    run_dir = Path(load_config(config, given).config.output_dir).absolute()
    lines = expand_sweep(sweep or [], run_dir, given)
    load_runs(config, given, lines)
    _check_array(array, lines)
    check_job(time, grace, gpus_per_node, ranks_per_node)
    array = array or (f"0-{len(lines) - 1}" if lines else None)
    logs = run_dir / "logs"
    # SLURM's pattern for the log: one file per task of an array, reused by later starts.
    pattern = str(logs / ("slurm-%A_%a.log" if array else "slurm-%j.log"))
    options: dict[str, str | int | None] = {
        "job-name": job_name or run_dir.name,
        "nodes": nodes,
        "gpus-per-node": gpus_per_node or None,
        "ntasks-per-node": gpus_per_node or ranks_per_node or 1,
        "cpus-per-task": cpus_per_task,
        "time": time,
        "partition": partition,
        "account": account,
        "qos": qos,
        "array": array,
        "dependency": dependency,
        "signal": f"B:USR1@{grace}",
        "output": pattern,
        "comment": f"{COMMENT}{run_dir}",
    }
    arguments = [str(config.absolute()), *given, *([f"@{logs / SWEEP_FILE}"] if lines else [])]
    script = render(sbatch_options(options, sbatch or ()), arguments, max_requeues)
    if dry_run:
        typer.echo(script, nl=False)
        return
    files = {logs / JOB_SCRIPT: script} | ({logs / SWEEP_FILE: "\n".join([*lines, ""])} if lines else {})
    number = _run_sbatch(logs / JOB_SCRIPT, files)
    say(f"job {number}: `zerolora status {number}` shows its progress")
    typer.echo(f"{number} {pattern.replace('%A', number).replace('%j', number)}")


def _run_sbatch(script: Path, files: Mapping[Path, str]) -> str:
    if shutil.which("sbatch") is None:
        raise UserError("zerolora submit: sbatch is missing; run it on the cluster's login node, or try --dry-run")
    # SAFE_PATH is only for our own processes: scripts of the user may import modules next to them.
    environment = {name: value for name, value in os.environ.items() if name not in SAFE_PATH}
    missing = [path for path in (*files, *script.parents) if not path.exists()]
    before = {path: path.read_bytes() for path in files if path.exists()}
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            write_whole(path, text)
        done = subprocess.run(["sbatch", "--parsable", str(script)], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"sbatch: {_join_lines(done.stderr) or done.returncode}; nothing was submitted")
    except BaseException:
        for path, old in before.items():  # another array may wait for it
            path.write_bytes(old)
        for path in missing:
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        raise
    return done.stdout.strip().split(";")[0]


def _join_lines(text: str) -> str:
    words = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in text.splitlines()]
    return "; ".join(filter(None, words))


def render(options: Sequence[str], arguments: Sequence[str], max_requeues: int) -> str:
    """Return slurm/train.sbatch with sbatch's options and the command's arguments."""
    # SLURM reads options only before the first command.
    head = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options)]
    template = TEMPLATE.read_text(encoding="utf-8").splitlines()
    body = template[template.index("set -uo pipefail") :]
    variables = [f"ZEROLORA_HOME={shlex.quote(str(HOME))}", f"ZEROLORA_MAX_REQUEUES={max_requeues}"]
    given = [*variables, f"set -- {shlex.join(arguments)}"]
    return "\n".join([*head, body[0], *given, *body[1:]]) + "\n"


def expand_sweep(sweep: Sequence[str], run_dir: Path, fixed: Sequence[str] = ()) -> list[str]:
    """Return the settings of each run of a sweep: every combination of the values, each with its own folder.

    Raises UserError for malformed text, a setting that is also in `fixed`, and too many runs.
    """
    axes: list[list[str]] = []
    given = {ALIASES.get(name := text.partition("=")[0].strip(), name): text for text in fixed}
    for text in sweep:
        key, _, values = text.partition("=")
        if not key or not values:
            raise UserError(f"--sweep {text}: must read `training.learning_rate=1e-4,2e-4`")
        name = ALIASES.get(key.strip(), key.strip())
        if name == "output_dir":
            raise UserError(f"{text}: a sweep needs a single output_dir, in which each run gets its own folder")
        if name == RESUME:
            raise UserError(f"{text}: each run of a sweep resumes from its own folder; remove it")
        if name in given:
            raise UserError(f"{text}: {name} is also set by {given[name]}; list all its values once, {key}=A,B")
        given[name] = text
        axes.append([f"{key}={value}" for value in values.split(",")])
    if (count := math.prod(map(len, axes))) > MAX_RUNS:
        raise UserError(f"a sweep of {count:,} runs: at most {MAX_RUNS:,} are possible; try fewer values")
    if not axes:
        return []
    runs = list(itertools.product(*axes))
    return [shlex.join([*settings, f"output_dir={run_dir / _folder_name(settings)}"]) for settings in runs]


def load_runs(config: Path, fixed: Sequence[str], lines: Sequence[str]) -> list[RunConfig]:
    """Return the configuration of each run of a sweep.

    Raises UserError for an invalid run, for two equal ones, and for two in one folder.
    """
    loaded: dict[str, RunConfig] = {}
    folders: dict[str, RunConfig] = {}
    for line in lines:
        run = load_config(config, [*fixed, *shlex.split(line)]).config
        settings = run.model_dump_json(exclude={"output_dir"})
        same, name = loaded.setdefault(settings, run), Path(run.output_dir).name
        if same is not run:
            raise UserError(f"{name}: is the same run as {Path(same.output_dir).name}; list each value once")
        if folders.setdefault(run.output_dir, run) is not run:
            raise UserError(f"{name}: the folder of two runs, since / in a value becomes _; rename one of the values")
    return list(loaded.values())


def _folder_name(settings: Sequence[str]) -> str:
    """Return a name such as `learning_rate=1e-4,r=8`."""
    parts = [setting.partition("=") for setting in settings]
    return ",".join(f"{key.rpartition('.')[2]}={value}".replace("/", "_") for key, _, value in parts)
