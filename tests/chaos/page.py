"""docs/lab/faults.md, from the records of the cases."""

import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.curve import draw_losses
from tests.chaos.faults import FAULTS, MARGIN_S, START_S
from tests.chaos.places import PLACES, Local, OnGpus, ThroughSlurm, ThroughSsh
from tests.chaos.workplace import HANG_MINUTES

LAB = Path(__file__).parents[2] / "docs" / "lab"
PAGE, PUBLISHED, IMAGES = LAB / "faults.md", LAB / "data" / "faults", LAB / "images"
RECORDS, SERIES = "results.jsonl", "series*.json"
HEAD = """\
# Faults, and what becomes of a run

Made by `python -m tests.chaos`: every line is a fault in a real run of two ranks, on CPUs or GPUs (16 steps, a
checkpoint every 4, an evaluation every 6). *Reported after* is the time until the user's terminal says so, with the
right rank and host where a rank is to blame. *Steps lost* were made twice. *Adapter* says whether the final one is,
to the bit, that of the run without a fault. Where a run ends, because nothing was trained yet, somebody ended it, or
its message says what to change, the same command with `training.resume_from_checkpoint=auto` continued it, and its
adapter is compared. Faults that a run is to go through undisturbed were put into one run, one after the other.

"""
COLUMNS = (
    "| fault | phase | reported after | restarts | steps lost | ended | adapter | commit | |",
    "|---|---|---|---|---|---|---|---|---|",
)
TITLES = {
    Local.name: "Two ranks of this machine",
    OnGpus.name: "Two ranks of one machine, each on an H100 or H200 (torch 2.11.0+cu130)",
    ThroughSsh.name: "A rank on each of two hosts, by ssh",
    ThroughSlurm.name: "A rank on each of two nodes, under SLURM",
}
NOT_RUN = """
## Not injected here

- Faults of a card itself (Xid, ECC, a card that falls off the bus) cannot be made here. `training.on_oom: halve`, by
  which a run continues after a card is out of memory, is in `tests/gpu/test_oom.py` and
  `tests/distributed/test_oom.py`.
- Not every fault is tried at every place (`Fault.places` in `tests/chaos/faults.py`): a file server that is mute for
  longer than the timeout, clocks and memory of the host on this machine alone; a file server and a loader that raises
  on no GPUs; damaged checkpoints in steps.
- A file server that was unmounted is mounted again 10 s after the run has reported it, a disk that is full or read-only
  is repaired at once.
- Where several faults share a run, or two runs a folder, `training.hang_timeout` was 10 and 5 minutes: ranks wait there
  for what is done to them.
- Clocks are moved by a library of our own (`tests/chaos/clock.c`): with libfaketime 0.9.10 time.sleep of Python 3.11
  fails.
- Hosts are network namespaces of one kernel, with real daemons (sshd, slurmctld, slurmd) in them: a kernel that
  crashes, and file systems that hosts see differently, are not among the faults.
"""


def copy_records(source: Path, folder: Path) -> None:
    """What cases and series have left in one folder, into another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (source / RECORDS, *source.glob(SERIES)):
        if file.is_file():
            shutil.copy(file, folder / file.name)


def publish(folder: Path) -> None:
    """Write the page, and its records next to it."""
    PAGE.write_text(page(folder))
    for number, series in enumerate(read_series(folder)):
        if _is_drawn(series):
            draw_losses(series, IMAGES / _image(number))
    copy_records(folder, PUBLISHED)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every case that was run, in the order in which they ended; not as it should be if it was reported too late."""
    file = folder / RECORDS
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [record | {"well": record["well"] and not _is_late(record)} for record in records]


def _is_late(record: Mapping[str, Any]) -> bool:
    """By the limit of today, which early records do not hold."""
    limits = {(fault.name, phase): fault.limit(phase) for fault in FAULTS for phase in fault.phases}
    return float(record["seconds"] or 0.0) > limits[record["fault"], record["phase"]]


def page(folder: Path) -> str:
    """The whole page; the last record of a case counts."""
    records = read_records(folder)
    latest = {(record["place"], record["fault"], record["phase"]): record for record in records}
    series = read_series(folder)
    kills = sum(one["kills"] for one in series)
    # A record without a commit is a first try; only its failure is known.
    happened = kills + sum(record["happened"] for record in records if record["commit"])
    slowest = max(latest.values(), key=lambda record: float(record["seconds"] or 0.0))
    timeout = 60.0 * HANG_MINUTES
    counted = (
        f"{happened} faults were put into runs, {kills} of them in series; "
        f"{len(latest)} cases, {sum(record['well'] for record in latest.values())} as they should be; "
        f"{sum(bool(record['damaged']) for record in latest.values())} with a checkpoint lost or damaged, "
        f"{sum(not record['told'] or bool(record['misnamed']) for record in latest.values())} with a wrong name or "
        f"none, {sum(record['code'] is None for record in latest.values())} that did not end, "
        f"{sum(record['left'] > 0 for record in latest.values())} that left a process behind, all by the last try of "
        f"each case. A hang is recognised after `training.hang_timeout`, here {timeout:.0f} s, three times that until "
        f"the first step is made. It must be reported within that and {MARGIN_S:.0f} s more, any other fault within "
        f"{timeout + MARGIN_S:.0f} s in every phase, and {START_S:.0f} s later where the start of a run reports it: "
        f"{sum(_is_late(record) for record in latest.values())} were reported later. What took longest: "
        f"{_name(slowest)}, {slowest['seconds']:g} s. "
        f"The CPU ranks had {_machine()}, shared with other work, so the seconds are upper bounds.\n"
    )
    tables = [_table(place, [record for key, record in latest.items() if key[0] == place]) for place in PLACES]
    parts = [
        *tables,
        *(_series(number, one) for number, one in enumerate(series)),
        _list_fixed(records),
        _missing(set(latest)),
    ]
    return HEAD + counted + "".join(parts) + NOT_RUN


