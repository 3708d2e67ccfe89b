"""The starts of a SLURM job in the run's folder: what its next start goes on from, and whether that has any use.

OUTPUT_DIR/logs/slurm-starts.json has an entry for every start of the newest job that got as far as its ranks. The
settings of the user hold until they have been carried out: an earlier run stays in the folder until the new one writes
its record, and a checkpoint that was named is resumed until there is a newer one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainer.config import RunConfig, UserError
from trainer.config.files import read_json
from trainer.contract.exit_codes import EXIT_PREEMPTED
from trainer.contract.restart_record import newest_checkpoint, whole_checkpoints
from trainer.contract.whole_files import write_json

STARTS_FILE = "slurm-starts.json"
MOST_WITHOUT_A_STEP = 3
GO_ON = "training.resume_from_checkpoint=auto"


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    job: str
    newest: str
    """The newest whole checkpoint at that time, empty if there was none."""
    record: int
    """When the run's record was last written (mtime), 0 if never: a run that begins writes it."""
    code: int | None = None
    """How it ended, if it could say so."""


def job_of(env: Mapping[str, str]) -> str:
    """The job, the same for all tasks of an array."""
    return env.get("SLURM_ARRAY_JOB_ID") or env.get("SLURM_JOB_ID", "")


def settings_to_go_on(config: RunConfig, env: Mapping[str, str]) -> list[str]:
    """The overrides by which a start of a job goes on where the one before it ended.

    Where the user says nothing of it a first start also goes on with what the folder holds.
    """
    run_dir = Path(config.output_dir)
    first, now = next(iter(_earlier(run_dir, env)), None), _state(run_dir, env)
    settings = []
    begins = bool(config.output.overwrite)
    if begins and first is not None and now.record != first.record:
        settings.append("output.overwrite=false")
        begins = False
    named = config.training.resume_from_checkpoint
    if (named and first is not None and now.newest != first.newest) or not (named or begins):
        settings.append(GO_ON)
    return settings


def note_start(run_dir: Path, env: Mapping[str, str]) -> None:
    """Add this start. Raises UserError if the last ones of this job all ended without a new step."""
    starts, now = _earlier(run_dir, env), _state(run_dir, env)
    _refuse_without_progress(starts, now)
    _write(run_dir, [*starts, now])


def note_end(run_dir: Path, env: Mapping[str, str], code: int) -> None:
    """Add how this start ended. Raises UserError if it asks for another, and the last ones had no use."""
    starts = _read(run_dir, env)
    starts[-1:] = [replace(start, code=code) for start in starts[-1:]]
    _write(run_dir, starts)
    if code == EXIT_PREEMPTED:
        _refuse_without_progress(starts, _state(run_dir, env))


def _refuse_without_progress(starts: Sequence[Start], now: Start) -> None:
    last = starts[-MOST_WITHOUT_A_STEP:]
    if len(last) == MOST_WITHOUT_A_STEP and all(start.newest == now.newest and start.code != 0 for start in last):
        since = f" since {now.newest}" if now.newest else ""
        raise UserError(
            f"job {now.job}: {MOST_WITHOUT_A_STEP} starts in a row ended without a new step{since}, so it is not "
            "queued again; give a start more time (--time, --grace), or see logs/rank-*.log for what takes so long"
        )


def _state(run_dir: Path, env: Mapping[str, str]) -> Start:
    """What the folder holds now."""
    newest = newest_checkpoint(whole_checkpoints(run_dir))
    record = run_dir / "run.json"
    return Start(job_of(env), newest, record.stat().st_mtime_ns if record.exists() else 0)


def _earlier(run_dir: Path, env: Mapping[str, str]) -> list[Start]:
    """The starts of this job before this one; none for its first, whose number an older job may have had."""
    is_first = not int(env.get("SLURM_RESTART_COUNT") or 0) and not _follows_in_array(env)
    return [] if is_first else _read(run_dir, env)


def _read(run_dir: Path, env: Mapping[str, str]) -> list[Start]:
    try:
        starts: list[Start] = read_json(run_dir / "logs" / STARTS_FILE, list[Start])
    except FileNotFoundError:
        return []
    return [start for start in starts if start.job == job_of(env)]


def _follows_in_array(env: Mapping[str, str]) -> bool:
    """Whether another task of an array came before; one that has a folder of its own finds nothing of it there."""
    return env.get("SLURM_ARRAY_TASK_ID") != env.get("SLURM_ARRAY_TASK_MIN")


def _write(run_dir: Path, starts: Sequence[Start]) -> None:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "logs" / STARTS_FILE, [asdict(start) for start in starts])
