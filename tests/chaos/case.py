"""One case: a fault in a phase of a run, and what came of it."""

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import Fault
from tests.chaos.places import Place
from tests.chaos.workplace import Chaos, adapter, damaged, left_behind, start, steps_lost

RESUME = "training.resume_from_checkpoint=auto"


@dataclass
class Result:
    """What came of it."""

    place: str
    fault: str
    phase: str
    happened: bool
    seconds: float | None
    """Until the error was reported."""
    limit: float
    """Within which that must be."""
    told: bool
    """Whether the right thing was, with the right rank and host; true where nothing has to be, and false with a
    traceback of one of the launcher's threads."""
    misnamed: str
    """The line that names a wrong rank."""
    restarts: int
    steps_lost: int
    code: int | None
    by_itself: bool
    """Whether the run came to its end without anybody doing anything."""
    equal: bool
    damaged: list[str]
    left: int
    together: bool = False
    """Whether there were others in the same run."""

    @property
    def is_well(self) -> bool:
        """Whether the report was right and in time, no checkpoint was lost, the adapter and the exit code are right."""
        named = self.happened and self.told and not self.misnamed and (self.seconds or 0.0) <= self.limit
        ended = self.code in (0, 143) if self.fault.startswith("SIGTERM") else self.code is not None
        return named and ended and self.equal and not self.damaged and not self.left


def try_case(folder: Path, fault: Fault, phase: str, place: Place, expected: bytes) -> Result:
    """Run one case, and resume a run that ended."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{place.name} {fault.name} {phase}")
    disk = fault.own_disk(folder, f"{name}-disk", place)
    out = (disk.folder if disk else folder) / name
    try:
        run = fault.begin(folder, out, phase, place, disk)
        when = fault.happen(run)
        return _outcome(fault, phase, run, when, expected)
    finally:
        if disk is not None:
            disk.close()


def _outcome(fault: Fault, phase: str, run: Chaos, when: float | None, expected: bytes) -> Result:
    code = run.end()
    left = len(left_behind(run))
    seconds = None if when is None else fault.detected(run, when)
    broken, by_itself = damaged(run.out), code == 0
    restarts, lost = run.text.count("\nrestart "), steps_lost(run.out)
    (run.folder / f"{run.out.name}.txt").write_text(run.text)
    if not by_itself:
        again = start(run.folder, run.out, RESUME, place=run.place)
        again.end()
        (run.folder / f"{run.out.name}.again.txt").write_text(again.text)
        broken = broken or damaged(run.out)
        lost = max(lost, _made_twice(run, again))
        left += len(left_behind(again))
    return Result(
        place=run.place.name,
        fault=fault.name,
        phase=phase,
        happened=when is not None,
        seconds=None if seconds is None else round(seconds, 1),
        limit=fault.limit(phase),
        told=(seconds is not None or not fault.words(run.place)) and "Exception in thread" not in run.text,
        misnamed=fault.misnamed(run),
        restarts=restarts,
        steps_lost=lost,
        code=code,
        by_itself=by_itself,
        equal=adapter(run.out) == expected,
        damaged=broken,
        left=left,
    )


def _made_twice(run: Chaos, again: Chaos) -> int:
    """Steps that the run made and that were made again when it went on."""
    begun = [line for _, line in again.lines if "resumed from" in line]
    from_step = int(begun[0].rsplit("step ", 1)[1]) if begun else 0
    reached = [int(record["step"]) for record in run.records if "train/loss" in record]
    return max(0, max(reached, default=0) - from_step)
