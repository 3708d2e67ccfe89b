"""Report why a run failed: which rank failed, where and how it exited, its last traceback, and the likely cause."""

import re
import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from launcher.supervision.terminal import log
from trainer.config import UserError
from trainer.contract.heartbeat import STACK_PREFIX, HangReport, Heartbeat, read_heartbeats
from trainer.contract.rank_errors import RankErrorRecord, read_errors
from trainer.contract.rendezvous import get_host_name

TRACEBACK_LINES = 12
TAIL_LINES = 6
LINE_WIDTH = 300
# Ranks that exit within this interval failed independently; a launcher takes longer to kill the remaining ranks.
SIMULTANEOUS_WINDOW_S = 0.5
LOW_SHM_GIB = 1.0
_TRACEBACK = "Traceback (most recent call last):"
_DEEPSPEED_INFO = re.compile(r"\] \[INFO\] \[")
# torch prefixes each line of a traceback with this once the process group exists.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
# Errors that torch, NCCL and gloo raise after another rank has died.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError|\bNCCL\b|\bgloo\b", re.I
)
# Signals that terminate a process. Exit codes for other signals are srun's own.
_FATAL_SIGNALS = {*signal.Signals} - {
    signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH,
    signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip
_CAUSES = {
    signal.SIGSEGV: "native code crashed; the Python stack is at the end of the log",
    signal.SIGABRT: "native code aborted; the reason is at the end of the log",
}


@dataclass(frozen=True)
class RankExit:
    time: float
    """Value of time.monotonic()."""
    status: int | None = None
    """Exit code, negative for a signal; None if this process is not the rank's parent."""
    killed_by_launcher: bool = False
    """Whether this launcher killed the rank because other ranks had failed or stopped."""


@dataclass(frozen=True)
class FailureSummary:
    """Cause of a run's failure, as reported to the user."""

    status: int
    """Exit status of the rank that caused the failure, negative for a signal."""
    reason: str
    """The first line of the report, without its prefix."""
    rank: int | None = None
    is_user_error: bool = False
    """Whether the user must change something, because a restart would fail in the same way."""


@dataclass(frozen=True)
class FailureEvidence:
    """Evidence for diagnosing a failed run: logs, exit statuses, and lost hosts."""

    logs: Path
    old_sizes: Mapping[str, int]
    """Size in bytes of each log before the run."""
    exits: Mapping[int, RankExit]
    """The ranks that failed."""
    code: int
    """Exit code of the launcher that started the ranks; DeepSpeed's is 256 - N if signal N killed a rank."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Evidence for each lost host."""
    launcher_failed: bool = False
    """Whether `code` describes the launcher that started the ranks, not a rank."""

    def report(self) -> FailureSummary:
        """Print to stderr why the run failed: one line for a user error, about 15 lines for other failures."""
        beats, errors = read_heartbeats(self.logs), read_errors(self.logs)
        texts = {rank: _read_new_text(self.logs / f"rank-{rank}.log", self.old_sizes) for rank in self.exits}
        mistakes = [error for _, error in sorted(errors.items()) if error.is_user_error]
        if self.code == UserError.exit_code and mistakes:
            log(reason := f"error: {mistakes[0].text}")
            return FailureSummary(self.code, reason, is_user_error=True)
        ranks_with_error = {rank for rank, text in texts.items() if _has_own_error(text, errors.get(rank))}
        rank = self._find_root_cause_rank(ranks_with_error)
        if rank is None or not (_was_killed(self.exits[rank]) or rank in ranks_with_error):
            if self.lost:
                return self._report_lost_host(beats)
            rank = None if self.launcher_failed else rank
        known = None if rank is None else self.exits[rank].status
        status = decode_exit_code(self.code) if known is None else known
        log_file = self.logs / (f"rank-{rank}.log" if rank is not None and texts[rank] else "launcher.log")
        text = _read_new_text(log_file, self.old_sizes)
        explanation: list[str] = []
        if rank is None or self.code <= 0:
            reason = f"the launcher {describe_status(status if self.launcher_failed else self.code)}"
        else:
            beat = beats.get(rank)
            host, position = (get_host_name(), "") if beat is None else (beat.host, f" ({beat.describe_position()})")
            reason = f"rank {rank} on {host} {describe_status(status)}{position}"
            explanation = _explain_signal(status, beat)
        log(f"the run failed: {reason}")
        if status != -signal.SIGKILL:  # a killed process could not write anything; the end of its log would mislead
            explanation += read_tail(text) if status < 0 else find_last_traceback(text)
        for line in explanation:
            log(f"  {line}")
        log(f"full log: {log_file}")
        return FailureSummary(status, reason, rank, is_user_error=rank in {error.rank for error in mistakes})

    def _report_lost_host(self, beats: Mapping[int, Heartbeat]) -> FailureSummary:
        host, evidence = next(iter(self.lost.items()))
        ranks = [rank for rank, beat in sorted(beats.items()) if beat.host == host]
        position = f" (rank {ranks[0]} there: {beats[ranks[0]].describe_position()})" if ranks else ""
        reason = f"lost the connection to {host}: {evidence}{position}"
        log(f"the run failed: {reason}")
        log(f"full log: {self.logs / 'launcher.log'}")
        return FailureSummary(1, reason, ranks[0] if ranks else None)

    def _find_root_cause_rank(self, ranks_with_error: Set[int]) -> int | None:
        """Return the root-cause rank: the first one that was killed, else one with an error, else the first to exit."""
        if not self.exits:
            return None
        first = min(rank_exit.time for rank_exit in self.exits.values())

        def sort_key(rank: int) -> tuple[bool, bool, float]:
            rank_exit = self.exits[rank]
            killed = _was_killed(rank_exit) and rank_exit.time - first < SIMULTANEOUS_WINDOW_S
            return not killed, rank_exit.killed_by_launcher or rank not in ranks_with_error, rank_exit.time

        return min(self.exits, key=sort_key)


def _was_killed(rank_exit: RankExit) -> bool:
    """Return whether an external signal killed the rank, except SIGTERM, which launchers send to the other ranks."""
    return (rank_exit.status or 0) < 0 and rank_exit.status != -signal.SIGTERM and not rank_exit.killed_by_launcher


def report_hang(logs: Path, old_sizes: Mapping[str, int], hang: HangReport, *, is_reported: bool) -> FailureSummary:
    """Print the hung rank and its last Python stack to stderr, or only the stack if `is_reported`."""
    if not is_reported:
        log(f"the run failed: {hang.text}")
    rank = hang.ranks[0]
    text = _read_new_text(logs / f"rank-{rank}.log", old_sizes)
    for line in find_last_stack(text) or find_last_traceback(text):
        log(f"  {line}")
    log(f"stacks of all ranks: {logs}/rank-*.log")
    return FailureSummary(1, hang.text, rank)


def read_log_sizes(logs: Path) -> dict[str, int]:
    """Return the current size of each log in bytes, so that the output of earlier runs can be skipped later."""
    return {path.name: path.stat().st_size for path in logs.glob("*.log")}


def decode_exit_code(code: int) -> int:
    """Return the exit status that a launcher's exit code encodes; negative for a signal.

    For signal N, DeepSpeed's launcher returns 256 - N; shells, srun and mpirun return 128 + N. 255 is ssh's own error.
    Codes for signals that do not terminate a process are srun's own errors, such as 151 for an unresponsive node.
    """
    for number in (256 - code, code - 128):
        if number in _FATAL_SIGNALS and code != 255:
            return -number
    return code


def describe_status(status: int) -> str:
    if status == 0:
        return "exited without reporting that every rank succeeded"
    if -status not in {member.value for member in signal.Signals}:
        return f"exited with code {status}"
    name = signal.Signals(-status)
    cause = _CAUSES.get(name)
    return f"was killed by signal {-status} ({name.name})" + (f"; {cause}" if cause else "")


def find_last_stack(text: str) -> list[str]:
    """Return the innermost frames of the last stack that a rank's watchdog wrote to its log; empty if there is none."""
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith(STACK_PREFIX)]
    if not starts:
        return []
    stack = takewhile(lambda line: line.startswith("  "), lines[starts[-1] + 1 :])
    return [line[2:][:LINE_WIDTH] for line in stack][-TRACEBACK_LINES:]


