"""What to tell the user when a run has failed: which rank, where, how it ended, its last traceback, the cause."""

import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.supervision.terminal import say
from trainer.config import UserError
from trainer.contract.heartbeat import Hang, Heartbeat, read_heartbeats
from trainer.contract.rank_variables import host_name

TRACEBACK_LINES = 12
TAIL_LINES = 6
LINE_WIDTH = 300
GIB = 2**30
# Ranks that end this close to each other ended of themselves, not because a launcher was tidying up.
TOGETHER_S = 0.5
LITTLE_GIB = 1.0
_TRACEBACK = "Traceback (most recent call last):"
_STACK_MARK = "Python stack of rank"
_DEEPSPEED_INFO = re.compile(r"\] \[INFO\] \[")
# torch puts this before each line of a traceback once the process group exists.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
# Errors that a rank gets because another one has died, could not write its part of a checkpoint, or has a NaN.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError|\bNCCL\b|\bgloo\b|"
    r"rank \d+ could not write \.writing-checkpoint|\d+( other ranks)? had a loss that is not finite",
    re.I,
)
# Signals that end a process. An exit code that would be of another one is srun's own.
_DEADLY = {*signal.Signals} - {
    signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH,
    signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip
# How a rank tells a mistake of the user: in its log, or in the launcher's where pdsh puts the host before it.
_MISTAKE = re.compile(r"^(?!srun: )(?:[\w.-]+: )?(error: .+(?:\nerror: .+)*)", re.M)  # found together, told together
_CAUSES = {
    signal.SIGSEGV: "a crash in native code; its Python stack is at the end of the log",
    signal.SIGABRT: "native code gave up; its reason is at the end of the log",
}


@dataclass(frozen=True)
class Death:
    """How a rank ended."""

    when: float
    """By time.monotonic()."""
    status: int | None = None
    """Its exit code, negative for a signal; None if only its parent has learned it."""
    tidied_up: bool = False
    """Whether it was killed here because others had failed, or stopped."""


@dataclass(frozen=True)
class Fault:
    """Why a run failed, as the user was told."""

    status: int
    """Of the rank to blame, negative for a signal."""
    reason: str
    """The first line, without its beginning."""
    rank: int | None = None
    is_answer: bool = False
    """Whether it ended with a line that says what to change: another start would end with the same one."""


@dataclass(frozen=True)
class Failure:
    """Everything known about a run that has failed."""

    logs: Path
    old_sizes: Mapping[str, int]
    """Bytes in each log before the run."""
    deaths: Mapping[int, Death]
    """The ranks that failed."""
    code: int
    """Exit code of the launcher below; of DeepSpeed's 256 - N where a rank was killed by signal N."""
    oom_struck: bool | None = None
    """Whether the kernel's out-of-memory killer ended processes of this host meanwhile; None if it does not tell."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Hosts to which the way was lost, and how that shows."""
    launcher_fell: bool = False
    """Whether `code` is of the launcher below and says nothing of a rank."""

    def tell(self) -> Fault:
        """Print on stderr why the run failed.

        A mistake of the user takes one line, anything else about 15.
        """
        beats = read_heartbeats(self.logs)
        texts = {rank: _new_text(self.logs / f"rank-{rank}.log", self.old_sizes) for rank in self.deaths}
        if self.code == UserError.exit_code:
            said = [texts[rank] for rank in sorted(texts)] + [_new_text(self.logs / "launcher.log", self.old_sizes)]
            last_words = [mistakes[-1] for text in said if (mistakes := _MISTAKE.findall(text))]
            if last_words:
                say(last_words[0])  # one is enough; the others stand in their logs
                return Fault(self.code, last_words[0], is_answer=True)
        rank = self._to_blame(texts)
        if rank is None or not (_was_killed(self.deaths[rank]) or _has_cause(texts[rank])):
            if self.lost:
                return self._tell_lost(beats)
            rank = None if self.launcher_fell else rank
        status = self._status(rank)
        log = self.logs / (f"rank-{rank}.log" if rank is not None and texts[rank] else "launcher.log")
        text = _new_text(log, self.old_sizes)
        if status == -signal.SIGKILL:
            excerpt = []  # it had no time for last words, and what stands at the log's end would mislead
        else:
            excerpt = tail(text) if status < 0 else last_traceback(text)
        if rank is None or self.code <= 0:
            reason = f"the launcher {describe_status(status if self.launcher_fell else self.code)}"
            say(f"the run failed: {reason}")
        else:
            reason = f"{self._who(rank, beats)} {describe_status(status)}{_place(beats.get(rank))}"
            say(f"the run failed: {reason}")
            for line in self._cause(status, beats.get(rank)):
                say(line)
        for line in excerpt:
            say(f"  {line}")
        for other, death in sorted(self.deaths.items()):
            if other != rank and rank is not None and self._fell_too(death, texts[other], self.deaths[rank]):
                say(f"also: {self._who(other, beats)} {describe_status(self._status(other))}{_place(beats.get(other))}")
        say(f"the whole log: {log}")
        return Fault(status, reason, rank, is_answer=_is_answer(text))

    def _tell_lost(self, beats: Mapping[int, Heartbeat]) -> Fault:
        """Name the host; ranks that fell because it was gone, on it or elsewhere, are not to blame."""
        host, words = next(iter(self.lost.items()))
        there = [rank for rank, beat in sorted(beats.items()) if beat.host == host]
        place = f" (rank {there[0]} there: {beats[there[0]].where()})" if there else ""
        reason = f"the way to {host} is lost: {words}{place}"
        say(f"the run failed: {reason}")
        for other in list(self.lost)[1:]:
            say(f"also: the way to {other}: {self.lost[other]}")
        say(f"the whole log: {self.logs / 'launcher.log'}")
        return Fault(1, reason, there[0] if there else None)

    def _to_blame(self, texts: Mapping[int, str]) -> int | None:
        """The rank that the others fell with: killed first, else with an error of its own, else the first to end."""
        if not self.deaths:
            return None
        first = min(death.when for death in self.deaths.values())

        def order(rank: int) -> tuple[bool, bool, float]:
            death = self.deaths[rank]
            killed = _was_killed(death) and death.when - first < TOGETHER_S
            return not killed, death.tidied_up or not _has_cause(texts[rank]), death.when

        return min(self.deaths, key=order)

    def _fell_too(self, death: Death, text: str, first: Death) -> bool:
        # A crash may follow from another's; nobody gets a SIGKILL because a peer is gone.
        killed = _was_killed(death) and (death.status == -signal.SIGKILL or death.when - first.when < TOGETHER_S)
        return killed or (not death.tidied_up and _has_cause(text))

    def _status(self, rank: int | None) -> int:
        """How a rank ended; the launcher's word for it where nobody has seen it."""
        if rank is not None and self.deaths[rank].status is not None:
            return self.deaths[rank].status or 0
        return status_of(self.code)

    def _who(self, rank: int, beats: Mapping[int, Heartbeat]) -> str:
        host = beats[rank].host if rank in beats else host_name()
        return f"rank {rank} on {host}"

    def _cause(self, status: int, beat: Heartbeat | None) -> list[str]:
        """What probably lies behind a signal, with the evidence."""
        if status == -signal.SIGKILL:
            here = beat is None or beat.host == host_name()
            return _killed(self.oom_struck if here else None, beat)
        if status == -signal.SIGBUS:
            return [f"  usually /dev/shm is full: {_shared_memory(beat)}; in a container start it with --shm-size=8g"]
        return []


def _was_killed(death: Death) -> bool:
    """By a signal from elsewhere; not by SIGTERM, by which launchers end the ranks that are left."""
    return (death.status or 0) < 0 and death.status != -signal.SIGTERM and not death.tidied_up


def tell_hang(logs: Path, old_sizes: Mapping[str, int], hang: Hang, *, is_told: bool) -> Fault:
    """Print on stderr which rank the others waited for, if that is not told yet, and where its Python code stands."""
    if not is_told:
        say(f"the run failed: {hang.text}")
    rank = hang.ranks[0]
    log = logs / f"rank-{rank}.log"
    text = _new_text(log, old_sizes)
    for line in last_stack(text) or last_traceback(text):
        say(f"  {line}")
    say(f"the stacks of all ranks: {logs}/rank-*.log")
    return Fault(1, hang.text, rank)


def log_sizes(logs: Path) -> dict[str, int]:
    """Bytes in each log now, so that what earlier runs wrote can be skipped later."""
    return {path.name: path.stat().st_size for path in logs.glob("*.log")}


def status_of(code: int) -> int:
    """The exit status behind a launcher's exit code: negative for a signal.

    DeepSpeed's says 256 - N for signal N, shells, srun and mpirun 128 + N; 255 is what ssh says of itself. Codes that
    would be of a signal that ends nobody are srun's own, as 151 for a node that does not answer.
    """
    for number in (256 - code, code - 128):
        if number in _DEADLY and code != 255:
            return -number
    return code


def describe_status(status: int) -> str:
    """An exit status in words, with the likely cause of a crash."""
    if status == 0:
        return "ended without saying that every rank succeeded"
    if -status not in {member.value for member in signal.Signals}:
        return f"ended with exit code {status}"
    name = signal.Signals(-status)
    cause = _CAUSES.get(name)
    return f"was killed by signal {-status} ({name.name})" + (f"; {cause}" if cause else "")


def last_stack(text: str) -> list[str]:
    """The innermost frames of the stack that a rank's watchdog wrote; nothing if it could not."""
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith(_STACK_MARK)]
    if not starts:
        return []
    frames = []
    for line in lines[starts[-1] + 1 :]:
        if not line.startswith("  "):
            break
        frames.append(line[2:][:LINE_WIDTH])
    return frames[-TRACEBACK_LINES:]