def _table(place: str, records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return ""
    order = [(fault.name, phase) for fault in FAULTS for phase in fault.phases]
    rows = [_row(record) for record in sorted(records, key=lambda found: order.index((found["fault"], found["phase"])))]
    return "\n".join([f"\n## {TITLES[place]}\n", *COLUMNS, *rows]) + "\n"


def _list_fixed(records: Sequence[Mapping[str, Any]]) -> str:
    """Cases that went otherwise than they should at first, and as they should in the end."""
    last = {_name(record): record for record in records}
    fixed: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        if not record["well"] and last[_name(record)]["well"]:
            fixed.setdefault((record["fault"], record["place"]), {})[record["phase"]] = None
    rows = [f"- {fault}, {place}: {', '.join(phases)}\n" for (fault, place), phases in sorted(fixed.items())]
    return f"\n## As it should be since it was fixed, or tried again\n\n{''.join(rows)}" if rows else ""


def _name(record: Mapping[str, Any]) -> str:
    return f"{record['fault']} ({record['phase']}, {record['place']})"


def _missing(tried: set[tuple[str, str, str]]) -> str:
    """Cases that `python -m tests.chaos` has and the records have not."""
    places = [(fault, place) for fault in FAULTS for place in fault.places]
    cases = [(place, fault.name, phase) for fault, place in places for phase in fault.phases_at(place)]
    missing: dict[tuple[str, str], list[str]] = {}
    for place, name, phase in cases:
        if (place, name, phase) not in tried:
            missing.setdefault((name, place), []).append(phase)
    untouched = [place for place in PLACES if place not in {tried_place for tried_place, _, _ in tried}]
    counts = Counter(place for place, _, _ in cases)
    listed = [
        f'Every case of {place}, {counts[place]} (`python -m tests.chaos --place "{place}"`)' for place in untouched
    ]
    listed += [
        f"{name} ({', '.join(phases)}; {place})" for (name, place), phases in missing.items() if place not in untouched
    ]
    return f"\n## Not run yet\n\n{'; '.join(listed)}.\n" if listed else ""


def _row(record: Mapping[str, Any]) -> str:
    reported = "—" if record["seconds"] is None else f"{record['seconds']:g} s"
    ended = "by itself" if record["by_itself"] else f"with {record['code']}, continued when resumed"
    ended += ", with others in one run" * record.get("together", False)
    equal = "equal" if record["equal"] else "DIFFERENT"
    verdict = "" if record["well"] else ": ".join(filter(None, ("not as it should be", record.get("note"))))
    words = (record["fault"], record["phase"], reported, record["restarts"], record["steps_lost"], ended, equal)
    return f"| {' | '.join(map(str, words))} | {record['commit']} | {verdict} |"


def read_series(folder: Path) -> list[dict[str, Any]]:
    """Every series of kills."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(SERIES))]


def _is_drawn(series: Mapping[str, Any]) -> bool:
    """Early records have some of the losses, which were found equal in all steps."""
    return "undisturbed" in series


def _image(number: int) -> str:
    return f"kills-{number}.png"


def _series(number: int, series: Mapping[str, Any]) -> str:
    equal = "equal to those of" if series["losses_equal"] else "DIFFERENT from those of"
    ended = f"exit code {series['code']}"
    if series["cut"]:
        ended = f"it was stopped then, of {series['kills_meant']} kills, for the time was up"
    if _is_drawn(series):
        losses = f"![Losses of both runs, and where ranks were killed](images/{_image(number)})"
    else:
        shown = ", ".join(f"{loss:.3f}" for loss in series["losses"])
        losses = f"Losses, every {max(1, series['steps'] // 40)} steps: {shown}."
    same = {True: ", the adapter equal", False: ", the adapter DIFFERENT", None: ""}[series["adapter_equal"]]
    return (
        f"\n## {series['kills']} kills in one run\n\n"
        f"One run, `training.max_restarts: 200`, rank 1 killed {series['kills']} times, each 1 to 5 s after the first "
        f"new step (`python -m tests.chaos --series {series['kills_meant']}`; commit {series['commit']}): "
        f"{series['restarts']} restarts, {series['steps']} steps, {series['steps_lost']} of them made again; {ended}; "
        f"the losses of all steps are, to the bit, {equal} the undisturbed run{same}; {len(series['damaged'])} "
        f"checkpoints damaged.\n\n{losses}\n"
    )


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"