def _explain_signal(status: int, beat: Heartbeat | None) -> list[str]:
    memory = "" if beat is None else f" (at its last heartbeat {beat.free_memory_gib:.1f} GiB were free)"
    shared = "" if beat is None else f" (at its last heartbeat {beat.free_shm_gib:.2f} GiB were free)"
    lines = []
    if status == -signal.SIGKILL:
        lines = [
            f"the host probably ran out of memory{memory}; check with `dmesg | tail` there, or `sacct -j JOB`",
            "to use less memory, reduce dataset.workers or the ranks per host, or turn zero.offload_* off",
        ]
        if beat is not None and beat.free_shm_gib < LOW_SHM_GIB:
            lines.append(f"/dev/shm was nearly full{shared}")
    elif status == -signal.SIGBUS:
        lines = [f"/dev/shm is probably full{shared}; start containers with --shm-size=8g"]
    return lines


def find_last_traceback(text: str) -> list[str]:
    """Return the innermost frames of the last traceback in a log, or the log's last lines if it has no traceback."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.splitlines()]
    starts = [index for index, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return read_tail(text)
    start = starts[-1]
    indent = len(lines[start]) - len(lines[start].lstrip())
    frames = list(takewhile(lambda line: line[indent : indent + 1] == " ", lines[start + 1 :]))
    end = start + 1 + len(frames)
    message = list(takewhile(str.strip, lines[end : end + 4]))  # the error message, cut to its first lines
    innermost = frames[-(TRACEBACK_LINES - len(message)) :]
    omitted = ["  ..."] if len(innermost) < len(frames) else []
    return [line[indent:][:LINE_WIDTH] for line in [lines[start], *omitted, *innermost, *message]]


def read_tail(text: str) -> list[str]:
    """Return the last lines of a log, without empty lines or DeepSpeed's [INFO] lines."""
    lines = [line for line in text.splitlines() if line.strip() and not _DEEPSPEED_INFO.search(line)]
    return [line[:LINE_WIDTH] for line in lines[-TAIL_LINES:]]


def _has_own_error(text: str, error: RankErrorRecord | None) -> bool:
    """Return whether a rank's error or log shows that it failed on its own, not because of another rank."""
    if error is not None and error.is_consequence:
        return False
    return _TRACEBACK in text and not _LOST_PEER.search("\n".join(find_last_traceback(text)[-4:]))


def _read_new_text(log: Path, old_sizes: Mapping[str, int]) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(old_sizes.get(log.name, 0))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""  # the rank exited before it could open its log
