"""Held-out losses of tests/bench/eight_bit.sh quality: `python -m tests.bench.eight_bit_quality FOLDER`.

FOLDER holds KIND-SEED.jsonl, the metrics of each run. A line for each kind of base: the last held-out loss, mean over
seeds, and its difference from bf16 with the same seed, with a 95 % interval by Student's t over the seeds.
"""

import json
import statistics
import sys
from pathlib import Path

KINDS = ("bf16", "fp8", "int8", "nf4", "blocks", "channel")
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


def last_loss(file: Path) -> float:
    """The held-out loss that was measured last."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return float([record["eval/loss"] for record in records if "eval/loss" in record][-1])


def interval(values: list[float]) -> str:
    """`+0.0012 +- 0.0003`, without an interval for one value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:+.4f}"
    return f"{mean:+.4f} +- {T[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5:.4f}"


def main(folder: Path) -> None:
    found = {kind: {file.stem: last_loss(file) for file in sorted(folder.glob(f"{kind}-*.jsonl"))} for kind in KINDS}
    base = {name.removeprefix("bf16-"): loss for name, loss in found["bf16"].items()}
    print(f"{'base':6} {'seeds':>5} {'held-out loss':>14}   against bf16, nats")
    for kind, runs in found.items():
        losses = {name.removeprefix(f"{kind}-"): loss for name, loss in runs.items()}
        differences = [loss - base[seed] for seed, loss in losses.items() if seed in base]
        if differences:
            print(f"{kind:6} {len(losses):5} {statistics.mean(losses.values()):14.4f}   {interval(differences)}")
    both = [name.removeprefix("fp8-") for name in found["fp8"] if f"nf4-{name.removeprefix('fp8-')}" in found["nf4"]]
    if both:
        print(f"fp8 - nf4: {interval([found['fp8'][f'fp8-{seed}'] - found['nf4'][f'nf4-{seed}'] for seed in both])}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
