"""Record a SLURM job's attempts, so that the next one resumes the run and a job without progress is stopped.

OUTPUT_DIR/logs/slurm-starts.json has an entry for each attempt of the newest job that launched ranks. Two
of the user's settings apply only until they have taken effect: `output.overwrite` until the new run has
written its record (run.json), and a named checkpoint until a newer checkpoint exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainer.config import RunConfig, UserError
from trainer.config.files import read_json
from trainer.contract.exit_codes import EXIT_PREEMPTED
from trainer.contract.restart_record import find_newest_checkpoint, list_complete_checkpoints
from trainer.contract.whole_files import write_json

ATTEMPTS_FILE = "slurm-starts.json"
MAX_ATTEMPTS_WITHOUT_STEP = 3
RESUME_AUTO = "training.resume_from_checkpoint=auto"


@dataclass(frozen=True)
class JobAttempt:
    job: str
    newest: str
    """Newest complete checkpoint when the attempt began; empty if there was none."""
    record: int
    """mtime of run.json in ns; 0 if the file is missing."""
    code: int | None = None
    """Exit code; None if it was not recorded."""


def get_job_id(env: Mapping[str, str]) -> str:
    """Return the job ID, which all tasks of an array share."""
    return env.get("SLURM_ARRAY_JOB_ID") or env.get("SLURM_JOB_ID", "")


def build_resume_settings(config: RunConfig, env: Mapping[str, str]) -> list[str]:
    """Return the overrides that resume where the previous attempt of this job stopped.

    The first attempt resumes an existing run in the folder, unless the settings name a checkpoint or overwrite the run.
    """
    run_dir = Path(config.output_dir)
    first, current = next(iter(_read_earlier_attempts(run_dir, env)), None), _read_current_attempt(run_dir, env)
    settings = []
    overwrites = bool(config.output.overwrite)
    if overwrites and first is not None and current.record != first.record:
        settings.append("output.overwrite=false")
        overwrites = False
    checkpoint = config.training.resume_from_checkpoint
    if (checkpoint and first is not None and current.newest != first.newest) or not (checkpoint or overwrites):
        settings.append(RESUME_AUTO)
    return settings


def record_attempt(run_dir: Path, env: Mapping[str, str]) -> None:
    """Record this attempt. Raises UserError if the last MAX_ATTEMPTS_WITHOUT_STEP attempts saved no new checkpoint."""
    attempts, current = _read_earlier_attempts(run_dir, env), _read_current_attempt(run_dir, env)
    _check_progress(attempts, current)
    _write_attempts(run_dir, [*attempts, current])


def record_attempt_end(run_dir: Path, env: Mapping[str, str], code: int) -> None:
    """Record this attempt's exit code. Raises UserError if it requests a requeue, but the job makes no progress."""
    attempts = _read_attempts(run_dir, env)
    attempts[-1:] = [replace(attempt, code=code) for attempt in attempts[-1:]]
    _write_attempts(run_dir, attempts)
    if code == EXIT_PREEMPTED:
        _check_progress(attempts, _read_current_attempt(run_dir, env))


def _check_progress(attempts: Sequence[JobAttempt], current: JobAttempt) -> None:
    last = attempts[-MAX_ATTEMPTS_WITHOUT_STEP:]
    if len(last) == MAX_ATTEMPTS_WITHOUT_STEP and all(
        attempt.newest == current.newest and attempt.code != 0 for attempt in last
    ):
        since = f" since {current.newest}" if current.newest else ""
        raise UserError(
            f"job {current.job}: {MAX_ATTEMPTS_WITHOUT_STEP} attempts in a row ended without a new step{since}, so it "
            "is not requeued; increase its time limit (--time, --grace), or see logs/rank-*.log for the slow phase"
        )


def _read_current_attempt(run_dir: Path, env: Mapping[str, str]) -> JobAttempt:
    newest = find_newest_checkpoint(list_complete_checkpoints(run_dir))
    record = run_dir / "run.json"
    return JobAttempt(get_job_id(env), newest, record.stat().st_mtime_ns if record.exists() else 0)


def _read_earlier_attempts(run_dir: Path, env: Mapping[str, str]) -> list[JobAttempt]:
    """Return this job's earlier attempts, or none on the first attempt, as SLURM may reuse an older job's ID."""
    # Earlier tasks of an array may have used this folder.
    is_first_task = env.get("SLURM_ARRAY_TASK_ID") == env.get("SLURM_ARRAY_TASK_MIN")
    return [] if is_first_task and (env.get("SLURM_RESTART_COUNT") or "0") == "0" else _read_attempts(run_dir, env)


def _read_attempts(run_dir: Path, env: Mapping[str, str]) -> list[JobAttempt]:
    try:
        attempts: list[JobAttempt] = read_json(run_dir / "logs" / ATTEMPTS_FILE, list[JobAttempt])
    except FileNotFoundError:
        return []
    return [attempt for attempt in attempts if attempt.job == get_job_id(env)]


def _write_attempts(run_dir: Path, attempts: Sequence[JobAttempt]) -> None:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "logs" / ATTEMPTS_FILE, [asdict(attempt) for attempt in attempts])
