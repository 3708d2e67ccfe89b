"""`zerolora status`: where a job or a run stands, from SLURM, the run's heartbeats and its metrics."""

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

from trainer.config import UserError
from trainer.contract.folder_lock import living_holder
from trainer.contract.heartbeat import Heartbeat, read_heartbeats
from trainer.contract.lock_file import LOCK_FILE
from trainer.contract.whole_files import write_whole

JOB_FILE = "slurm-job"
# Any of these marks the folder of a run, or of a job that has not begun.
OF_A_RUN = ("training_config.json", "metrics.jsonl", f"logs/{JOB_FILE}", "logs/job.sbatch", "logs/lock.json")
COMMENT = "zerolora "
# Heartbeats come every second or two; a network file system may show them late.
RECENT_S = 60.0
SPEED_STEPS = 20
SPEEDS = {"perf/tokens_per_second": "{:,.0f} tok/s", "perf/images_per_second": "{:,.2f} images/s"}
PAUSE_S = 600.0
ACTIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
NO_TASK = str(2**32 - 2)
"""SLURM's NO_VAL."""


def status(
    target: Annotated[str, typer.Argument(metavar="JOB|RUN", help="A SLURM job's number, or the folder of a run.")],
) -> None:
    """State, step, loss, speed and time left of a job or a run."""
    if re.fullmatch(r"\d+(_\d+)?", target):
        jobs = read_job(target)
        if not jobs:
            raise UserError(f"job {target}: SLURM does not know it (any more); name the folder of its run")
        for job in jobs:
            _print(job_lines(job))
            run = run_of_job(job)
            _print(run_lines(run, over=_over(job, run)) if run else [("run", "none yet")])
        return
    run = Path(target)
    if not run.is_dir():
        raise UserError(f"{target}: neither a job's number nor the folder of a run")
    if not any((run / name).exists() for name in OF_A_RUN) and not read_heartbeats(run / "logs"):
        raise UserError(f"{target}: no run has written into this folder; name the output_dir of one, or a job's number")
    noted = run / "logs" / JOB_FILE
    # Where SLURM cannot be asked the folder has to do.
    known = noted.is_file() and shutil.which("scontrol") is not None
    over = None
    for job in read_job(noted.read_text().strip()) if known else []:
        _print(job_lines(job))
        over = _over(job, run)
    _print(run_lines(run, over=over))


def note_job(job_id: int, run: Path) -> None:
    """Leave the job's number in the run's logs, and the run's folder in the job's comment."""
    logs = run / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    write_whole(logs / JOB_FILE, f"{job_id}\n")
    update = ["scontrol", "update", f"JobId={job_id}", f"Comment={COMMENT}{run.absolute()}"]
    subprocess.run(update, capture_output=True)  # some clusters forbid it; the file is there all the same


def read_job(number: str) -> list[dict[str, str]]:
    """What SLURM says of a job, or of each task of an array; nothing if it has forgotten it."""
    if shutil.which("scontrol") is None:
        raise UserError(f"job {number}: no scontrol here; run this on the cluster, or name the folder of the run")
    shown = subprocess.run(["scontrol", "--oneliner", "show", "job", number], capture_output=True, text=True)
    if shown.returncode:
        return []
    # A value may hold spaces, never " Name=".
    fields = re.compile(r"(?:^| )([A-Z][A-Za-z:/]*)=")
    jobs = []
    for line in shown.stdout.splitlines():
        parts = fields.split(line.strip())
        jobs.append(dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True)))
    return [job for job in jobs if job]


def run_of_job(job: Mapping[str, str]) -> Path | None:
    """The run's folder, from the job's comment."""
    comment = job.get("Comment", "")
    return Path(comment.removeprefix(COMMENT)) if comment.startswith(COMMENT) else None


def _over(job: Mapping[str, str], run: Path) -> str | None:
    """The state of a job that trains nothing now; None while it runs, or where the folder is another job's by now."""
    noted = run / "logs" / JOB_FILE
    is_its = noted.is_file() and noted.read_text().strip() == job["JobId"]
    return job["JobState"] if is_its and job["JobState"] not in ACTIVE else None


def _log_of(job: Mapping[str, str]) -> str:
    """Tasks of an array that wait are one to SLURM, without a number that their log could have."""
    tasks = job.get("ArrayTaskId", "").partition("%")[0]
    return job.get("StdOut", "unknown").replace(NO_TASK, tasks if tasks.isdigit() else f"[{tasks}]")


