"""The last table of gpu_performance.sh: each figure next to the best other trainer and its goal.

python -m tests.bench.performance_table MODE FOLDER     MODE: figures, scaling, profile or curve
"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# case -> tokens/s/GPU aimed at and largest peak GiB, on an H200 with the shape of Llama-3.1-8B
FIGURES = {
    "bf16": (18_500, 45.0),
    "bf16-recompute-offload": (13_000, 17.5),
    "nf4": (17_500, 36.0),
    "nf4-recompute-offload": (12_300, 8.2),
}
MUST = 1.07  # times Unsloth
SCALING_MUST, SCALING_AIM = 0.97, 0.99
ZERO3_MUST, ZERO3_AIM = 0.75, 0.85
Record = dict[str, Any]


def load(folder: Path, mode: str) -> dict[str, Record]:
    """The JSON of every `zerolora bench` of a mode by its name."""
    return {path.stem.removeprefix(f"{mode}-"): json.loads(path.read_text()) for path in folder.glob(f"{mode}-*.json")}


def rate(record: Record | None, case: str, stack: str = "zerolora") -> float | None:
    """Tokens a second and GPU of one measurement, if it was made."""
    results = record["results"] if record else []
    rates = (one["tokens_per_second_per_gpu"] for one in results if (one["case"], one["stack"]) == (case, stack))
    return next(rates, None)


def peak(record: Record, case: str) -> float | None:
    """GiB of zerolora's run of a case; None on a CPU."""
    peaks: list[float | None] = [
        one["peak_gib"] for one in record["results"] if (one["case"], one["stack"]) == (case, "zerolora")
    ]
    return peaks[0]


def figures(records: dict[str, Record]) -> Table:
    """One GPU: ratios to each other trainer, and whether rate and peak are reached."""
    ratios = ("x Unsloth", "x DeepSpeed", "x PEFT+Liger")
    table = table_of("case", "zerolora", *ratios, "must", "aim", "peak GiB", "verdict")
    merged: Record = {"results": [one for record in records.values() for one in record["results"]]}
    for case, (aim, limit) in FIGURES.items():
        ours = rate(merged, case)
        if ours is None:
            if any(one["case"] == case for one in merged["results"]):
                table.add_row(case, "not measured")
            continue
        others = [rate(merged, case, stack) for stack in ("unsloth", "deepspeed", "peft-liger")]
        over = [f"{ours / other:.3f}" if other else "-" for other in others]
        used = peak(merged, case)
        reached = others[0] is not None and ours >= MUST * others[0]
        rated = "aim" if ours >= aim else "must" if reached else "below" if others[0] else "no Unsloth"
        fits = "" if used is None or used <= limit else f", peak above {limit}"
        size = f"{used:.1f}" if used is not None else "-"
        table.add_row(case, f"{ours:,.0f}", *over, f"{MUST}", f"{aim:,}", size, rated + fits)
    return table


def scaling(records: dict[str, Record]) -> Table:
    """Several GPUs: per GPU against one, and ZeRO-3 against ZeRO-2 on as many."""
    table = table_of("GPUs, stage", "case", "tokens/s/GPU", "against", "ratio", "must", "aim")
    for name in sorted(records):
        count, _, stage = name.partition("-")
        for case in ("bf16", "nf4"):
            stack = "deepspeed" if "deepspeed" in stage else "zerolora"
            ours = rate(records[name], case, stack)
            if ours is None:
                continue
            base = f"{count}-{stage.replace('zero3', 'zero2')}" if stage.endswith("zero3") else "1-zero2"
            other = rate(records.get(base), case, stack)
            must, aim = (ZERO3_MUST, ZERO3_AIM) if stage.endswith("zero3") else (SCALING_MUST, SCALING_AIM)
            goals = (f"{must}", f"{aim}") if stack == "zerolora" and base != name else ("", "")
            ratio = f"{ours / other:.3f}" if other and base != name else "-"
            table.add_row(name, case, f"{ours:,.0f}", base if base != name else "-", ratio, *goals)
    return table


def profile(records: dict[str, Record]) -> Table:
    """One GPU: the gap to the floor by category, a column a case."""
    profiles: Record = {}
    for record in records.values():
        profiles |= record["profiles"]
    table = table_of("gap to the floor, ms", *profiles)
    categories = next(iter(profiles.values()))["by_category_ms"] if profiles else {}
    for category in categories:
        gaps = [
            f"{one['by_category_ms'][category] - (one['floor_ms'] or {}).get(category, 0.0):+.1f}"
            for one in profiles.values()
        ]
        table.add_row(category, *gaps)
    return table


def curve(records: dict[str, Record]) -> Table:
    """One GPU: memory saved and time paid, against neither recomputation nor 8-bit AdamW."""
    table = table_of("run", "case", "tokens/s/GPU", "time", "peak GiB", "memory")
    base = records.get("bf16")
    base_rate = rate(base, "bf16")
    for name, record in records.items():
        for one in record["results"]:
            ours = one["tokens_per_second_per_gpu"]
            if ours and base is not None and base_rate:
                used, whole = one["peak_gib"], peak(base, "bf16")
                memory = (f"{used:.2f}", f"{used / whole - 1:+.1%}") if used and whole else ("-", "-")
                table.add_row(name, one["case"], f"{ours:,.0f}", f"{base_rate / ours - 1:+.1%}", *memory)
    return table


def table_of(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def main() -> int:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    records = load(folder, mode)
    makers = {"figures": figures, "scaling": scaling, "profile": profile, "curve": curve}
    Console(width=140).print(makers[mode](records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
