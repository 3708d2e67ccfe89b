"""`python -m tests.chaos [FOLDER] [--place WORDS] [--only WORDS] [--part] [--series N] [--page]`: faults by phase.

Every case is a real run of two ranks, on CPUs or GPUs, into which one fault is put. What is recorded: seconds until
the error was reported, whether the right rank and host were named, steps that were made twice, checkpoints lost or
damaged, processes left behind, and whether the adapter is, to the bit, that of a run without a fault: by itself, or
where the run ended, when the same command resumes it. Faults that a run is to go through undisturbed share one. A case
that is in the records of FOLDER and went as it should is not run again: an interrupted command continues where it
was. `--series` kills a rank N times in one run. A FOLDER without records begins with the published ones,
docs/lab/data/faults; they and the page, docs/lab/faults.md, are written from it. `--again` tries all cases anew.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from tests.chaos.case import Result, try_case
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.page import PUBLISHED, RECORDS, copy_records, publish, read_records
from tests.chaos.places import HERE, PLACES, OnGpus, Place, open_place
from tests.chaos.series import run_series
from tests.chaos.together import try_together
from tests.chaos.workplace import adapter, commit, prepare, start

# Some eight minutes on two cores, one of each kind: a rank that dies, stands still, raises or has lost its numbers, a
# stop, a launcher that was killed, what happens to files and disks, and what a run does not notice.
PART = (
    ("SIGKILL of rank 1", "step"),
    ("SIGSTOP of rank 1", "step"),
    ("NaN in a loss", "step"),
    ("SIGTERM", "step"),
    ("checkpoint with a flipped bit, rank killed", "step"),
    ("clock 2 h ahead", "step"),
    ("SIGKILL of rank 0", "save"),
    ("rank that hangs", "save"),
    ("disk full", "save"),
    ("disk read-only", "save"),
    ("file server gone", "save"),
    ("SIGSTOP of rank 0", "load"),
    ("SIGKILL of the launcher", "load"),
    ("loader that raises", "data"),
    ("exception in rank 1", "evaluate"),
    ("two runs in one folder", "evaluate"),
    ("SIGTERM twice at once", "end"),
    ("exception in rank 1", "first step"),
    ("SIGKILL of rank 1", "tokenise"),
    ("rank stopped before its first heartbeat", "begin"),
)
ORDER = ("step", "save", "load", "data", "evaluate", "end", "first step", "tokenise", "begin")
_WRITING = threading.Lock()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a case went otherwise than it should."""
    arguments = _parse(argv)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    until = time.monotonic() + 60.0 * arguments.minutes
    if not (arguments.part or (folder / RECORDS).exists()):
        copy_records(PUBLISHED, folder)
    if arguments.page:
        publish(folder)
        return 0
    prepare(folder)
    if arguments.series:
        return 0 if run_series(folder, arguments.series, until) else 1
    well = all([_run_all(name, arguments, folder, until) for name in _places(arguments.place)])
    if not arguments.part:
        publish(folder)
    return 0 if well else 1


def part() -> list[tuple[str, str]]:
    """The cases of `--part`: only with root and bindfs those that need a disk of their own, which is mounted."""
    mounted = {fault.name for fault in FAULTS if fault.disk is not None}
    mounts = os.geteuid() == 0 and shutil.which("bindfs") is not None
    return [case for case in PART if mounts or case[0] not in mounted]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("folder", nargs="?", type=Path, help="where the runs and their records lie")
    parser.add_argument(
        "--place", default="", help="only the place with this in its name: this machine, two GPUs, ssh, SLURM"
    )
    parser.add_argument("--only", default="", help="only cases in which `name, phase` matches this regular expression")
    parser.add_argument("--again", action="store_true", help="also those that went as they should before")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="concurrent cases of this machine")
    parser.add_argument("--part", action="store_true", help="8 minutes: one fault of each kind on this machine")
    parser.add_argument("--series", type=int, default=0, metavar="N", help="N kills in one run, and no other case")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case, and kill no more, after so many")
    parser.add_argument("--page", action="store_true", help="only write the page from the records")
    return parser.parse_args(argv)


def _places(words: str) -> list[str]:
    """Return the places with the words in their names; GPUs if there are two, or if they are requested."""
    chosen = [name for name in PLACES if words in name]
    return [name for name in chosen if name != OnGpus.name or words or torch.cuda.device_count() > 1]


def _run_all(name: str, arguments: argparse.Namespace, folder: Path, until: float) -> bool:
    """Every chosen case of a place; whether all went as they should."""
    cases = _chosen(name, arguments, folder)
    if not cases:
        return True
    with ExitStack() as stack:
        place = open_place(name, stack)
        calm = folder / f"calm-{name.replace(' ', '-')}"
        if adapter(calm) is None:
            run = start(folder, calm, place=place)
            assert run.end() == 0, run.text
        expected = adapter(calm)
        assert expected is not None
        well = True
        passing = [case for case in cases if case[0].passes]
        if len(passing) > 1 and time.monotonic() < until:
            found = try_together(folder, passing, place, expected)
            for result in found:
                _note(folder, result)
            well = all(result.is_well for result in found)
            cases = [case for case in cases if case not in passing]
        try_one = partial(_try, folder, place, expected, until)
        with ThreadPoolExecutor(arguments.parallel if name in HERE else 1) as pool:
            return all([well, *pool.map(try_one, cases)])


def _try(folder: Path, place: Place, expected: bytes, until: float, case: tuple[Fault, str]) -> bool:
    fault, phase = case
    if time.monotonic() > until:
        return True
    try:
        result = try_case(folder, fault, phase, place, expected)
    except Exception:  # a case may fail anywhere; record it and continue with the others
        traceback.print_exc()
        return False
    _note(folder, result)
    return result.is_well


def _note(folder: Path, result: Result) -> None:
    record = asdict(result) | {"well": result.is_well, "commit": commit(), "at": round(time.time())}
    with _WRITING, (folder / RECORDS).open("a") as file:
        file.write(json.dumps(record) + "\n")
    print("ok  " if result.is_well else "BAD ", result, flush=True)


def _chosen(place: str, arguments: argparse.Namespace, folder: Path) -> list[tuple[Fault, str]]:
    """The cases of a place that are to be run, phase by phase, so that soon there is one of each fault."""
    cases = [(fault, phase) for fault in FAULTS if place in fault.places for phase in fault.phases_at(place)]
    cases.sort(key=lambda case: ORDER.index(case[1]))
    if arguments.part:
        return [case for case in cases if place == PLACES[0] and (case[0].name, case[1]) in part()]
    done = {(record["place"], record["fault"], record["phase"]) for record in read_records(folder) if record["well"]}
    return [
        (fault, phase)
        for fault, phase in cases
        if re.search(arguments.only, f"{fault.name}, {phase}")
        and (arguments.again or (place, fault.name, phase) not in done)
    ]


if __name__ == "__main__":
    sys.exit(main())
