"""`zerolora status`: show the progress of a job or run from SLURM, heartbeats and metrics."""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer

from trainer.config import UserError
from trainer.config.errors import sanitize, to_text
from trainer.config.files import Count, Seconds, UnreadableFileError, read_bytes, read_text, read_value
from trainer.contract.folder_lock import LOCK_FILE, describe_live_holder
from trainer.contract.heartbeat import Heartbeat, read_heartbeats
from trainer.contract.json_records import MAX_METRICS_BYTES, Record, parse_record
from trainer.contract.whole_files import write_text_atomic

JOB_FILE, JOB_ID_PATTERN = "slurm-job", re.compile(r"[0-9]+(_[0-9]+)?")
# Any of these identifies the folder of a run, or of a job that has not started.
RUN_FILES = ("training_config.json", "metrics.jsonl", f"logs/{JOB_FILE}", "logs/job.sbatch", "logs/lock.json")
COMMENT_PREFIX = "zerolora "
# Heartbeats are written every second or two; a network file system may show them late.
MAX_HEARTBEAT_AGE_S = 60.0
SPEED_STEPS = 20
SPEEDS = {"perf/tokens_per_second": "{:,.0f} tok/s", "perf/images_per_second": "{:,.2f} images/s"}
MAX_DURATION_S = 1e12
ACTIVE_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")


def status(
    target: Annotated[str, typer.Argument(metavar="JOB|RUN", help="A SLURM job ID, or the folder of a run.")],
) -> None:
    """Show state, step, loss, speed and remaining time of a job or a run."""
    if JOB_ID_PATTERN.fullmatch(target):
        jobs = read_job(target)
        if not jobs:
            raise UserError(
                f"job {target}: unknown to scontrol (it fails, or SLURM forgot it); pass the folder of its run"
            )
        for job in jobs:
            _print(describe_job(job))
            run = find_run_dir(job)
            _print(describe_run(run, end_state=_find_end_state(job, run)) if run else [("run", "none yet")])
        return
    run = Path(target)
    if not run.is_dir() or not (any((run / name).exists() for name in RUN_FILES) or read_heartbeats(run / "logs")):
        raise UserError(f"{to_text(target)}: is neither a job ID nor the folder of a run; pass a run's output_dir")
    job_id = read_job_id(run)
    end_state = None
    # Without SLURM's tools, describe only the folder.
    for job in read_job(job_id) if job_id and shutil.which("scontrol") is not None else []:
        _print(describe_job(job))
        end_state = _find_end_state(job, run)
    _print(describe_run(run, end_state=end_state))


def record_job(job_id: int, run: Path) -> None:
    """Write the job ID to the run's logs, and the run's folder to the job's comment."""
    logs = run / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    write_text_atomic(logs / JOB_FILE, f"{job_id}\n")
    update = ["scontrol", "update", f"JobId={job_id}", f"Comment={COMMENT_PREFIX}{run.absolute()}"]
    subprocess.run(update, capture_output=True)  # some clusters forbid it; the file is enough


def read_job_id(run: Path) -> str:
    """Return the ID of the SLURM job that trained in the folder; empty if it is missing or malformed."""
    try:
        number = read_text(run / "logs" / JOB_FILE).strip()
    except (FileNotFoundError, UnreadableFileError):
        return ""
    return number if JOB_ID_PATTERN.fullmatch(number) else ""


def read_job(job_id: str) -> list[dict[str, str]]:
    """Return SLURM's fields for a job, or for each task in an array; empty if SLURM has no record of the job."""
    if shutil.which("scontrol") is None:
        raise UserError(f"job {job_id}: scontrol is missing; run this on the cluster, or use the folder of the run")
    result = subprocess.run(["scontrol", "--oneliner", "show", "job", job_id], capture_output=True, text=True)
    if result.returncode:
        return []
    # Values may contain spaces, but not " Name=".
    fields = re.compile(r"(?:^| )([A-Z][A-Za-z:/]*)=")
    rows = [fields.split(line.strip()) for line in result.stdout.splitlines()]
    return [dict(zip(row[1::2], map(str.strip, row[2::2]), strict=True)) for row in rows if len(row) > 1]


def find_run_dir(job: Mapping[str, str]) -> Path | None:
    comment = job.get("Comment", "")
    return Path(comment.removeprefix(COMMENT_PREFIX)) if comment.startswith(COMMENT_PREFIX) else None


def _find_end_state(job: Mapping[str, str], run: Path) -> str | None:
    """Return the state of a job that has ended; None if it is active, or if another job now uses the folder."""
    return job["JobState"] if read_job_id(run) == job["JobId"] and job["JobState"] not in ACTIVE_STATES else None


