"""Starts the ranks of a run again when they have failed, from the newest whole checkpoint.

Two reasons, one way. A rank that ran out of memory at ZeRO stage 2 or 3 leaves a note with a smaller micro-batch (at 0
and 1 the ranks see to it themselves, trainer/memory/oom_recovery.py). A rank that died, hung or lost its GPU leaves
none: the run goes on as it was, `training.max_restarts` times at most and only if a step was made since the last start.
What fails twice in the same step in the same way is of the step's data, as a rule, and told instead.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.supervision.failure_report import Fault
from launcher.supervision.stop_signals import STOPPED
from launcher.supervision.terminal import say
from trainer.config.files import UnreadableFile, read_text
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_RESTART, EXIT_USAGE
from trainer.contract.heartbeat import read_heartbeats
from trainer.contract.restart_note import MOST_HALVINGS, RestartNote
from trainer.contract.restart_record import Restart, forget_restarts, newest_checkpoint, note_restart, whole_checkpoints

_RESUME, _OVERWRITE = "training.resume_from_checkpoint", "output.overwrite"


@dataclass(frozen=True)
class Ending:
    """How one start of the ranks has ended."""

    code: int
    fault: Fault | None = None
    """None where none was told: they are done, were stopped, or ask for a smaller micro-batch."""
    ranks: int = 0
    """How many were started."""
    step: int = 0
    """The one in which the rank to blame was; where none is, the furthest."""
    has_gained: bool = False
    """Whether that rank, or any, had made a step."""

    @classmethod
    def of(cls, logs: Path, code: int, fault: Fault | None, ranks: int) -> "Ending":
        """With what the heartbeats tell."""
        found = read_heartbeats(logs)
        blamed = found.get(fault.rank) if fault is not None and fault.rank is not None else None
        beats = [blamed] if blamed is not None else list(found.values())  # others may be a step ahead
        step = max((beat.step for beat in beats), default=0)
        return cls(code, fault, ranks, step, any(beat.has_gained for beat in beats))

    def is_like(self, other: "Ending | None") -> bool:
        """Whether both failed in the same step in the same way."""
        if other is None or self.fault is None or other.fault is None:
            return False
        return self.step > 0 and (self.step, self.fault.status) == (other.step, other.fault.status)


Start = Callable[[Sequence[str]], Ending]
"""From settings, as one types them, to how the ranks that were started with them ended."""


class Restarts:
    """The starts of one run, and what is decided between them."""

    def __init__(
        self,
        run_dir: Path,
        start: Start,
        *,
        most: int,
        resumes: bool,
        leave_out: Callable[[Ending], str | None] | None = None,
        tell_batch: Callable[[int], None] = lambda step: None,
    ) -> None:
        """At `most` so many restarts after failures; `resumes` if the user lets the run go on from a checkpoint.

        `leave_out(ending)` leaves out what failed before it made a step, and names it; without it such a run ends.
        `tell_batch(step)` shows the documents of a step.
        """
        self._run_dir, self._start, self._most, self._tell_batch = run_dir, start, most, tell_batch
        self._leave_out, self._has_trained = leave_out, False
        self._logs = run_dir / "logs"
        self._resumes, self._before, self._record_before = resumes, whole_checkpoints(run_dir), self._record()
        self._foreign = [] if resumes else _unlisted_checkpoints(run_dir)
        self._settings: dict[str, str] = {}
        self._restarts = self._halvings = 0
        RestartNote.take(self._logs)  # left by a run without a launcher
        if not resumes:
            forget_restarts(run_dir)

    def run(self) -> int:
        """Start the ranks until they end well or must not be started again; the exit code."""
        before = None
        while True:
            ending = self._start([f"{name}={value}" for name, value in self._settings.items()])
            note = RestartNote.take(self._logs)
            if ending.code == EXIT_RESTART:
                if note is None or not self._take_smaller(note, ending):
                    return EXIT_FAILED
            elif not self._is_worth_another(ending, before):
                return ending.code
            else:
                assert ending.fault is not None
                self._restarts += 1
                checkpoint = self._go_on(ending, ending.fault.reason)
                say(f"restart {self._restarts} of {self._most}: going on from {checkpoint or 'the start'}")
            before, self._has_trained = ending, self._has_trained or ending.has_gained

    def _take_smaller(self, note: RestartNote, ending: Ending) -> bool:
        """Go on with the smaller micro-batch of a note; False if that was done often enough."""
        if self._halvings == MOST_HALVINGS:
            say(
                f"out of memory in step {note.step} after {MOST_HALVINGS} halvings; use "
                "training.gradient_checkpointing=true, a shorter dataset.max_length or adapter=qlora"
            )
            return False
        self._halvings += 1
        self._settings |= note.settings()
        batch = f"batch_size {note.batch_size}, accumulation {note.gradient_accumulation_steps}"
        checkpoint = self._go_on(ending, f"out of memory in step {note.step}; went on with {batch}", note)
        say(f"out of memory in step {note.step}: going on from {checkpoint or 'the start'} with {batch}")
        return True

    def _is_worth_another(self, ending: Ending, before: Ending | None) -> bool:
        """Whether another start may get past what failed; if not, says why."""
        if ending.code in (EXIT_OK, EXIT_USAGE, *STOPPED) or ending.fault is None or not self._most:
            return False
        if ending.fault.is_answer:
            return False  # its own line says what to change
        if ending.is_like(before):
            say(f"not started again: step {ending.step} has failed twice in the same way; it trains on")
            self._tell_batch(ending.step)
            return False
        if self._restarts == self._most:
            say(f"not started again: training.max_restarts={self._most} is used up")
            return False
        return ending.has_gained or self._goes_on_without(ending)

    def _goes_on_without(self, ending: Ending) -> bool:
        """Whether a place can be left out: it failed before it made a step, in a run that has made some."""
        left_out = self._leave_out(ending) if self._leave_out is not None and self._has_trained else None
        if left_out is None:
            say("not started again: no step was made since the ranks were started")
        else:
            say(f"{left_out} is left out: it failed again before a step was made")
        return left_out is not None

    def _go_on(self, ending: Ending, reason: str, note: RestartNote | None = None) -> str:
        """Let the next start begin at the newest whole checkpoint of this run; its name, empty for the start."""
        newest = self._newest()
        if ending.step or (note is not None and note.step) or self._record() != self._record_before:
            # What an earlier run left behind has made way when this one wrote for the first time. Also where no
            # checkpoint is seen nothing is deleted: a network file system shows this host a new one late.
            self._settings[_OVERWRITE] = "false"
            if newest or not self._resumes:
                self._settings[_RESUME] = "auto"
            if not newest and any(path.exists() for path in self._foreign):
                self._settings |= {_RESUME: "null", _OVERWRITE: "true"}  # none for a run that is to start over
        note_restart(self._run_dir, Restart(round(time.time(), 3), reason, ending.step, newest, ending.ranks, note))
        return newest

    def _newest(self) -> str:
        """The newest whole checkpoint that was written since; empty if there is none."""
        now = whole_checkpoints(self._run_dir)
        return newest_checkpoint(name for name, written in now.items() if self._before.get(name) != written)

    def _record(self) -> int:
        """When the run's record was written: a start writes it first of all."""
        record = self._run_dir / "run.json"
        return record.stat().st_mtime_ns if record.exists() else 0


def _unlisted_checkpoints(run_dir: Path) -> list[Path]:
    """Those that `output.overwrite: delete` leaves where they are: they are not on the earlier run's list."""
    try:
        listed = read_text(run_dir / "written.txt").split("\n")
    except (FileNotFoundError, UnreadableFile):
        return []  # without a list everything is moved aside
    return [path for path in run_dir.glob("checkpoint-*") if path.name not in listed]
