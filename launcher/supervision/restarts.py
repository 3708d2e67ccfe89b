"""Restart the ranks of a failed run from its newest complete checkpoint.

A rank that runs out of memory leaves a note with a smaller micro-batch (trainer/memory/oom_recovery.py). If a run's
adapters are changed, it stops at a checkpoint and resumes with the new ones. After other failures, the run restarts
unchanged, at most `training.max_restarts` times and only if the failed attempt completed a step or its GPU or host can
be excluded. A failure that repeats in the same step is usually caused by its data, so the run is not restarted again.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.supervision.failure_report import FailureSummary
from launcher.supervision.terminal import log
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_RESTART, EXIT_USAGE, STOP_CODES
from trainer.contract.heartbeat import read_heartbeats
from trainer.contract.restart_record import (
    MAX_HALVINGS,
    Restart,
    RestartNote,
    apply_recorded_changes,
    delete_restarts,
    find_newest_checkpoint,
    list_complete_checkpoints,
    record_restart,
)

_RESUME, _OVERWRITE = "training.resume_from_checkpoint", "output.overwrite"


@dataclass(frozen=True)
class AttemptResult:
    code: int
    failure: FailureSummary | None = None
    """None if the ranks finished, were stopped, or requested a smaller micro-batch."""
    ranks: int = 0
    """Number of ranks started."""
    step: int = 0
    """Last step of the failed rank; the last step of any rank if the failed rank is unknown."""
    has_completed_step: bool = False
    """Whether the failed rank, or any rank if it is unknown, completed a step."""

    @classmethod
    def from_heartbeats(cls, logs: Path, code: int, failure: FailureSummary | None, ranks: int) -> "AttemptResult":
        by_rank = read_heartbeats(logs)
        failed = by_rank.get(failure.rank) if failure is not None and failure.rank is not None else None
        beats = [failed] if failed is not None else list(by_rank.values())  # other ranks may be a step ahead
        step = max((beat.step for beat in beats), default=0)
        return cls(code, failure, ranks, step, any(beat.has_completed_step for beat in beats))

    def is_same_failure(self, other: "AttemptResult | None") -> bool:
        """Return whether both attempts failed in the same step with the same status."""
        if other is None or self.failure is None or other.failure is None:
            return False
        return self.step > 0 and (self.step, self.failure.status) == (other.step, other.failure.status)


StartAttempt = Callable[[Sequence[str]], AttemptResult]
"""Function that starts the ranks with additional `key=value` settings and returns how the attempt ended."""


class RestartLoop:
    """Starts a run's ranks until they succeed or a restart would not help."""

    def __init__(
        self,
        run_dir: Path,
        start: StartAttempt,
        *,
        max_restarts: int,
        resumes: bool,
        exclude: Callable[[AttemptResult], str | None] | None = None,
        adapters: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Allow `max_restarts` restarts after failures; `resumes` means that the user set a checkpoint to resume from.

        `exclude(result)` excludes a host or GPU that failed before completing a step and returns its name; without
        `exclude`, such a failure ends the run. `adapters` are the run's adapters, which `zerolora adapters` may change.
        """
        self._adapters = list(adapters)
        self._run_dir, self._start, self._max_restarts = run_dir, start, max_restarts
        self._exclude, self._has_trained = exclude, False
        self._logs = run_dir / "logs"
        self._resumes, self._before = resumes, list_complete_checkpoints(run_dir)
        self._record_before = self._read_record_mtime()
        self._settings: dict[str, str] = {}
        self._restarts = self._halvings = 0
        RestartNote.take(self._logs)  # left by a run without a launcher
        if not resumes:
            delete_restarts(run_dir)

    def run(self) -> int:
        previous = None
        while True:
            result = self._start([f"{name}={value}" for name, value in self._settings.items()])
            note = RestartNote.take(self._logs)
            if result.code == EXIT_RESTART:
                if note is None or not self._retry_with_smaller_batch(note, result):
                    return EXIT_FAILED
            elif (
                result.code == EXIT_OK
                and (new := apply_recorded_changes(self._run_dir, self._adapters)) != self._adapters
            ):
                self._adapters, self._settings["adapters"] = new, json.dumps(new)
                self._prepare_next_attempt(result, "the adapters were changed")
                log("the adapters were changed: resuming")
            elif not self._should_restart(result, previous):
                return result.code
            else:
                assert result.failure is not None
                self._restarts += 1
                checkpoint = self._prepare_next_attempt(result, result.failure.reason)
                log(f"restart {self._restarts} of {self._max_restarts}: resuming from {checkpoint or 'the start'}")
            previous, self._has_trained = result, self._has_trained or result.has_completed_step

    def _retry_with_smaller_batch(self, note: RestartNote, result: AttemptResult) -> bool:
        if self._halvings == MAX_HALVINGS:
            log(
                f"out of memory in step {note.step} after {MAX_HALVINGS} halvings; use "
                "training.gradient_checkpointing=true, a shorter dataset.max_length or adapter=qlora"
            )
            return False
        self._halvings += 1
        self._settings |= note.format_overrides()
        batch = f"batch_size {note.batch_size}, accumulation {note.gradient_accumulation_steps}"
        reason = f"out of memory in step {note.step}; continued with {batch}"
        checkpoint = self._prepare_next_attempt(result, reason, note.step)
        log(f"out of memory in step {note.step}: resuming from {checkpoint or 'the start'} with {batch}")
        return True

    def _should_restart(self, result: AttemptResult, previous: AttemptResult | None) -> bool:
        if result.code in (EXIT_OK, EXIT_USAGE, *STOP_CODES) or result.failure is None or not self._max_restarts:
            return False
        if result.failure.is_user_error:
            return False  # a restart would fail in the same way
        if result.is_same_failure(previous):
            inspect = f"zerolora inspect {self._run_dir / 'training_config.json'} --step {result.step}"
            log(
                f"not restarted: step {result.step} failed twice in the same way; `{inspect} --ranks {result.ranks}` "
                "shows its samples"
            )
            return False
        if self._restarts == self._max_restarts:
            log(f"not restarted: training.max_restarts={self._max_restarts} has been reached")
            return False
        if result.has_completed_step:
            return True
        excluded = self._exclude(result) if self._exclude is not None and self._has_trained else None
        if excluded is None:
            log("not restarted: no step has completed since the ranks were started")
        else:
            log(f"{excluded} is excluded: it failed again before completing a step")
        return excluded is not None

    def _prepare_next_attempt(self, result: AttemptResult, reason: str, step: int = 0) -> str:
        """Configure the next attempt to resume from this run's newest complete checkpoint.

        Returns the checkpoint's name, or an empty string if the run has none. `step` is the step from a restart
        note, because the heartbeats may not include it.
        """
        checkpoints = list_complete_checkpoints(self._run_dir)
        newest = find_newest_checkpoint(name for name, at in checkpoints.items() if self._before.get(name) != at)
        if result.step or step or self._read_record_mtime() != self._record_before:
            # This run has already moved an earlier run's files aside. Do not delete anything now, even if no checkpoint
            # is visible: network file systems may show new files late.
            self._settings[_OVERWRITE] = "false"
            if newest or not self._resumes:
                self._settings[_RESUME] = "auto"
        record_restart(self._run_dir, Restart(round(time.time(), 3), reason, result.step, newest, result.ranks))
        return newest

    def _read_record_mtime(self) -> int:
        record = self._run_dir / "run.json"
        return record.stat().st_mtime_ns if record.exists() else 0
