"""What a plot is made of: a metric over the steps, and its running mean."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.monitor.metrics import Record

MEANS_PER_RUN = 40
FEWEST_FOR_MEAN, SHORTEST_MEAN = 12, 5
SPREAD_FOR_LOG_SCALE = 50.0
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Counted:
    """What a task counts its batches in (trainer/tasks/task.py), and the words for what it measures."""

    name: str
    samples: str
    loss: str
    digits: int
    """Of what is computed in a second."""

    @property
    def rate(self) -> str:
        """The metric of a rank's speed."""
        return f"perf/{self.name}_per_second_per_gpu"


TOKENS = Counted("tokens", "sequences", "nats per token", 0)
IMAGES = Counted("images", "pictures", "mean squared error", 2)


@dataclass(frozen=True)
class Series:
    """One metric over the run: optimizer steps and values, NaN where the value was not finite."""

    steps: Values
    values: Values

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> "Series":
        """The same without the steps whose value is NaN."""
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.values[kept])


def series(records: list[Record], name: str) -> Series:
    """Values of one metric by step; of several records of a step the last one counts."""
    by_step = {record["step"]: record[name] for record in records if name in record}
    ordered = sorted((float(step or 0), math.nan if value is None else value) for step, value in by_step.items())
    pairs = np.array(ordered, dtype=np.float64).reshape(-1, 2)
    return Series(pairs[:, 0], pairs[:, 1])


@dataclass(frozen=True)
class HeldOut:
    """The held-out losses of a run. `after` is that of the weights that were saved, at `kept_step`."""

    before: float
    after: float
    kept_step: int
    lowest: float
    lowest_step: int

    @classmethod
    def of(cls, records: list[Record]) -> "HeldOut | None":
        """Return None if fewer than two evaluations are finite: nothing can be compared."""
        line = series(records, "eval/loss").finite()
        if len(line) < 2:
            return None
        lowest = int(np.argmin(line.values))
        kept = series(records, "eval/kept_step").values
        loss = series(records, "eval/kept_loss").values
        step, after = (kept[-1], loss[-1]) if len(kept) and len(loss) else (line.steps[-1], line.values[-1])
        return cls(float(line.values[0]), float(after), int(step), float(line.values[lowest]), int(line.steps[lowest]))


def counted_in(records: list[Record]) -> Counted:
    """What the run counted its batches in: tokens, or images."""
    return IMAGES if any("train/images" in record for record in records) else TOKENS


def running_mean(values: Values, window: int) -> Values:
    """Mean over `window` neighbours, fewer at both ends, NaN left out; centred, so that it does not lag."""
    known = np.isfinite(values)
    kernel = np.ones(min(window, len(values)) | 1)
    half = len(kernel) // 2
    total = np.convolve(np.where(known, values, 0.0), kernel)[half : half + len(values)]
    count = np.convolve(known.astype(np.float64), kernel)[half : half + len(values)]
    return np.divide(total, count, out=np.full(len(values), math.nan), where=count > 0)


def window_for(count: int) -> int | None:
    """Records that a mean is taken over, odd, so that it is centred on its step; None for too few records."""
    return max(count // MEANS_PER_RUN, SHORTEST_MEAN) | 1 if count >= FEWEST_FOR_MEAN else None


def held_out_label(records: list[Record]) -> str:
    """Return the legend of the held-out losses, with the numbers of `HeldOut`."""
    held_out = HeldOut.of(records)
    if held_out is None:
        return f"held out, {series(records, 'eval/loss').finite().values[0]:.3f}"
    return f"held out, {held_out.before:.3f} → {held_out.after:.3f}"
