"""Record of the starts of a SLURM job: what its next start resumes from, and whether another start makes sense.

OUTPUT_DIR/logs/slurm-starts.json has an entry for every start of the newest job that reached its ranks. The user's
settings hold until they took effect: an earlier run stays in the folder until the new one writes its record, and a
named checkpoint is resumed until a newer one exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainer.config import RunConfig, UserError
from trainer.config.files import read_json
from trainer.contract.exit_codes import EXIT_PREEMPTED
from trainer.contract.restart_record import complete_checkpoints, newest_checkpoint
from trainer.contract.whole_files import write_json

STARTS_FILE = "slurm-starts.json"
MAX_STARTS_WITHOUT_STEP = 3
RESUME_AUTO = "training.resume_from_checkpoint=auto"


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    job: str
    newest: str
    """The newest complete checkpoint at that time, empty if none."""
    record: int
    """mtime in ns of the run's record, which a new run writes; 0 if missing."""
    code: int | None = None
    """Exit code, None if it was not recorded."""


def get_job_id(env: Mapping[str, str]) -> str:
    """Return the job's id, the same for all tasks of an array."""
    return env.get("SLURM_ARRAY_JOB_ID") or env.get("SLURM_JOB_ID", "")


def build_resume_settings(config: RunConfig, env: Mapping[str, str]) -> list[str]:
    """Return the overrides with which a start of a job resumes where the previous one ended.

    Unless the user's settings say otherwise, a first start also resumes what the folder holds.
    """
    run_dir = Path(config.output_dir)
    first, now = next(iter(_read_earlier(run_dir, env)), None), _current_start(run_dir, env)
    settings = []
    begins = bool(config.output.overwrite)
    if begins and first is not None and now.record != first.record:
        settings.append("output.overwrite=false")
        begins = False
    named = config.training.resume_from_checkpoint
    if (named and first is not None and now.newest != first.newest) or not (named or begins):
        settings.append(RESUME_AUTO)
    return settings


def record_start(run_dir: Path, env: Mapping[str, str]) -> None:
    """Record this start. Raises UserError if the last starts of this job all ended without a new step."""
    starts, now = _read_earlier(run_dir, env), _current_start(run_dir, env)
    _refuse_without_progress(starts, now)
    _write(run_dir, [*starts, now])


def record_end(run_dir: Path, env: Mapping[str, str], code: int) -> None:
    """Record how this start ended. Raises UserError if it asks for another although the last ones made no progress."""
    starts = _read(run_dir, env)
    starts[-1:] = [replace(start, code=code) for start in starts[-1:]]
    _write(run_dir, starts)
    if code == EXIT_PREEMPTED:
        _refuse_without_progress(starts, _current_start(run_dir, env))


def _refuse_without_progress(starts: Sequence[Start], now: Start) -> None:
    last = starts[-MAX_STARTS_WITHOUT_STEP:]
    if len(last) == MAX_STARTS_WITHOUT_STEP and all(start.newest == now.newest and start.code != 0 for start in last):
        since = f" since {now.newest}" if now.newest else ""
        raise UserError(
            f"job {now.job}: {MAX_STARTS_WITHOUT_STEP} starts in a row ended without a new step{since}, so it is not "
            "queued again; give a start more time (--time, --grace), or see logs/rank-*.log for what takes so long"
        )


def _current_start(run_dir: Path, env: Mapping[str, str]) -> Start:
    newest = newest_checkpoint(complete_checkpoints(run_dir))
    record = run_dir / "run.json"
    return Start(get_job_id(env), newest, record.stat().st_mtime_ns if record.exists() else 0)


def _read_earlier(run_dir: Path, env: Mapping[str, str]) -> list[Start]:
    """Return the earlier starts of this job; none for its first, because an older job may have had the same id."""
    # Earlier tasks of an array may have used this folder.
    is_first_task = env.get("SLURM_ARRAY_TASK_ID") == env.get("SLURM_ARRAY_TASK_MIN")
    return [] if is_first_task and (env.get("SLURM_RESTART_COUNT") or "0") == "0" else _read(run_dir, env)


def _read(run_dir: Path, env: Mapping[str, str]) -> list[Start]:
    try:
        starts: list[Start] = read_json(run_dir / "logs" / STARTS_FILE, list[Start])
    except FileNotFoundError:
        return []
    return [start for start in starts if start.job == get_job_id(env)]


def _write(run_dir: Path, starts: Sequence[Start]) -> None:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "logs" / STARTS_FILE, [asdict(start) for start in starts])
