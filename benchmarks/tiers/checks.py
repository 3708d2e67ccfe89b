"""Assertions of the tiers about the files of a run: pure functions of a `TierRun`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from trainer.checkpoint.checkpoint_files import list_checkpoints, parse_step
from trainer.config.sections import TierSection
from trainer.monitor.metrics import Record

# Warm-up: kernels are compiled, caches filled, and the allocator grows.
WARM_UP = 20
WINDOW = 100
SMOOTHED = 50
NO_LIMITS = TierSection()


@dataclass(frozen=True)
class TierRun:
    """A finished run and its measurements."""

    folder: Path
    records: Sequence[Record]
    steps: int
    seconds: float
    """From the start of the command to its end, including loading and saving."""
    on_gpu: bool
    real_weights: bool
    limits: TierSection = NO_LIMITS
    resumed: Sequence[Record] = ()
    """Records of the run that was resumed from one of the checkpoints."""

    def values(self, name: str) -> list[float]:
        """Return a metric at every step that has it, with NaN for non-finite values."""
        found = (record[name] for record in self.records if name in record)
        return [math.nan if value is None else value for value in found]


@dataclass(frozen=True)
class Check:
    """One assertion: held, broken, or, with `passed` None, not possible here."""

    name: str
    passed: bool | None
    text: str


Checker = Callable[[TierRun], Check]


def finished_within(limit_s: float) -> Checker:
    """Check that the whole command took less than this many seconds."""

    def check(run: TierRun) -> Check:
        text = f"{run.seconds:.0f} s, under {limit_s:.0f} s"
        return _on_gpu(run, "time", lambda: Check("time", run.seconds < limit_s, text))

    return check


def finite(run: TierRun) -> Check:
    """Check that every step was recorded with a finite loss and gradient norm."""
    losses, norms = run.values("train/loss"), run.values("train/grad_norm")
    broken = sum(not math.isfinite(value) for value in (*losses, *norms))
    text = f"{len(losses)} of {run.steps} steps, {broken} losses or gradient norms not finite"
    return Check("finite", len(losses) == len(norms) == run.steps and not broken, text)


def adapters_moved(run: TierRun) -> Check:
    """Check that no B of the saved adapter is still zero, as all were initially, and every value is finite."""
    import torch
    from safetensors.torch import load_file

    adapter = load_file(run.folder / "adapter_model.safetensors")
    factors = [value for name, value in adapter.items() if "lora_B" in name]
    moved = sum(bool(value.any()) for value in factors)
    sound = all(bool(torch.isfinite(value).all()) for value in adapter.values())
    text = f"{moved} of {len(factors)} adapters moved{'' if sound else ', and values are not finite'}"
    return Check("adapters", sound and 0 < len(factors) == moved, text)


def peak_memory(limit_gib: float) -> Checker:
    """Check that torch's largest allocation on the card, including loading, is within this many GiB."""

    def check(run: TierRun) -> Check:
        def compare() -> Check:
            peak = max(run.values("memory/peak_gib"), default=math.nan)
            text = f"{peak * 1024:,.0f} MiB, at most {limit_gib * 1024:,.0f} MiB"
            return Check("peak memory", peak <= limit_gib, text)

        return _on_gpu(run, "peak memory", compare)

    return check


def memory_is_flat(run: TierRun) -> Check:
    """Check that the peak grows by less than `tier.memory_growth` after the warm-up."""
    limit = run.limits.memory_growth

    def compare() -> Check:
        peaks = run.values("memory/peak_gib")
        growth = peaks[-1] / peaks[WARM_UP] - 1 if len(peaks) > WARM_UP else math.nan
        text = f"the peak grows by {growth:.2%} after step {WARM_UP}, under {limit:.0%}"
        return Check("memory is flat", growth < limit, text)

    return _on_gpu(run, "memory is flat", compare)


def throughput_holds(run: TierRun) -> Check:
    """Check the median tokens/s of the last 100 steps against the first 100 after warm-up: `tier.throughput_change`."""
    limit = run.limits.throughput_change

    def compare() -> Check:
        rates = run.values("perf/tokens_per_second")[WARM_UP:]
        first, last = median(rates[:WINDOW] or [math.nan]), median(rates[-WINDOW:] or [math.nan])
        text = f"{first:,.0f} tokens/s at first, {last:,.0f} at last ({last / first - 1:+.1%}), within {limit:.0%}"
        return Check("throughput", len(rates) >= 2 * WINDOW and abs(last / first - 1) <= limit, text)

    return _on_gpu(run, "throughput", compare)


def tokens_per_second(run: TierRun) -> float | None:
    """Return the median after the warm-up; None on a CPU, or if the run ended during warm-up."""
    rates = run.values("perf/tokens_per_second")[WARM_UP:]
    return median(rates) if run.on_gpu and rates else None