def _killed(oom_struck: bool | None, beat: Heartbeat | None) -> list[str]:
    """Likely causes of a SIGKILL, which leaves no last words."""
    left = "" if beat is None else f" (at its last sign of life {beat.free_memory_gib:.1f} GiB were free)"
    if oom_struck:
        lines = [f"  the kernel's out-of-memory killer struck on this host: host memory ran out{left}"]
        lines.append("  the fix: fewer dataset.workers, zero.offload_* off, fewer ranks on a host, or more memory")
    elif oom_struck is None:
        lines = [f"  usually host memory ran out{left}: `dmesg | tail` on its host says so, or `sacct -j JOB`"]
    else:
        lines = [
            f"  the kernel's oom_kill counter did not move{left}: somebody did it, or a scheduler (`sacct -j JOB`)"
        ]
    if beat is not None and beat.free_shm_gib < LITTLE_GIB:
        lines.append(f"  /dev/shm was nearly full: {_shared_memory(beat)}")
    return lines


def _shared_memory(beat: Heartbeat | None) -> str:
    if beat is not None and beat.host != host_name():
        return f"{beat.free_shm_gib:.2f} GiB were free at its last sign of life"
    try:
        now = shutil.disk_usage("/dev/shm").free / GIB
    except OSError:
        return "there is none"
    then = "" if beat is None else f", {beat.free_shm_gib:.2f} at its last sign of life"
    return f"{now:.2f} GiB free now{then}"


def _place(beat: Heartbeat | None) -> str:
    return "" if beat is None else f" ({beat.where()})"


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


def _is_answer(text: str) -> bool:
    """Whether a rank's log ends with a line of ours that says what is to be changed."""
    lines = text.rstrip().splitlines()
    return bool(lines) and lines[-1].startswith("error: ")


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
