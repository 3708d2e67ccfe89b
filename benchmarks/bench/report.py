"""Output of `zerolora bench`: one table of all measurements, and the time of a step by category."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

PRODUCT = "zerolora"
LABELS = {
    PRODUCT: "zerolora",
    "peft": "PEFT",
    "peft-liger": "PEFT + Liger",
    "deepspeed": "DeepSpeed + PEFT",
    "unsloth": "Unsloth",
    "axolotl": "Axolotl",
}
MFU_FORMULA = (
    "model FLOPs of the step / seconds / dense peak of the card; 4 per frozen and 6 per adapter weight and token, "
    "6 L^2 x width per document and attention layer (causal); recomputation is not counted"
)


@dataclass
class Measurement:
    """One stack on one case; `note` explains a missing measurement, `error` a failed one."""

    case: str
    stack: str
    step_ms: list[float] = field(default_factory=list)
    tokens: float = 0.0
    """Tokens of one GPU in one step."""
    peak_gib: float | None = None
    mfu: float | None = None
    note: str = ""
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_records(cls, case: str, records: Sequence[dict[str, Any]], versions: dict[str, str]) -> "Measurement":
        """Build it from the records of the measured training steps; having none is an error."""
        if not records:
            return cls(case, PRODUCT, error="the run recorded no step after the warm-up")
        step_ms = [record["perf/step_ms"] for record in records]
        tokens = records[0]["perf/tokens_per_second_per_gpu"] * step_ms[0] / 1e3
        utilisation = [record["perf/mfu"] for record in records if record.get("perf/mfu")]
        return cls(
            case,
            PRODUCT,
            step_ms=step_ms,
            tokens=round(tokens, 3),
            peak_gib=max(record["memory/peak_gib"] for record in records),
            mfu=statistics.median(utilisation) if utilisation else None,
            versions=versions,
        )

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def rate(self) -> float | None:
        """Tokens per second and GPU; None if nothing was measured."""
        return self.tokens / self.median_ms * 1e3 if self.step_ms else None

    def as_json(self) -> dict[str, Any]:
        """Return all fields with the derived figures."""
        derived = {"tokens_per_second_per_gpu": self.rate, "median_ms": self.median_ms if self.step_ms else None}
        return asdict(self) | derived


def set_peers_mfu(results: Sequence[Measurement]) -> None:
    """Set the peers' MFU from their rate: a step has the model FLOPs of the product's on the same case."""
    for result in results:
        product = find_product(result.case, results)
        if result.mfu is None and result.rate and product is not None and product.mfu and product.rate:
            result.mfu = product.mfu * result.rate / product.rate


def find_product(case: str, results: Sequence[Measurement]) -> Measurement | None:
    return next((one for one in results if one.case == case and one.stack == PRODUCT and one.step_ms), None)


def build_result_table(results: Sequence[Measurement]) -> Table:
    """Build a table with one line per measurement, in order; `zerolora x` is the product's rate over the line's."""
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "stack"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s/GPU", "step ms", "min to max", "MFU", "peak GiB", "zerolora x"):
        table.add_column(heading, justify="right", no_wrap=True)
    order = list(dict.fromkeys(result.case for result in results))
    for result in sorted(results, key=lambda one: order.index(one.case)):
        if not result.step_ms:
            continue
        product = find_product(result.case, results)
        over = product.rate / result.rate if product and product.rate and result.rate else None
        table.add_row(
            result.case,
            LABELS[result.stack] + (" + Liger" if _adds_liger(result) else ""),
            f"{result.rate:,.0f}",
            f"{result.median_ms:,.1f}",
            f"{min(result.step_ms):,.1f} to {max(result.step_ms):,.1f}",
            f"{result.mfu:.1%}" if result.mfu else "-",
            f"{result.peak_gib:.1f}" if result.peak_gib is not None else "-",
            f"{over:.2f}" if over else "-",
        )
    return table


def list_failures(results: Sequence[Measurement]) -> list[str]:
    """Return a line for each stack, and each of its failed cases, without a figure."""
    lines = [
        f"{result.case}: {LABELS[result.stack]} {result.error}"
        if result.error
        else f"{LABELS[result.stack]}: {result.note}"
        for result in results
        if not result.step_ms
    ]
    return list(dict.fromkeys(lines))


def _adds_liger(result: Measurement) -> bool:
    return result.stack == "deepspeed" and "liger-kernel" in result.versions


def build_profile_table(profile: dict[str, Any]) -> Table:
    """Build a table of the milliseconds of a step by category, those of the floor, and the gap between them."""
    floor = profile["floor_ms"] or {}
    table = Table(box=None, pad_edge=False)
    table.add_column("category", no_wrap=True)
    for heading in ("ms", "share", "floor ms", "gap ms"):
        table.add_column(heading, justify="right")
    for category, milliseconds in profile["by_category_ms"].items():
        least = floor.get(category, 0.0)
        fraction = milliseconds / profile["step_ms"]
        gap = f"{milliseconds - least:+.1f}" if floor else "-"
        table.add_row(category, f"{milliseconds:.1f}", f"{fraction:.1%}", f"{least:.1f}" if least else "", gap)
    whole = sum(floor.values())
    gap = f"{profile['step_ms'] - whole:+.1f}" if floor else "-"
    table.add_row("step", f"{profile['step_ms']:.1f}", "", f"{whole:.1f}" if floor else "", gap)
    return table