def describe_job(job: Mapping[str, str]) -> list[tuple[str, str]]:
    number = f"{job['ArrayJobId']}_{job['ArrayTaskId']}" if "ArrayTaskId" in job else job["JobId"]
    reason = f" ({job['Reason']})" if job.get("Reason", "None") != "None" else ""
    rows = [("job", f"{number} {job['JobState']}{reason}")]
    if job.get("NodeList", "(null)") != "(null)":
        rows.append(("nodes", job["NodeList"]))
    rows.append(("time", f"{job.get('RunTime')} of {job.get('TimeLimit')}, attempt {int(job.get('Restarts', 0)) + 1}"))
    return [*rows, ("log", job.get("StdOut", "unknown"))]


def describe_run(run: Path, *, end_state: str | None = None) -> list[tuple[str, str]]:
    rows = [("run", str(run))]
    beats = read_heartbeats(run / "logs")
    # While ranks train, one of them or their launcher holds the folder's lock.
    has_ended = end_state is not None or describe_live_holder(run) is None
    if beats:
        rows.append(("state", _describe_state(run, list(beats.values()), end_state)))
    metrics = _read_metrics(run / "metrics.jsonl")
    records = [record for record in metrics if "train/loss" in record]
    if not records:
        file = run / "metrics.jsonl"
        is_damaged = not metrics and file.is_file() and file.stat().st_size
        return [*rows, ("step", "unknown, as metrics.jsonl cannot be read" if is_damaged else "none yet")]
    last, loss = records[-1], records[-1]["train/loss"]
    total, step = _compute_total_steps(run, last), last["step"] or 0
    rows.append(("step", f"{step:,} of {total:,}" if total else f"{step:,}"))
    rows.append(("loss", f"{loss:.4f}" if loss is not None else "not finite"))
    rows += _describe_held_out(metrics)
    for name, text in SPEEDS.items():
        if speeds := [speed for record in records if (speed := record.get(name))]:
            # The first step includes builds and warm-up.
            rows.append(("speed", text.format(mean((speeds[1:] or speeds)[-SPEED_STEPS:]))))
    times = [ms for record in records[-SPEED_STEPS:] if (ms := record.get("perf/step_ms")) is not None]
    if total and not has_ended and times and None in {beat.exit_code for beat in beats.values()}:
        rows.append(("left", f"{_format_duration((total - step) * median(times) / 1e3)} of training"))
    return rows


def _describe_state(run: Path, beats: list[Heartbeat], end_state: str | None) -> str:
    codes = {beat.exit_code for beat in beats}
    failed = max((code for code in codes if code), default=None)
    if codes == {0}:
        return "done"
    if failed is not None and None not in codes:
        return f"exited with code {failed}"
    if end_state is not None:
        return f"ended with its job ({end_state})"
    slowest = min(beats, key=lambda beat: (beat.exit_code is not None, beat.step))
    if describe_live_holder(run) is None:
        # A run that was not killed has released its lock; some ranks may have had no time to record an exit code.
        was_killed = failed is None or (run / "logs" / LOCK_FILE).is_file()
        state = "killed" if was_killed else f"exited with code {failed}"
        return f"{state}, rank {slowest.rank} at {slowest.describe_position()}"
    silence_s = time.time() - max(beat.time for beat in beats)
    if silence_s > MAX_HEARTBEAT_AGE_S:
        return f"no heartbeat for {_format_duration(silence_s)}"
    hosts = ", ".join(sorted({beat.host for beat in beats}))
    return f"running on {hosts}, rank {slowest.rank} at {slowest.describe_position()}"


def _format_duration(seconds: float) -> timedelta:
    return timedelta(seconds=int(min(max(seconds, 0.0), MAX_DURATION_S)))


def _describe_held_out(records: list[Record]) -> list[tuple[str, str]]:
    held_out = [(loss, record["step"] or 0) for record in records if (loss := record.get("eval/loss")) is not None]
    if not held_out:
        return []
    best, best_step = min(held_out)
    return [("held out", f"{held_out[-1][0]:.4f} at step {held_out[-1][1]:,}, best {best:.4f} at step {best_step:,}")]


def _read_metrics(path: Path) -> list[Record]:
    try:
        lines = read_bytes(path, MAX_METRICS_BYTES).splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with suppress(UnreadableFileError):
            records.append(parse_record(line, path))
    return records


def _compute_total_steps(run: Path, last: Record) -> int | None:
    settings, epochs_done, step = run / "training_config.json", last.get("train/epoch"), last["step"] or 0
    with suppress(FileNotFoundError, UnreadableFileError):
        steps: int | None = read_value(settings, "training.max_steps", Count | None)
        if steps or not epochs_done or epochs_done < 1e-9:
            return steps or None
        epochs: float = read_value(settings, "training.epochs", Seconds)
        return max(round(step * epochs / epochs_done), int(step))
    return None


def _print(rows: list[tuple[str, str]]) -> None:
    for name, value in rows:
        typer.echo(sanitize(f"{name:8} {value}").replace("\n", " "))
