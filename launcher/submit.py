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

from launcher.status import COMMENT_PREFIX
from launcher.supervision.terminal import log
from launcher.targets.local import SAFE_PATH_VARIABLES
from trainer.config import RunConfig, UserError, load_config
from trainer.config.aliases import ALIASES
from trainer.config.errors import format_count, to_text
from trainer.contract.home import ZEROLORA_HOME
from trainer.contract.whole_files import write_text_atomic

TEMPLATE = ZEROLORA_HOME / "slurm" / "train.sbatch"
JOB_SCRIPT, SWEEP_FILE = "job.sbatch", "sweep.txt"
_TIME = re.compile(r"(?:(?P<days>[0-9]{1,9})-)?(?P<rest>[0-9]{1,9}(?::[0-5]?[0-9]){0,2})")
MAX_GRACE_S = 65535
# SLURM checks limits every half minute, and sends the signal up to a minute early.
SIGNAL_LEAD_S = 60
MIN_TRAINING_S = 30
MAX_RUNS = 1000
RESUME = "training.resume_from_checkpoint"
ARRAY_FORMAT = "must be task numbers such as 0-7, 0,3,5 or 0-12:2; append %2 to run two at a time"
_SHORT_OPTION = re.compile("-[ABCDFGJLMNSabcdeimnopqtwx]")
"""sbatch's short options that take a value."""
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


def build_sbatch_options(options: Mapping[str, str | int | None], extra: Sequence[str]) -> list[str]:
    """Return sbatch's arguments: ours, the options that are set, and `extra`. Raises UserError for invalid ones."""
    for name, value in options.items():
        # Each option is a comment line in the script.
        if isinstance(value, str) and (value.splitlines() != [value] or not value.strip()):
            raise UserError(f"--{name} {value!r}: must be one line and not empty; omit it to use SLURM's default")
    for option in extra:
        if option.splitlines() != [option] or not option.startswith("-"):
            raise UserError(f"--sbatch {option!r}: must be one line that begins with dashes, such as --mem=0")
        if re.match(r"--[\w-]+\s", option):
            raise UserError(f"--sbatch {option!r}: contains a space; write {'='.join(option.split(maxsplit=1))}")
        if option.removeprefix("--") in options or _SHORT_OPTION.fullmatch(option):  # a value would replace ours
            raise UserError(f"--sbatch {option}: must be {option} with its value, such as --nodes=2")
    given = (f"--{name}={value}" for name, value in options.items() if value is not None)
    return ["--requeue", "--open-mode=append", *given, *extra]


def check_job(time: str, grace: int, gpus: int, ranks: int | None) -> None:
    """Raise UserError if `ranks` is set together with GPUs, or if `time` minus `grace` is too short for a step."""
    if gpus and ranks is not None:
        raise UserError(f"--ranks-per-node {ranks}: must not be set with GPUs; remove it, or add --gpus-per-node 0")
    limit_s = parse_time_limit(time)
    if limit_s is not None and limit_s < grace + SIGNAL_LEAD_S + MIN_TRAINING_S:
        raise UserError(
            f"--time {time}: too short to train: saving may take {grace} s (--grace), and SLURM may signal up to "
            f"{SIGNAL_LEAD_S} s early; use --time {-(-(grace + 600) // 60)} or a smaller --grace"
        )


def parse_time_limit(time: str) -> int | None:
    """Return sbatch's time limit in seconds, or None if there is no limit. Raises UserError for malformed text."""
    if time.lower() in ("unlimited", "infinite", "0"):
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        forms = "MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 12:00:00, with minutes and seconds below 60"
        raise UserError(f"--time {to_text(time)}: must be {forms}")
    days, rest = int(match["days"] or 0), [int(part) for part in match["rest"].split(":")]
    if match["days"]:
        hours, minutes, seconds = [*rest, 0, 0][:3]
    else:
        # One number means minutes; two mean minutes and seconds.
        hours, minutes, seconds = rest if len(rest) == 3 else [0, *rest, 0][:3]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_task_ranges(tasks: str) -> list[range]:
    """Parse task numbers such as `0,3-5,8-12:2` as sbatch does."""
    ranges = []
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise UserError(f"--array {tasks}: {ARRAY_FORMAT}")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        ranges.append(range(first, last + 1, max(step, 1)))  # not a list, which could have millions of items
    return ranges


