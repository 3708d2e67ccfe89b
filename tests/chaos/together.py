"""Faults that a run is to go through undisturbed, all of them in one run: each in its phase, one after the other."""

import time
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path

from tests.chaos.case import Result
from tests.chaos.faults import CALL, Fault, clock_variables
from tests.chaos.places import HERE, Place
from tests.chaos.workplace import PATIENCE_S, Chaos, adapter, damaged, left_behind, start

# Where there are several calls each fault has one of its own, as far as they go.
CALLS = {"step": (12, 16, 20, 24, 28), "evaluate": (2, 3, 4), "save": (2, 4, 6, 8)}
# Ranks wait in their calls for longer than a run would let them.
SETTINGS = ("training.hang_timeout=10",)
Plan = Mapping[tuple[str, int], list[Fault]]
"""By phase and call."""


def try_together(folder: Path, cases: Iterable[tuple[Fault, str]], place: Place, expected: bytes) -> list[Result]:
    """Run the cases, and what came of each: as it should if the run came to its end as if nothing had been."""
    plan = _plan(cases)
    faults = [fault for group in plan.values() for fault in group]
    name = f"{place.name.replace(' ', '-')}-together"
    disk = next((fault.own_disk(folder, f"{name}-disk", place) for fault in faults if fault.disk is not None), None)
    out = (disk.folder if disk else folder) / name
    variables = clock_variables(folder, out) if any(fault.clock for fault in faults) else {}
    try:
        words = [_mischief(phase, call, place) for phase, call in plan]
        settings = (*SETTINGS, f"dataset.cache_dir={out}-cache")
        run = start(folder, out, *settings, mischief=";".join(words), place=place, disk=disk, **variables)
        happened = _happen(run, plan)
        code, left = run.end(), len(left_behind(run))
        (folder / f"{name}.txt").write_text(run.text)
        restarts, equal = run.text.count("\nrestart "), adapter(out) == expected
        clean = (code, restarts, damaged(out), left)
    finally:
        if disk is not None:
            disk.close()
    return [
        _result(run, fault, phase, happened.get((fault.name, phase)), clean, equal)
        for (phase, _), group in plan.items()
        for fault in group
    ]


def _plan(cases: Iterable[tuple[Fault, str]]) -> Plan:
    plan: dict[tuple[str, int], list[Fault]] = {}
    calls = {phase: cycle(CALLS.get(phase, (CALL[phase],))) for phase in CALL}
    for fault, phase in cases:
        plan.setdefault((phase, next(calls[phase])), []).append(fault)
    return plan


def _mischief(phase: str, call: int, place: Place) -> str:
    rank = "1"
    if phase in ("tokenise", "end"):
        rank = "" if phase == "tokenise" and place.name not in HERE else "0"
    return f"{rank}:call@{'step' if phase == 'first step' else phase}:{call}"


def _happen(run: Chaos, plan: Plan) -> dict[tuple[str, str], float]:
    """Let each happen when its rank calls; when it did. With one plan alone the file of its mischief has no number."""
    pending = dict(enumerate(plan.items()))
    happened: dict[tuple[str, str], float] = {}
    deadline = time.monotonic() + 2.0 * PATIENCE_S
    while pending and run.process.poll() is None and time.monotonic() < deadline:
        for number in [number for number in pending if run.has_called(number if len(plan) > 1 else None)]:
            (phase, _), faults = pending.pop(number)
            run.answers = number if len(plan) > 1 else None
            for fault in faults:
                run.holds = fault is not faults[-1]
                happened[fault.name, phase] = time.time()
                assert fault.outside is not None
                fault.outside(run)
            run.heard()
        time.sleep(0.05)
    return happened


def _result(
    run: Chaos, fault: Fault, phase: str, when: float | None, clean: tuple[int | None, int, list[str], int], equal: bool
) -> Result:
    code, restarts, broken, left = clean
    seconds = None if when is None else fault.detected(run, when)
    return Result(
        place=run.place.name,
        fault=fault.name,
        phase=phase,
        happened=when is not None,
        seconds=None if seconds is None else round(seconds, 1),
        limit=fault.limit(phase),
        told=seconds is not None or not fault.words(run.place),
        misnamed="",
        restarts=restarts,
        steps_lost=0,
        code=code,
        by_itself=code == 0 and not restarts,
        equal=equal,
        damaged=broken,
        left=left,
        together=True,
    )
