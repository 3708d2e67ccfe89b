"""Terminate a hung run, and report the host, step and phase of the ranks that block the others.

Every rank has a thread that writes a heartbeat (trainer/contract/heartbeat.py). A rank makes progress when its main
thread enters or leaves a phase, or works in a long phase (tokenizing, loading, saving) without waiting for other ranks.
A run is not hung while any rank makes progress. If no rank makes progress for `training.hang_timeout`, the ranks
without new heartbeats are behind. If all heartbeats continue, the ranks at the lowest step are behind or, if all ranks
are at the same step, the ranks that began the fewest collectives. Among these, ranks with a lagging GPU come first,
then ranks that are not waiting. All ranks then write their Python stacks to their logs and exit with code 1.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed

from trainer.config.errors import sanitize
from trainer.config.training_sections import FIRST_STEP_FACTOR
from trainer.contract.exit_codes import EXIT_FAILED
from trainer.contract.heartbeat import BUILD_LOCK, STACK_PREFIX, HangReport, Heartbeat, HeartbeatFolder
from trainer.contract.launcher_process import read_stat
from trainer.contract.rendezvous import get_host_name
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.process_state import (
    ActivityDetector,
    find_collective,
    find_location,
    get_main_thread_frame,
    read_free_host_memory,
    read_free_shared_memory,
    read_recorded_collectives,
)
from trainer.parallel.ranks.progress import LONG_PHASES, PROGRESS, WAITING_PHASE

# Patience with another process that builds an extension; if it is killed, the launcher removes its lock.
BUILD_TIMEOUT_S = 600.0
STOPPED_OR_LOST = "it is stopped, or its host is down"
EVENT_COUNT = 256
"""Number of reused events; a host is a step or two ahead of its GPU, and begins two phases per micro-step."""


class DeviceEvents:
    """Records an event on this rank's GPU for each phase, numbered from 1, in the same order on every rank.

    Hosts launch an NCCL collective long before the GPUs reach it, and continue into the next step. If one GPU never
    reaches it, because an earlier kernel hangs or the GPU has a fault, all hosts are in the same state. Only the
    events that the GPUs have reached show the difference.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._recorded = 0
        self._device = -1

    def record(self, step: int) -> None:
        """Record an event when a phase of this optimizer step begins; takes a few microseconds.

        Does nothing without a GPU, or before the first step, when the rank may not have selected its GPU yet.
        """
        if not step or not torch.cuda.is_initialized():
            return
        with suppress(RuntimeError):  # a failed GPU: the step is about to raise the same error
            if torch.cuda.is_current_stream_capturing():
                return
            if not self._events:
                self._device = torch.cuda.current_device()
            if torch.cuda.current_device() != self._device:
                return  # an event belongs to the GPU on which it was recorded first
            if len(self._events) < EVENT_COUNT:
                self._events.append(torch.cuda.Event())
            self._events[self._recorded % EVENT_COUNT].record()
            self._recorded += 1

    def find_last_reached_event(self) -> int | None:
        """Return the number of the last event that the GPU has reached; 0 if it was overwritten, None if unknown.

        May be called from any thread.
        """
        if not self._recorded:
            return None
        try:
            for number in range(self._recorded, max(0, self._recorded - EVENT_COUNT), -1):
                if self._events[(number - 1) % EVENT_COUNT].query():
                    return number
        except RuntimeError:
            return None  # the GPU has failed, which the main thread is about to notice
        return 0