def _check_array(array: str | None, lines: list[str]) -> None:
    if array is not None:
        if "%" in array and not re.fullmatch("[1-9][0-9]*", array.partition("%")[2]):
            raise UserError(f"--array {array}: {ARRAY_FORMAT}")
        last = max(tasks[-1] for tasks in parse_task_ranges(array.partition("%")[0]))
        if lines and last >= len(lines):
            raise UserError(
                f"--array {array}: the sweep has {format_count(len(lines), 'run')}; use 0 to {len(lines) - 1}"
            )
    if array is not None and not lines and not array.endswith("%1"):
        fix = f"give them different settings with --sweep key=value,value, or run one at a time with --array {array}%1"
        raise UserError(f"--array {array}: its tasks would train in the same folder at once; {fix}")


def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Settings to override.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs per node, each with one rank; 0 for CPU ranks.")] = 8,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="CPU ranks per node.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores per rank.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of one attempt; the job is then requeued.")] = "24:00:00",
    grace: Annotated[int, typer.Option(min=1, max=MAX_GRACE_S, help="Seconds reserved for saving.")] = 300,
    partition: Annotated[str | None, typer.Option(help="SLURM's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM's account.")] = None,
    qos: Annotated[str | None, typer.Option(help="SLURM's quality of service.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the output folder's name.")] = None,
    array: Annotated[str | None, typer.Option(help="Array tasks, such as `0-7%2`; default with --sweep: all.")] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="Values to try: `seed=1,2,3`; may be repeated.")] = None,
    dependency: Annotated[str | None, typer.Option(help="SLURM's dependency, such as `afterok:123`.")] = None,
    max_requeues: Annotated[int, typer.Option(min=0, help="Maximum number of requeues.")] = 20,
    sbatch: Annotated[list[str] | None, typer.Option(help="Option of sbatch: `--mem=0`; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and exit.")] = False,
) -> None:
    """Submit a SLURM job that saves a checkpoint before its time limit, is requeued, and resumes."""
    settings = list(overrides or [])
    run_dir = Path(load_config(config, settings).config.output_dir).absolute()
    lines = expand_sweep(sweep or [], run_dir, settings)
    load_run_configs(config, settings, lines)
    _check_array(array, lines)
    check_job(time, grace, gpus_per_node, ranks_per_node)
    array = array or (f"0-{len(lines) - 1}" if lines else None)
    logs = run_dir / "logs"
    # SLURM's pattern for the log: one file per array task, to which later attempts append.
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
        "comment": f"{COMMENT_PREFIX}{run_dir}",
    }
    arguments = [str(config.absolute()), *settings, *([f"@{logs / SWEEP_FILE}"] if lines else [])]
    script = render_script(build_sbatch_options(options, sbatch or ()), arguments, max_requeues)
    if dry_run:
        typer.echo(script, nl=False)
        return
    files = {logs / JOB_SCRIPT: script} | ({logs / SWEEP_FILE: "\n".join([*lines, ""])} if lines else {})
    number = _run_sbatch(logs / JOB_SCRIPT, files)
    log(f"job {number}: `zerolora status {number}` shows its progress")
    typer.echo(f"{number} {pattern.replace('%A', number).replace('%j', number)}")


def _run_sbatch(script: Path, files: Mapping[Path, str]) -> str:
    if shutil.which("sbatch") is None:
        raise UserError("zerolora submit: sbatch is missing; run this on the cluster's login node, or add --dry-run")
    # SAFE_PATH_VARIABLES is only for our own processes: users' scripts may import modules next to them.
    environment = {name: value for name, value in os.environ.items() if name not in SAFE_PATH_VARIABLES}
    missing = [path for path in (*files, *script.parents) if not path.exists()]
    previous = {path: path.read_bytes() for path in files if path.exists()}
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            write_text_atomic(path, text)
        result = subprocess.run(["sbatch", "--parsable", str(script)], env=environment, capture_output=True, text=True)
        if result.returncode:
            rows = (row.removeprefix("sbatch: ").removeprefix("error: ").strip() for row in result.stderr.splitlines())
            raise UserError(f"sbatch: {'; '.join(filter(None, rows)) or result.returncode}; nothing was submitted")
    except BaseException:
        for path, content in previous.items():  # a queued array may need them
            path.write_bytes(content)
        for path in missing:
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        raise
    return result.stdout.strip().split(";")[0]


