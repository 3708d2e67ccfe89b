"""`zerolora submit`: fill in slurm/train.sbatch for a run, and submit it with sbatch."""

import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Job:
    """Options of a job; None leaves one to the cluster."""

    nodes: int = 1
    gpus_per_node: int = 8
    ranks_per_node: int | None = None
    """Only without GPUs; with GPUs there is one rank for each."""
    cpus_per_task: int | None = None
    time: str = "24:00:00"
    grace: int = 300
    """Seconds before the time limit at which the run is saved."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    name: str | None = None
    array: str | None = None
    dependency: str | None = None
    max_requeues: int = 20
    more: Sequence[str] = ()
    """Other options of sbatch, such as `--mem=0`."""

    def options(self, output: str) -> list[str]:
        """Return the options of sbatch. Raises UserError for numbers out of range and for empty names."""
        for option, least_one in (
            ("nodes", self.nodes),
            ("ranks-per-node", self.ranks_per_node),
            ("cpus-per-task", self.cpus_per_task),
        ):
            if least_one is not None and least_one < 1:
                raise UserError(f"--{option} {least_one}: must be 1 or more")
        for option, number in (("--gpus-per-node", self.gpus_per_node), ("--max-requeues", self.max_requeues)):
            if number < 0:
                raise UserError(f"{option} {number}: must be 0 or more")
        self._check_time()
        if self.gpus_per_node and self.ranks_per_node is not None:
            raise UserError("--ranks-per-node: must be left out with GPUs (a rank each); or set --gpus-per-node 0")
        tasks = self.gpus_per_node or self.ranks_per_node or 1
        named = {
            "job-name": self.name,
            "nodes": self.nodes,
            "gpus-per-node": self.gpus_per_node or None,
            "ntasks-per-node": tasks,
            "cpus-per-task": self.cpus_per_task,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "array": self.array,
            "dependency": self.dependency,
            "signal": f"B:USR1@{self.grace}",
            "open-mode": "append",
            "output": output,
            "comment": COMMENT + str(Path(output).parent.parent),
        }
        for name, value in named.items():
            if isinstance(value, str) and not value.strip():
                raise UserError(f"--{name} {value!r}: must not be empty; leave it out for SLURM's default")
        given = [*(f"--{name}={value}" for name, value in named.items() if value is not None), *self.more]
        for option in given:
            if len(option.splitlines()) != 1 or not option.startswith("-"):  # each is a comment line of the script
                raise UserError(f"{option!r}: must be one line, with its dashes, such as --mem=0")
        return ["--requeue", *given]

    def _check_time(self) -> None:
        limit_s = parse_time_limit(self.time)
        if not 1 <= self.grace <= MAX_GRACE_S:
            raise UserError(f"--grace {self.grace}: must be 1 to {MAX_GRACE_S} seconds")
        if limit_s is not None and limit_s < self.grace + EARLIER_S + SHORTEST_S:
            raise UserError(
                f"--time {self.time}: is {limit_s} s; the last {self.grace} (--grace) and up to {EARLIER_S} before are "
                f"for saving, so no step would be completed; use --time {-(-(self.grace + 600) // 60)} or a smaller "
                "--grace"
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
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs, and so ranks, per node; 0 without GPUs.")] = 8,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks per node, without GPUs.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="Cores per rank.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of one start; the job is then queued again.")] = "24:00:00",
    grace: Annotated[int, typer.Option(help="Seconds before the time limit at which the run is saved.")] = 300,
    partition: Annotated[str | None, typer.Option(help="SLURM's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM's account.")] = None,
    qos: Annotated[str | None, typer.Option(help="SLURM's quality of service.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the output folder's name.")] = None,
    array: Annotated[str | None, typer.Option(help="Tasks of an array, `0-7%2`; default with --sweep: all.")] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="Values to try, `seed=1,2,3`; may be repeated.")] = None,
    dependency: Annotated[str | None, typer.Option(help="SLURM's dependency, such as `afterok:123`.")] = None,
    max_requeues: Annotated[int, typer.Option(help="How often the job may be queued again.")] = 20,
    sbatch: Annotated[list[str] | None, typer.Option(help="Any option of sbatch, `--mem=0`; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and stop.")] = False,
) -> None:
    """Submit a SLURM job that trains, saves before its time limit, is queued again, and resumes."""
    given = list(overrides or [])
    run_dir = Path(load_config(config, given).config.output_dir).absolute()
    lines = expand_sweep(sweep or [], run_dir, given)
    load_runs(config, given, lines)
    _check_array(array, lines)
    job = Job(
        nodes, gpus_per_node, ranks_per_node, cpus_per_task, time, grace, partition, account, qos,
        job_name or run_dir.name, array or (f"0-{len(lines) - 1}" if lines else None), dependency, max_requeues,
        sbatch or (),
    )  # fmt: skip
    logs = run_dir / "logs"
    arguments = [str(config.absolute()), *given, *([f"@{logs / SWEEP_FILE}"] if lines else [])]
    script = render(job, arguments, logs)
    if dry_run:
        typer.echo(script, nl=False)
        return
    files = {logs / JOB_SCRIPT: script} | ({logs / SWEEP_FILE: "\n".join([*lines, ""])} if lines else {})
    number = _run_sbatch(logs / JOB_SCRIPT, files)
    say(f"job {number}: `zerolora status {number}` shows its progress")
    pattern = build_log_pattern(logs, array=job.array is not None)
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


def render(job: Job, arguments: Sequence[str], logs: Path) -> str:
    """Return slurm/train.sbatch with the job's options and the command's arguments."""
    options = job.options(build_log_pattern(logs, array=job.array is not None))
    # SLURM reads options only before the first command.
    head = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options)]
    template = TEMPLATE.read_text(encoding="utf-8").splitlines()
    body = template[template.index("set -uo pipefail") :]
    variables = [f"ZEROLORA_HOME={shlex.quote(str(HOME))}", f"ZEROLORA_MAX_REQUEUES={job.max_requeues}"]
    given = [*variables, f"set -- {shlex.join(arguments)}"]
    return "\n".join([*head, body[0], *given, *body[1:]]) + "\n"


def build_log_pattern(logs: Path, *, array: bool) -> str:
    """Return SLURM's pattern for a job's log: one file per task of an array, reused by later starts."""
    return str(logs / ("slurm-%A_%a.log" if array else "slurm-%j.log"))


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
