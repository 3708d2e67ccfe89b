"""docs/lab/faults.md, from the records of the cases."""

import json
import os
import platform
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "faults.md"
HEAD = """\
# Faults, and what becomes of a run

Made by `python -m tests.chaos`: every line is a real run of two CPU ranks (16 steps, a checkpoint every 4, an
evaluation every 6) into which one thing was put that goes wrong. *Told* is the time until the user's terminal says so,
with the right rank and host where a rank is to blame. *Steps lost* were made twice. *Adapter* says whether the final
one is, to the bit, that of the run without a fault. Where a run ends, because nothing was trained yet or somebody ended
it, the same command with `training.resume_from_checkpoint=auto` has gone on, and its adapter is compared.

"""
NOT_RUN = """
## Not injected here

- GPU faults (Xid, ECC, a card that falls off the bus, CUDA out of memory): they need a card; out of memory is in
  `tests/gpu/test_oom.py`, on CPU ranks in `tests/distributed/test_oom.py`.
- A host that loses power or its network, and a SLURM node that is lost: `tests/cluster` does it with hosts in network
  namespaces and real daemons; their seconds are not in this table yet.
- The kernel's out-of-memory killer: `tests/cluster/test_ends.py`, in a memory cgroup.
- A file server that is gone.
"""


def page(folder: Path) -> str:
    """The whole page; the last record of a case counts."""
    lines = (folder / "results.jsonl").read_text().splitlines() if (folder / "results.jsonl").is_file() else []
    latest = {(record["fault"], record["phase"]): record for record in map(json.loads, lines)}
    rows = [_row(record) for record in latest.values()]
    well = sum(_is_well(record) for record in latest.values())
    table = [
        "| fault | phase | told after | restarts | steps lost | ended | adapter | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    counted = (
        f"{len(latest)} cases, {well} as they should be; "
        f"{sum(bool(record['damaged']) for record in latest.values())} with a checkpoint lost or damaged, "
        f"{sum(not record['told'] for record in latest.values())} with a wrong name or none, "
        f"{sum(record['code'] is None for record in latest.values())} that did not end, "
        f"{sum(record['left'] > 0 for record in latest.values())} that left a process behind. "
        f"Machine: {_machine()}, shared with other work, so the seconds are upper bounds.\n\n"
    )
    return HEAD + counted + "\n".join([*table, *rows]) + "\n" + _series(folder) + _missing(set(latest)) + NOT_RUN


def _missing(tried: set[tuple[str, str]]) -> str:
    """Cases that `python -m tests.chaos` has and the records have not."""
    cases = [(fault.name, phase) for fault in FAULTS for phase in fault.phases]
    missing = [f"{name} ({phase})" for name, phase in cases if (name, phase) not in tried]
    return f"\n## Not run yet\n\n{'; '.join(missing)}.\n" if missing else ""


def _row(record: dict[str, Any]) -> str:
    told = "—" if record["seconds"] is None else f"{record['seconds']:g} s"
    ended = "by itself" if record["by_itself"] else f"with {record['code']}, went on when told"
    equal = "equal" if record["equal"] else "DIFFERENT"
    verdict = "" if _is_well(record) else "not as it should be"
    words = (record["fault"], record["phase"], told, record["restarts"], record["steps_lost"], ended, equal, verdict)
    return f"| {' | '.join(map(str, words))} |"


def _is_well(record: dict[str, Any]) -> bool:
    clean = not record["damaged"] and not record["left"]
    return bool(record["told"] and record["code"] is not None and record["equal"] and clean)


def _series(folder: Path) -> str:
    file = folder / "series.json"
    if not file.is_file():
        return ""
    series = json.loads(file.read_text())
    equal = "equal to those of" if series["losses_equal"] else "DIFFERENT from those of"
    adapter = "equal" if series["adapter_equal"] else "DIFFERENT"
    return (
        "\n## A series of kills\n\n"
        f"One run, `training.max_restarts: 200`, rank 1 killed {series['kills']} times, each 1 to 5 s after the first "
        f"new step (`python -m tests.chaos --series N`): {series['restarts']} restarts, {series['steps']} steps, "
        f"{series['steps_lost']} of them made again; exit code {series['code']}; the losses of all steps are, to the "
        f"bit, {equal} the undisturbed run, the adapter {adapter}; {len(series['damaged'])} checkpoints damaged.\n\n"
        f"Losses, every {max(1, series['steps'] // 40)} steps: "
        + ", ".join(f"{loss:.3f}" for loss in series["losses"])
        + ".\n"
    )


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"