def against_baseline(run: TierRun, baseline: float | None) -> Check:
    """Check that tokens per second are at most `tier.baseline_loss` below the record of this card."""
    rate, limit = tokens_per_second(run), run.limits.baseline_loss
    if rate is None:
        return Check("baseline", None, "too few steps, or no card, to compare throughput on")
    if baseline is None:
        return Check("baseline", None, f"{rate:,.0f} tokens/s kept: the first run of this tier on this card")
    text = f"{rate:,.0f} tokens/s, {rate / baseline - 1:+.1%} of this card's {baseline:,.0f}, at least -{limit:.0%}"
    return Check("baseline", rate >= (1 - limit) * baseline, text)


def smoothed_loss_falls(run: TierRun) -> Check:
    """Check that the mean loss of every 50 steps is below that of the 50 before."""
    losses = run.values("train/loss")
    means = [fmean(losses[end - SMOOTHED : end]) for end in range(SMOOTHED, len(losses) + 1, SMOOTHED)]
    rises = sum(after >= before for before, after in pairwise(means))
    text = f"means of {SMOOTHED} steps: " + " ".join(f"{mean:.3f}" for mean in means)
    text += f"; {rises} of {len(means)} do not fall" if rises else ""
    return Check("smoothed loss falls", len(means) > 2 and not rises, text)


def loss_fell(fraction: float) -> Checker:
    """Check that the mean of the last 10 training losses is lower than that of the first 10 by this fraction."""

    def check(run: TierRun) -> Check:
        def compare() -> Check:
            losses = run.values("train/loss")
            first, last = (fmean(part or [math.nan]) for part in (losses[:10], losses[-10:]))
            text = f"mean of 10 steps {first:.3f} -> {last:.3f} ({last / first - 1:+.1%}), at least -{fraction:.0%}"
            return Check("training loss", len(losses) >= 20 and last <= (1 - fraction) * first, text)

        return _on_real_weights(run, "training loss", compare)

    return check


def held_out_loss_fell(run: TierRun) -> Check:
    """Check that the held-out loss after training is below that before."""

    def compare() -> Check:
        losses = run.values("eval/loss")
        text = " -> ".join(f"{loss:.3f}" for loss in losses) or "not measured"
        return Check("held-out loss", len(losses) > 1 and losses[-1] < losses[0], text)

    return _on_real_weights(run, "held-out loss", compare)


def checkpoints_are_whole(*steps: int) -> Checker:
    """Check that complete, finite checkpoints exist at these steps, and the last one's adapter is the result."""

    def check(run: TierRun) -> Check:
        import torch
        from safetensors.torch import load_file

        found = list_checkpoints(run.folder)
        problems = [f"none at step {step}" for step in steps if step not in map(parse_step, found)]
        for file in (file for folder in found for file in sorted(folder.glob("*.safetensors"))):
            if not all(bool(torch.isfinite(value).all()) for value in load_file(file).values()):
                problems.append(f"{file.parent.name}/{file.name} is not finite")
        if found and not problems:
            kept, result = (load_file(at / "adapter_model.safetensors") for at in (found[-1], run.folder))
            if kept.keys() != result.keys() or not all(torch.equal(kept[name], result[name]) for name in kept):
                problems.append(f"the adapter of {found[-1].name} is not the result")
        text = "; ".join(problems) or f"{', '.join(folder.name for folder in found)} read back"
        return Check("checkpoints", not problems, text)

    return check


def resumes(run: TierRun) -> Check:
    """Check that a resumed run has the losses of the uninterrupted one, within 1 %."""
    first = {record["step"]: record["train/loss"] for record in run.records if "train/loss" in record}
    again = {record["step"]: record["train/loss"] for record in run.resumed if "train/loss" in record}
    shared = sorted(step for step in first.keys() & again.keys() if step is not None)
    off = [_difference(first[step], again[step]) for step in shared]
    span = f"steps {shared[0]:.0f} to {shared[-1]:.0f} again: " if shared else "no step again: "
    text = f"{span}losses within {max(off, default=math.nan):.2%}, at most 1 %"
    return Check("resumes", bool(shared) and shared[-1] == run.steps and max(off) <= 0.01, text)


def _difference(first: float | None, again: float | None) -> float:
    return abs(again / first - 1) if first and again else math.inf


def _on_gpu(run: TierRun, name: str, compare: Callable[[], Check]) -> Check:
    return compare() if run.on_gpu else Check(name, None, "the limit is for a GPU, and this ran on the CPU")


def _on_real_weights(run: TierRun, name: str, compare: Callable[[], Check]) -> Check:
    return compare() if run.real_weights else Check(name, None, "says nothing on random weights")