def render_script(options: Sequence[str], arguments: Sequence[str], max_requeues: int) -> str:
    # SLURM reads options only before the first command.
    head = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options)]
    template = TEMPLATE.read_text(encoding="utf-8").splitlines()
    body = template[template.index("set -uo pipefail") :]
    variables = [f"ZEROLORA_HOME={shlex.quote(str(ZEROLORA_HOME))}", f"ZEROLORA_MAX_REQUEUES={max_requeues}"]
    return "\n".join([*head, body[0], *variables, f"set -- {shlex.join(arguments)}", *body[1:]]) + "\n"


def expand_sweep(sweep: Sequence[str], run_dir: Path, fixed: Sequence[str] = ()) -> list[str]:
    """Return a line of settings, with its output folder, per combination. Raises UserError for malformed text."""
    axes: list[list[str]] = []
    texts = {resolve_name(text): text for text in fixed}
    for text in sweep:
        key, _, values = text.partition("=")
        if not key or not all(map(str.strip, split_values(values))):
            raise UserError(f"{text}: must look like `training.learning_rate=1e-4,2e-4`, without empty values")
        name = resolve_name(text)
        if name == "output_dir":
            raise UserError(f"{text}: a sweep has a single output_dir, with a folder for each run; remove this setting")
        if name == RESUME:
            raise UserError(f"{text}: every run of a sweep resumes from its own folder; remove this setting")
        if name in texts:
            raise UserError(f"{text}: {name} is also set by {texts[name]}; list all its values once, as {key}=A,B")
        if len(split_values(values)) > len({value.strip() for value in split_values(values)}):
            raise UserError(f"{text}: has a value twice; list each value once")
        texts[name] = text
        axes.append([f"{key}={value.strip()}" for value in split_values(values)])
    if (count := math.prod(map(len, axes))) > MAX_RUNS:
        raise UserError(f"the sweep has {count:,} runs: the maximum is {MAX_RUNS:,}; use fewer values")
    if not axes:
        return []
    runs = list(itertools.product(*axes))
    return [shlex.join([*settings, f"output_dir={run_dir / _build_folder_name(settings)}"]) for settings in runs]


def load_run_configs(config: Path, fixed: Sequence[str], lines: Sequence[str]) -> list[RunConfig]:
    """Return the configuration of each run in a sweep. Raises UserError for invalid or equal runs."""
    loaded: dict[str, RunConfig] = {}
    folders: dict[str, RunConfig] = {}
    for line in lines:
        run = load_config(config, [*fixed, *shlex.split(line)]).config
        settings = run.model_dump_json(exclude={"output_dir"})
        first, name = loaded.setdefault(settings, run), Path(run.output_dir).name
        if first is not run:
            raise UserError(f"{name}: has the same settings as {Path(first.output_dir).name}; list each value once")
        if folders.setdefault(run.output_dir, run) is not run:
            raise UserError(
                f"{name}: two runs share this folder (in its name, / and spaces become _); change one of the values"
            )
    return list(loaded.values())


def _build_folder_name(settings: Sequence[str]) -> str:
    parts = [setting.partition("=") for setting in settings]
    names = (f"{key.rpartition('.')[2]}={value.strip('[]{}')}" for key, _, value in parts)
    return ",".join(re.sub(r"[^\w.=+,-]+", "_", name) for name in names)


def resolve_name(text: str) -> str:
    """Return the setting's own name in an override such as `lr=1e-4`."""
    name = text.partition("=")[0].strip()
    return ALIASES.get(name, name)


def split_values(text: str) -> list[str]:
    """Split text at the commas that are not in brackets."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values
