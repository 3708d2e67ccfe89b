"""What to tell the user when a run has failed: which rank, how it ended, its last traceback, where the rest is."""

import re
import signal
from collections.abc import Mapping
from pathlib import Path

from launcher.terminal import say

TRACEBACK_LINES = 12
TAIL_LINES = 6
LINE_WIDTH = 300
_TRACEBACK = "Traceback (most recent call last):"
_DEEPSPEED_INFO = re.compile(r"\] \[INFO\] \[")
# torch puts this before each line of a traceback once the process group exists.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
# Errors that a rank gets because another one has died.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError|\bNCCL\b|\bgloo\b", re.I
)
_CAUSES = {
    signal.SIGKILL: "usually host memory ran out: `dmesg | tail` says so; fewer dataset.workers, zero.offload_* off",
    signal.SIGBUS: "usually /dev/shm is full: `df -h /dev/shm`; in a container start it with --shm-size=8g",
    signal.SIGSEGV: "a crash in native code; its Python stack is at the end of the log",
    signal.SIGABRT: "native code gave up; its reason is at the end of the log",
}


def log_sizes(logs: Path) -> dict[str, int]:
    """Bytes in each log now, so that what earlier runs wrote can be skipped later."""
    return {path.name: path.stat().st_size for path in logs.glob("*.log")}


def tell_failure(logs: Path, old_sizes: Mapping[str, int], deaths: Mapping[int, float], code: int) -> None:
    """Print on stderr why the run failed, in about 15 lines.

    `deaths` are the times at which failed ranks ended, `code` the exit code of DeepSpeed's launcher: 256 - N where a
    rank was killed by signal N, negative where the launcher itself was.
    """
    texts = {rank: _new_text(logs / f"rank-{rank}.log", old_sizes) for rank in deaths}
    rank = min(deaths, key=lambda rank: (not _has_cause(texts[rank]), deaths[rank])) if deaths else None
    log = logs / (f"rank-{rank}.log" if rank is not None and texts[rank] else "launcher.log")
    text = _new_text(log, old_sizes)
    if code in (-signal.SIGKILL, 256 - signal.SIGKILL):
        excerpt = []  # it had no time for last words, and what stands at the log's end would mislead
    elif code < 0 or code > 256 - signal.NSIG:
        excerpt = tail(text)
    else:
        excerpt = last_traceback(text)
    who = "DeepSpeed's launcher" if rank is None or code <= 0 else f"rank {rank}"
    say(f"the run failed: {who} {describe_exit(code)}")
    for line in excerpt:
        say(f"  {line}")
    say(f"the whole log: {log}")


def describe_exit(code: int) -> str:
    """An exit code of DeepSpeed's launcher in words, with the likely cause where a signal ended a rank."""
    if code == 0:
        return "ended without saying that every rank succeeded"
    number = -code if code < 0 else 256 - code
    if number not in {member.value for member in signal.Signals}:
        return f"ended with exit code {code}"
    name = signal.Signals(number)
    cause = _CAUSES.get(name)
    return f"was killed by signal {number} ({name.name})" + (f"; {cause}" if cause else "")


def last_traceback(text: str) -> list[str]:
    """The last traceback in a log, cut to its innermost frames; the log's last lines if there is none."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.splitlines()]
    starts = [index for index, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return tail(text)
    start = starts[-1]
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and lines[end][indent : indent + 1] == " ":
        end += 1
    # The error itself, with the first lines of a message that has several.
    frames, message = lines[start + 1 : end], []
    for line in lines[end : end + 4]:
        if not line.strip():
            break
        message.append(line)
    kept = frames[-(TRACEBACK_LINES - len(message)) :]
    omitted = ["  ..."] if len(kept) < len(frames) else []
    return [line[indent:][:LINE_WIDTH] for line in [lines[start], *omitted, *kept, *message]]


def tail(text: str) -> list[str]:
    """The last lines of a log, without empty ones and the progress lines of DeepSpeed's launcher."""
    lines = [line for line in text.splitlines() if line.strip() and not _DEEPSPEED_INFO.search(line)]
    return [line[:LINE_WIDTH] for line in lines[-TAIL_LINES:]]


def _has_cause(text: str) -> bool:
    """Whether a rank's log ends in an error of its own, not in one it got because another rank had died."""
    return _TRACEBACK in text and not _CONSEQUENCE.search("\n".join(last_traceback(text)[-4:]))


def _new_text(log: Path, old_sizes: Mapping[str, int]) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(old_sizes.get(log.name, 0))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""  # the rank ended before it could open its log