def job_lines(job: Mapping[str, str]) -> list[tuple[str, str]]:
    """What SLURM knows."""
    number = job["JobId"]
    if "ArrayTaskId" in job:
        number = f"{job['ArrayJobId']}_{job['ArrayTaskId']}"
    state = job["JobState"]
    if job.get("Reason", "None") != "None":
        state += f" ({job['Reason']})"
    lines = [("job", f"{number} {state}")]
    if job.get("NodeList", "(null)") != "(null)":
        lines.append(("nodes", job["NodeList"]))
    lines.append(("time", f"{job.get('RunTime')} of {job.get('TimeLimit')}, start {int(job.get('Restarts', 0)) + 1}"))
    lines.append(("log", _log_of(job)))
    return lines


def run_lines(run: Path, *, over: str | None = None) -> list[tuple[str, str]]:
    """What the run has written; `over` is the state of its job if that is no longer running."""
    lines = [("run", str(run))]
    beats = read_heartbeats(run / "logs")
    is_over = over is not None or _was_killed(run)
    if beats:
        lines.append(("state", _state_of(run, list(beats.values()), over)))
    everything = _records(run / "metrics.jsonl")
    records = [record for record in everything if "train/loss" in record]
    if not records:
        return [*lines, ("step", "none yet")]
    last = records[-1]
    total = _total_steps(run, last)
    lines.append(("step", f"{last['step']:,} of {total:,}" if total else f"{last['step']:,}"))
    lines.append(("loss", f"{last['train/loss']:.4f}" if last["train/loss"] is not None else "not finite"))
    lines += _held_out_line(everything)
    for name, text in SPEEDS.items():
        if speeds := [record[name] for record in records if record.get(name)]:
            # The first step builds and warms up.
            lines.append(("speed", text.format(mean((speeds[1:] or speeds)[-SPEED_STEPS:]))))
    lines.append(("elapsed", f"{timedelta(seconds=int(_seconds(everything)))} of training"))
    times = [record["perf/step_ms"] for record in records[-SPEED_STEPS:] if record.get("perf/step_ms") is not None]
    if total and not is_over and times and None in {beat.exit_code for beat in beats.values()}:
        lines.append(("left", f"{timedelta(seconds=int((total - last['step']) * median(times) / 1e3))} of training"))
    return lines


def _state_of(run: Path, beats: list[Heartbeat], over: str | None) -> str:
    """How it ended, or what its slowest rank does."""
    ended = {beat.exit_code for beat in beats}
    if ended == {0}:
        return "done"
    if None not in ended:
        return f"ended with {max(code for code in ended if code is not None)}"
    if over is not None:
        return f"ended with its job ({over})"
    slowest = min(beats, key=lambda beat: beat.step)
    if _was_killed(run):
        return f"killed, rank {slowest.rank} at {slowest.where()}"
    silent = time.time() - max(beat.time for beat in beats)
    if silent > RECENT_S:
        return f"silent for {timedelta(seconds=int(silent))}"
    hosts = ", ".join(sorted({beat.host for beat in beats}))
    return f"running on {hosts}, rank {slowest.rank} at {slowest.where()}"


def _was_killed(run: Path) -> bool:
    """Whether a run has left its lock, and no living process holds it, as far as can be seen on this machine."""
    return (run / "logs" / LOCK_FILE).is_file() and living_holder(run) is None


def _held_out_line(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The newest held-out loss, and the best."""
    held_out = [(record["eval/loss"], record["step"]) for record in records if record.get("eval/loss") is not None]
    if not held_out:
        return []
    best, at = min(held_out)
    return [("held out", f"{held_out[-1][0]:.4f} at step {held_out[-1][1]:,}, best {best:.4f} at step {at:,}")]


def _seconds(records: list[dict[str, Any]]) -> float:
    """From the first record to the last, without the time between an interruption and what resumed it."""
    timed = [record for record in records if "time" in record]
    gaps = [(after["time"] - before["time"], after) for before, after in pairwise(timed)]
    return sum(float(gap) for gap, after in gaps if gap <= PAUSE_S + 10 * (after.get("perf/step_ms") or 0.0) / 1e3)


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of the file; what is none, such as the line being written, is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(record, dict) and _is_number(record.get("step")):
            if all(value is None or _is_number(value) for value in record.values()):
                records.append(record)
    return records


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _total_steps(run: Path, last: Mapping[str, Any]) -> int | None:
    """Steps of the whole run: given, or from how far the epochs are."""
    try:
        training = json.loads((run / "training_config.json").read_text(encoding="utf-8"))["training"]
        if training.get("max_steps"):
            return int(training["max_steps"])
        done = last.get("train/epoch")
        return max(round(last["step"] * training["epochs"] / done), int(last["step"])) if done else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # not there, or not what a run writes


def _print(lines: list[tuple[str, str]]) -> None:
    for name, value in lines:
        typer.echo(f"{name:8} {value}")
