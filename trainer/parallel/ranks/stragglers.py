"""Report a rank that is repeatedly slower than the others, which wait for it in every collective.

A rank's own time excludes time spent waiting for other ranks. It covers data loading and forward passes, timed with
CUDA events. With ZeRO-3, the time that forward passes wait for all-gathers is subtracted
(trainer/parallel/engine/deepspeed_engine.py). Every WINDOW_STEPS the ranks compare their means; a rank that is slow in
MIN_SLOW_WINDOWS comparisons in a row is reported.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import torch
import torch.distributed as dist

from trainer.contract.known_versions import patch_objects
from trainer.contract.rendezvous import get_host_name
from trainer.parallel.ranks.group import Ranks, gather_objects

WINDOW_STEPS = 50
MIN_SLOW_WINDOWS = 3
# GPUs of the same model differ by a few percent, and so do batches of documents.
SLOW_FACTOR = 1.15
MIN_DIFFERENCE_S = 1e-3

_Span = tuple[float, torch.cuda.Event, torch.cuda.Event]


class StragglerWatch:
    """Measures this rank's own work in a window of steps, and compares the ranks."""

    def __init__(self, ranks: Ranks, device: torch.device, log: Callable[[str], None]) -> None:
        """Exchange the ranks' host names; a collective call. Only rank 0's `log` is called."""
        self._ranks, self._device, self._log = ranks, device, log
        self._spans: list[_Span] = []
        self._seconds = 0.0
        self._is_own = False
        self._slow_in_a_row = [0] * ranks.world_size
        self._hosts = gather_objects(get_host_name())

    @contextmanager
    def time_own_work(self, *, on_device: bool = True) -> Iterator[None]:
        """Add the block's duration to this rank's own time; set `on_device` if a GPU does the work."""
        with patch_objects((self, "_is_own", True)), self._time_block(1.0, on_device=on_device):
            yield

    @contextmanager
    def exclude_wait(self) -> Iterator[None]:
        """Within `time_local_work`, subtract the block (a wait for other ranks) from this rank's own time."""
        with self._time_block(-1.0) if self._is_own else nullcontext():
            yield

    @contextmanager
    def _time_block(self, sign: float, *, on_device: bool = True) -> Iterator[None]:
        if not (on_device and self._device.type == "cuda"):
            started = time.perf_counter()
            yield
            self._seconds += sign * (time.perf_counter() - started)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._spans.append((sign, start, end))

    def compare(self, step: int) -> None:
        """Compare the ranks at the end of a window and report slow ones; every rank must call it after every step."""
        if step % WINDOW_STEPS or self._ranks.world_size == 1:
            return
        own = torch.zeros(self._ranks.world_size, dtype=torch.float64, device=self._device)
        own[self._ranks.rank] = self._take_own_seconds() / WINDOW_STEPS
        dist.all_reduce(own)
        if self._ranks.is_main:
            self.report_slow_ranks(step, own.tolist())

    def report_slow_ranks(self, step: int, seconds: list[float]) -> None:
        """Report slow ranks; `seconds` lists the ranks' mean own time per step in the window that ends with `step`."""
        for rank, own in enumerate(seconds):
            others = median(seconds[:rank] + seconds[rank + 1 :])
            is_slow = own > SLOW_FACTOR * others and own - others > MIN_DIFFERENCE_S
            self._slow_in_a_row[rank] = self._slow_in_a_row[rank] + 1 if is_slow else 0
            if self._slow_in_a_row[rank] == MIN_SLOW_WINDOWS:
                self._log(
                    f"[yellow]warning:[/yellow] step {step}: rank {rank} on {self._hosts[rank]} is slow: its own work "
                    f"takes {own * 1e3:.1f} ms per step, the others' work {others * 1e3:.1f} ms; all ranks wait for it"
                )

    def _take_own_seconds(self) -> float:
        spans, self._spans = self._spans, []
        seconds, self._seconds = self._seconds, 0.0
        if spans:
            spans[-1][2].synchronize()
        return seconds + sum(factor * start.elapsed_time(end) for factor, start, end in spans) / 1e3
