"""Extract metrics as series over the steps, their running means, and the held-out losses of a run."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.monitor.metrics import Record

SPREAD_FOR_LOG_SCALE = 50.0
Values = NDArray[np.float64]


@dataclass(frozen=True)
class BatchUnit:
    """The unit in which a task (trainer/tasks/task.py) counts its batches, with labels."""

    name: str
    samples: str
    loss: str
    digits: int
    """Number of decimals of the throughput."""

    @property
    def rate(self) -> str:
        """Name of the metric for a rank's throughput."""
        return f"perf/{self.name}_per_second_per_gpu"


TOKENS = BatchUnit("tokens", "sequences", "nats per token", 0)
PAIRS = BatchUnit("tokens", "pairs", "nats per pair", 0)
LABELED = BatchUnit("tokens", "answers", "per answer", 0)
IMAGES = BatchUnit("images", "images", "mean squared error", 2)


@dataclass(frozen=True)
class Series:
    """A metric over the run: optimizer steps and values, with NaN for non-finite values."""

    steps: Values
    values: Values

    def __len__(self) -> int:
        return len(self.steps)

    def drop_nan(self) -> "Series":
        is_finite = np.isfinite(self.values)
        return Series(self.steps[is_finite], self.values[is_finite])


def extract_series(records: list[Record], name: str) -> Series:
    """Return a metric as a series, using the last record of each step."""
    by_step = {record["step"]: record[name] for record in records if name in record}
    ordered = sorted((float(step or 0), math.nan if value is None else value) for step, value in by_step.items())
    pairs = np.array(ordered, dtype=np.float64).reshape(-1, 2)
    return Series(pairs[:, 0], pairs[:, 1])


def extract_scores(records: list[Record]) -> dict[str, tuple[float, Series]]:
    """Return the scores recorded for both models, as {name: (the base model's value, the adapter's series)}."""
    names = sorted({name[5:] for record in records for name in record if name.startswith("base/")})
    pairs = {name: [extract_series(records, f"{key}/{name}").drop_nan() for key in ("base", "eval")] for name in names}
    return {name: (float(base.values[0]), score) for name, (base, score) in pairs.items() if len(base) and len(score)}


@dataclass(frozen=True)
class HeldOutLosses:
    """The held-out losses of a run; `after` is the loss of the saved weights, which are from step `kept_step`."""

    before: float
    after: float
    kept_step: int
    lowest: float
    lowest_step: int

    @classmethod
    def from_records(cls, records: list[Record]) -> "HeldOutLosses | None":
        """Return the losses, or None if fewer than two evaluations are finite."""
        losses = extract_series(records, "eval/loss").drop_nan()
        if len(losses) < 2:
            return None
        lowest = int(np.argmin(losses.values))
        kept = Series(*(extract_series(records, f"eval/kept_{name}").values for name in ("step", "loss")))
        steps, values = losses.steps, losses.values
        last = kept if len(kept.steps) and len(kept.values) else losses
        return cls(
            before=float(values[0]),
            after=float(last.values[-1]),
            kept_step=int(last.steps[-1]),
            lowest=float(values[lowest]),
            lowest_step=int(steps[lowest]),
        )


def detect_batch_unit(records: list[Record]) -> BatchUnit:
    if any("train/rewards/chosen" in record or "train/rewards/rejected" in record for record in records):
        return LABELED if any("train/kl" in record for record in records) else PAIRS
    return IMAGES if any("train/images" in record for record in records) else TOKENS


def compute_running_mean(values: Values, window: int) -> Values:
    """Return the centered mean over `window` values (fewer at both ends), ignoring NaN."""
    is_finite = np.isfinite(values)
    kernel = np.ones(min(window, len(values)) | 1)
    half = len(kernel) // 2
    total = np.convolve(np.where(is_finite, values, 0.0), kernel)[half : half + len(values)]
    count = np.convolve(is_finite.astype(np.float64), kernel)[half : half + len(values)]
    return np.divide(total, count, out=np.full(len(values), math.nan), where=count > 0)


def format_held_out_label(records: list[Record]) -> str:
    held_out = HeldOutLosses.from_records(records)
    if held_out is None:
        losses = extract_series(records, "eval/loss").drop_nan().values
        return ", ".join(["held out", *(f"{loss:.3f}" for loss in losses)])
    return f"held out, {held_out.before:.3f} → {held_out.after:.3f}"