class Watchdog:
    """Writes this rank's heartbeat and watches the other ranks' heartbeats."""

    def __init__(self, ranks: Ranks, logs: Path, hang_timeout_minutes: float) -> None:
        self._ranks = ranks
        self._timeout_s = hang_timeout_minutes * 60.0
        self._interval_s = min(max(self._timeout_s / 20.0, 0.25), 2.0) if self._timeout_s else 2.0
        self._folder = HeartbeatFolder(logs, ranks.rank, ranks.world_size)
        self.write_exit_code = self._folder.write_exit_code
        """Function that adds the exit code to the latest heartbeat; safe to call in a signal handler."""
        self.all_write = False
        """Whether every rank writes heartbeats as soon as it starts, so a rank without heartbeats has not started."""
        PROGRESS.write_step = self._write_step
        self._host = get_host_name()
        self._work = ActivityDetector()
        self._worked_at = time.monotonic()
        self._seen: dict[int, tuple[Heartbeat, float]] = {}
        self._ended = threading.Event()
        # The user's terminal: descriptors 1 and 2 will soon be redirected to the log.
        self._terminal_fd = os.dup(2)
        self._device_events = DeviceEvents()
        if self._timeout_s:
            PROGRESS.record_device_event = self._device_events.record
            # Number of collectives that torch records; without this variable, it does not record gloo's collectives.
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def writes_heartbeats(self) -> bool:
        """Whether to write heartbeats to the run's folder; False while another run may still be using it."""
        return self._folder.writes

    @writes_heartbeats.setter
    def writes_heartbeats(self, value: bool) -> None:
        self._folder.writes = value
        if value:
            self._folder.publish(self._build_heartbeat())  # now: a small model trains several steps within an interval

    def end(self, exit_code: int) -> int:
        """Write the rank's exit code into its last heartbeat; return the code."""
        self._ended.set()
        self._thread.join(timeout=self._interval_s)
        self._folder.publish(replace(self._build_heartbeat(), exit_code=exit_code))
        return exit_code

    def _write_step(self, step: int, first_step: int) -> None:
        if not self._folder.is_open:
            self._folder.publish(self._build_heartbeat())  # the launcher forwards signals to the process named here
        self._folder.write_step(step, first_step)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            beat = self._build_heartbeat()
            self._folder.publish(beat)
            hang = self._folder.read_report() if self._timeout_s else None
            if hang is not None:
                # A rank that was stopped also gets here if it continues after the other ranks have exited.
                self._exit(hang, first=False)
            if self._timeout_s and beat.idle_s > self._timeout_s / 10.0:
                self._check_others(beat)

    def _build_heartbeat(self) -> Heartbeat:
        progress, now = PROGRESS, time.monotonic()
        frame = get_main_thread_frame()
        collective, begun = find_collective(frame), None
        in_long_phase = not LONG_PHASES.isdisjoint(progress.phases)
        if in_long_phase or now - progress.changed_at > self._interval_s:
            if torch.distributed.is_initialized() and torch.cuda.is_initialized():
                # A new thread's current device is GPU 0, on which querying NCCL's events would create a CUDA context.
                torch.cuda.set_device(self._ranks.device())
            recorded, begun = read_recorded_collectives()
            collective = collective or recorded
        waits = collective is not None or WAITING_PHASE in progress.phases
        # A rank that waits for the GPU spins, which looks like work, so work counts only outside of waits.
        if in_long_phase and not waits and self._work.has_progressed():
            self._worked_at = now
        idle_s = now - max(progress.changed_at, self._worked_at)
        place = (find_location(frame) or "")[:160] if idle_s > self._interval_s else None
        allowed_s = self._timeout_s * (FIRST_STEP_FACTOR if progress.step == progress.first_step else 1.0)
        if place == BUILD_LOCK:
            allowed_s = max(allowed_s, BUILD_TIMEOUT_S)
        return Heartbeat(
            rank=self._ranks.rank,
            host=self._host,
            pid=os.getpid(),
            step=progress.step,
            first_step=progress.first_step,
            phase="/".join(progress.phases)[:80],
            collective=collective,
            place=place,
            collectives_begun=begun,
            idle_s=idle_s,
            stuck=bool(self._timeout_s) and idle_s > allowed_s,
            free_memory_gib=round(read_free_host_memory(), 2),
            free_shm_gib=round(read_free_shared_memory(), 2),
            time=time.time(),
            device_reached=None if place is None else self._device_events.find_last_reached_event(),
        )

    def _check_others(self, own: Heartbeat) -> None:
        now = time.monotonic()
        for rank, beat in (self._folder.read() | {own.rank: own}).items():
            before = self._seen.get(rank)
            if before is None or before[0] != beat:
                self._seen[rank] = (beat, now)
        unheard = {
            rank: Heartbeat.missing(rank)
            for rank in range(self._ranks.world_size)
            if rank not in self._seen and own.step == 0
        }
        known = len(self._seen) + (len(unheard) if self.all_write else 0)
        if not own.stuck or known < self._ranks.world_size:
            return
        silent = {rank for rank, (_, seen_at) in self._seen.items() if now - seen_at > self._timeout_s} | set(unheard)
        beats = {rank: beat for rank, (beat, _) in self._seen.items() if beat.exit_code is None} | unheard
        if all(beat.stuck or rank in silent for rank, beat in beats.items()):
            if any(_waits_for_others(beat) for beat in beats.values()):
                # They may wait for a rank that has failed.
                failed = {rank: beat for rank, (beat, _) in self._seen.items() if beat.exit_code}
                beats, silent = beats | failed, silent | set(failed)
            hang = describe_hang(beats, silent)
            self._exit(hang, first=self._folder.write_report(hang))

    def _exit(self, hang: HangReport, *, first: bool) -> None:
        print(f"{STACK_PREFIX} {self._ranks.rank}:", file=sys.stderr)
        traceback.print_stack(get_main_thread_frame(), file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        print(f"hang: {hang.text}", file=sys.stderr, flush=True)
        if first:
            os.write(self._terminal_fd, f"error: {sanitize(hang.text)}\n".encode())
            # A launcher terminates all ranks once the first exits, but the others need a moment to write their stacks.
            time.sleep(2 * self._interval_s + 1.0)
        self._folder.publish(replace(self._build_heartbeat(), exit_code=EXIT_FAILED))
        os._exit(EXIT_FAILED)


def find_ranks_behind(beats: Mapping[int, Heartbeat], silent: Iterable[int]) -> list[int]:
    """Return the ranks that block the others in a hung run; all ranks if none is behind."""
    missing = sorted(rank for rank in silent if rank in beats)
    if missing:
        return missing
    level = _find_furthest_behind(beats)
    behind = _find_behind_on_device(level) or level
    return sorted([rank for rank, beat in behind.items() if not _waits_for_others(beat)] or behind)


def _find_furthest_behind(beats: Mapping[int, Heartbeat]) -> dict[int, Heartbeat]:
    """Return the ranks at the lowest step; if all are at the same step, the ranks with the fewest collectives."""
    lowest = min(beat.step for beat in beats.values())
    behind = {rank: beat for rank, beat in beats.items() if beat.step == lowest}
    begun = [beat.collectives_begun for beat in behind.values()]
    counts = [count for count in begun if count is not None]
    if len(behind) == len(beats) and len(counts) == len(begun):
        behind = {rank: beat for rank, beat in behind.items() if beat.collectives_begun == min(counts)}
    return behind


def _find_behind_on_device(beats: Mapping[int, Heartbeat]) -> dict[int, Heartbeat]:
    """Return the ranks with the GPUs that are furthest behind; empty if all GPUs are at the same event, or on CPUs."""
    reached = {rank: beat.device_reached for rank, beat in beats.items() if beat.device_reached is not None}
    least, most = min(reached.values(), default=0), max(reached.values(), default=0)
    return {rank: beats[rank] for rank, number in reached.items() if number == least < most}


def _waits_for_others(beat: Heartbeat) -> bool:
    return beat.collective is not None or (beat.phase.startswith("join") and beat.place != BUILD_LOCK)


def describe_hang(beats: Mapping[int, Heartbeat], silent: Iterable[int]) -> HangReport:
    silent_ranks = set(silent)
    behind = find_ranks_behind(beats, silent_ranks)
    waiting = [beat for rank, beat in beats.items() if rank not in behind]
    if not waiting and len(behind) > 1:
        text = f"all {len(behind)} ranks are stuck, {_describe_position(beats[behind[0]])}"
        if all(_waits_for_others(beats[rank]) for rank in behind):
            text += (
                ": the network between them does not work; `zerolora doctor` tests it, NCCL_DEBUG=INFO in the "
                "environment shows more"
            )
    else:
        text = "; ".join(_describe_rank(beats[rank], silent=rank in silent_ranks) for rank in behind)
        if not silent_ranks and behind == sorted(_find_behind_on_device(_find_furthest_behind(beats))):
            text += (
                ": the GPU is behind the other ranks' GPUs; a kernel hangs, or the GPU or its link has a fault "
                "(`dmesg | grep Xid`)"
            )
    if waiting:
        where = waiting[0].collective or waiting[0].phase or "nothing"
        others = f"rank {waiting[0].rank} waits" if len(waiting) == 1 else f"{len(waiting)} other ranks wait"
        text += f"; {others} for {'it' if len(behind) == 1 else 'them'} in {where}"
    return HangReport(behind, f"the run is hung: {text}")


def _describe_rank(beat: Heartbeat, *, silent: bool) -> str:
    if beat.is_missing:
        return f"rank {beat.rank} has sent no heartbeat since it was started: {STOPPED_OR_LOST}"
    who = f"rank {beat.rank} on {beat.host} (process {beat.pid})"
    if silent:
        return f"{who} no longer sends heartbeats, {_describe_position(beat)}: {_explain_silence(beat)}"
    return f"{who} has made no progress for {beat.idle_s / 60.0:.1f} minutes, {_describe_position(beat)}"


def _describe_position(beat: Heartbeat) -> str:
    step = f"step {beat.step}" if beat.step else "before the first step"
    parts = [step, f"phase {beat.phase}" if beat.phase else "between phases"]
    parts += [f"in {beat.collective}"] if beat.collective else []
    parts += [f"at {beat.place}"] if beat.place else []
    return ", ".join(parts)


def _explain_silence(beat: Heartbeat) -> str:
    if beat.exit_code is not None:
        return f"it has exited with code {beat.exit_code}"
    if beat.host == get_host_name():
        if (fields := read_stat(beat.pid)) is None:
            return "the process has exited"
        state = fields[0]
        if state in "Tt":
            return "the process is stopped (SIGSTOP, or a debugger)"
        if state == "D":
            return "the process waits for a file system or a driver that does not respond"
    return STOPPED_OR_LOST
