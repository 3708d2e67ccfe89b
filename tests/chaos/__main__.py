"""`python -m tests.chaos [FOLDER] [--only WORDS] [--part] [--series N] [--page]`: faults by phases, and their ends.

Every case is a real run of two CPU ranks into which one fault is put. What is recorded: seconds until the user was
told, whether the right rank and host were named, steps that were made twice, checkpoints lost or damaged, processes
left behind, and whether the adapter is, to the bit, that of a run without a fault: by itself, or where the run ended,
when the same command goes on. `--series` kills a rank N times in one run. The page, docs/lab/faults.md, is written
from the records.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.faults import FAULTS, Fault, give_back, own_disk
from tests.chaos.page import PAGE, page
from tests.chaos.series import run_series
from tests.chaos.workplace import Chaos, adapter, damaged, left_behind, prepare, start, steps_lost

# One of each kind of ending: by itself, named and not started again, and a disk.
PART = (("SIGKILL of a rank", "step"), ("SIGTERM", "step"), ("disk full", "save"))
RESUME = "training.resume_from_checkpoint=auto"


@dataclass
class Result:
    """One case."""

    fault: str
    phase: str
    seconds: float | None
    """Until the user was told."""
    told: bool
    """Whether the right thing was, with the right rank and host; true where nothing has to be."""
    restarts: int
    steps_lost: int
    code: int | None
    by_itself: bool
    """Whether the run came to its end without anybody doing anything."""
    equal: bool
    damaged: list[str]
    left: int

    @property
    def is_well(self) -> bool:
        """No wrong name, no hang, no checkpoint lost, the same adapter."""
        return self.told and self.code is not None and self.equal and not self.damaged and not self.left


def try_case(folder: Path, fault: Fault, phase: str, expected: bytes) -> Result:
    """Run one case, and let what ended go on."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{fault.name} {phase}")
    disk = own_disk(folder / f"{name}-disk") if fault.on_own_disk else None
    out = (disk or folder) / name
    try:
        run = fault.begin(folder, out, phase)
        when = fault.happen(run)
        return _outcome(folder, fault, phase, run, when, expected)
    finally:
        if disk is not None:
            give_back(disk)


def _outcome(folder: Path, fault: Fault, phase: str, run: Chaos, when: float, expected: bytes) -> Result:
    code = run.end()
    if code == -9:  # the launcher was killed: what it had started needs a moment to notice
        time.sleep(5.0)
    seconds = fault.detected(run, when)
    broken, left, by_itself = damaged(run.out), left_behind(run.out), code == 0
    restarts, lost = run.text.count("\nrestart "), steps_lost(run.out)
    (folder / f"{run.out.name}.txt").write_text(run.text)
    if not by_itself:
        again = start(folder, run.out, RESUME)
        again.end()
        broken = broken or damaged(run.out)
        lost = max(lost, _made_twice(run, again))
    told = seconds is not None or not fault.told
    return Result(
        fault.name, phase, None if seconds is None else round(seconds, 1), told, restarts, lost, code, by_itself,
        adapter(run.out) == expected, broken, len(left),
    )  # fmt: skip


def _made_twice(run: Chaos, again: Chaos) -> int:
    """Steps that the run made and that were made again when it went on."""
    begun = [line for _, line in again.lines if "resumed from" in line]
    from_step = int(begun[0].rsplit("step ", 1)[1]) if begun else 0
    reached = [int(record["step"]) for record in run.records if "train/loss" in record]
    return max(0, max(reached, default=0) - from_step)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a case went otherwise than it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("folder", nargs="?", type=Path, help="where the runs and their records lie")
    parser.add_argument("--only", default="", help="cases whose name or phase holds this")
    parser.add_argument("--part", action="store_true", help="a few minutes: one case of each kind")
    parser.add_argument("--series", type=int, default=0, metavar="N", help="N kills in one run, and no other case")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case, and kill no more, after so many")
    parser.add_argument("--page", action="store_true", help="only write the page from the records")
    arguments = parser.parse_args(argv)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    records, until = folder / "results.jsonl", time.monotonic() + 60.0 * arguments.minutes
    if arguments.page:
        PAGE.write_text(page(folder))
        return 0
    prepare(folder)
    if arguments.series:
        return 0 if run_series(folder, arguments.series, until) else 1
    calm = start(folder, folder / "calm")
    assert calm.end() == 0, calm.text
    expected = adapter(folder / "calm")
    assert expected is not None
    well = True
    for fault, phase in _chosen(arguments):
        if time.monotonic() > until:
            break
        result = try_case(folder, fault, phase, expected)
        well &= result.is_well
        with records.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print("ok  " if result.is_well else "BAD ", result, flush=True)
    if not arguments.part:
        PAGE.write_text(page(folder))
    return 0 if well else 1


def _chosen(arguments: argparse.Namespace) -> list[tuple[Fault, str]]:
    cases = [(fault, phase) for fault in FAULTS for phase in fault.phases]
    if arguments.part:
        return [case for case in cases if (case[0].name, case[1]) in PART]
    return [case for case in cases if arguments.only in f"{case[0].name} {case[1]}"]


if __name__ == "__main__":
    sys.exit(main())
