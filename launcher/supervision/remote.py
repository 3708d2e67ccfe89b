"""How ranks on other hosts are told to stop, how they are ended, and what their launcher says of how they ended."""

import re
import signal
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from launcher.supervision.failure_report import status_of
from launcher.supervision.terminal import ConsoleFile
from launcher.targets.hostfile import Slots, run_on
from launcher.targets.slurm import Allocation, slurmd_timeout
from trainer.contract.heartbeat import Heartbeat, read_heartbeats

END_PATIENCE_S = 20.0
# "mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 9 (Killed)."
_MPIRUN_WORDS = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
# "srun: error: n2: task 1: Killed", "srun: error: n2: tasks 0,2-7: Exited with exit code 1"
_SRUN_WORDS = re.compile(
    r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+?)(?: \(core.*)?)$", re.M
)
# "srun: error: Task launch for StepId=44.0 failed on node n2: Communication connection failure"
_SRUN_UNSTARTED = re.compile(r"^srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M)
# From here on srun tells of tasks that it ends itself.
_SRUN_ENDS = re.compile(r"^srun: (?:forcing job termination|Job step aborted)", re.M)
# "pdsh@login: n2: ssh exited with exit code 247"
_PDSH_WORDS = re.compile(r"^pdsh@\S+: (\S+): ssh exited with exit code (\d+)$", re.M)
# What ssh itself says: "n2: ssh: connect to host n2 port 22: Connection refused"
_SSH_WORDS = r"^{}: ((?:ssh: |Connection |client_loop: |Timeout|kex_exchange|Host key|\S+: Permission denied).*?)\.?$"
_OF_SSH = "255"
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}


class Reach(Protocol):
    """The way from the launcher's process to the ranks below it."""

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> bool:
        """Tell the ranks to save and stop; False if there is none yet that could be told.

        One that hears it is enough, for they agree by all-reduce.
        """

    def end(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        """End every rank now."""

    def host_of(self, rank: int) -> str:
        """The host that a rank was dealt out to; empty where that is not known."""

    def awaited(self) -> str:
        """What tells of the end of a host that has fallen silent."""

    def statuses(self, log: str, beats: Mapping[int, Heartbeat]) -> dict[int, int]:
        """Rank -> how it ended, negative for a signal, as far as the launcher's log tells."""

    def lost(self, before: str, log: str, beats: Mapping[int, Heartbeat]) -> dict[str, str]:
        """Host to which the way was lost -> how that shows: in the log, and in it `before` anything was ended here."""

    def is_own_end(self, status: int, log: str) -> bool:
        """Whether a launcher that has ended with this status before anybody told of a failure fell itself."""


class ThroughLauncher:
    """srun and mpirun pass SIGUSR1 on to all ranks, and end them on SIGTERM."""

    def host_of(self, rank: int) -> str:
        return ""

    def awaited(self) -> str:
        return "waiting for its launcher to say so"

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> bool:
        process.send_signal(signal.SIGUSR1)
        return True

    def end(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        # SIGKILL would end the launcher alone.
        process.terminate()
        deadline = time.monotonic() + END_PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def statuses(self, log: str, beats: Mapping[int, Heartbeat]) -> dict[int, int]:
        return {int(rank): -int(number) for rank, number in _MPIRUN_WORDS.findall(log)}

    def lost(self, before: str, log: str, beats: Mapping[int, Heartbeat]) -> dict[str, str]:
        return {}

    def is_own_end(self, status: int, log: str) -> bool:
        return status < 0


class ThroughSrun(ThroughLauncher):
    """srun, in an allocation whose nodes may be lost."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation

    def host_of(self, rank: int) -> str:
        node = rank // self.allocation.ranks_per_node
        return self.allocation.nodes[node] if node < len(self.allocation.nodes) else ""

    def awaited(self) -> str:
        return f"SLURM gives a lost node up after its SlurmdTimeout ({slurmd_timeout()}); waiting for that"

    def statuses(self, log: str, beats: Mapping[int, Heartbeat]) -> dict[int, int]:
        told = _of_srun(_SRUN_ENDS.split(log)[0])
        return {rank: status for rank, status in told.items() if status}

    def lost(self, before: str, log: str, beats: Mapping[int, Heartbeat]) -> dict[str, str]:
        unstarted = {host: f"srun could not start its ranks: {words}" for host, words in _SRUN_UNSTARTED.findall(log)}
        if unstarted:
            return unstarted
        # What srun ends itself it tells of too, unless nobody is left on the node who would.
        told = _of_srun(log)
        mute = [beat.host for rank, beat in beats.items() if beat.exit_code is None and rank not in told]
        words = "srun was not told how its ranks ended; the slurmstepd above them is gone"
        return dict.fromkeys(mute, words) if told and _SRUN_ENDS.search(log) else {}

    def is_own_end(self, status: int, log: str) -> bool:
        # Its keeper (tied.py) makes 128 + N of signal N, and so does srun itself of a task's, of which it then tells.
        return status < 0 or (status > 128 and not _of_srun(log))


class ThroughSsh:
    """pdsh passes nothing on: each host is asked by ssh. Ranks are dealt out in the order of `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._hosts = list(slots)
        self._host_of_rank = [host for host, gpus in slots.items() for _ in gpus]

    def host_of(self, rank: int) -> str:
        return self._host_of_rank[rank] if rank < len(self._host_of_rank) else ""

    def awaited(self) -> str:
        return "waiting for its connection to end"

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> bool:
        alive = [beat for _, beat in sorted(read_heartbeats(logs).items()) if beat.exit_code is None]
        beat = next((beat for beat in alive if self.host_of(beat.rank)), None)
        if beat is not None:
            run_on(self.host_of(beat.rank), f"kill -USR1 {beat.pid}")
        return beat is not None

    def end(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        if process.poll() == 0:
            return  # every launcher has seen its ranks end
        # Known by the run's own console file are its ranks, and the launchers that have not started theirs yet. Not the
        # `deepspeed` and pdsh above them, should this host be one of the file.
        console = re.sub(r"[^\w/]", ".", str(ConsoleFile.path_in(logs)))
        pattern = f"^[^ ]*python[^ ]* -u -m (deepspeed.launcher.launch|trainer.train) .*--console {console}"
        with ThreadPoolExecutor(max_workers=64) as pool:
            list(pool.map(lambda host: run_on(host, f"pkill -KILL -f '{pattern}'"), self._hosts))

    def statuses(self, log: str, beats: Mapping[int, Heartbeat]) -> dict[int, int]:
        told: dict[int, int] = {}
        for label, code in _PDSH_WORDS.findall(log):
            ranks = [rank for rank, host in enumerate(self._host_of_rank) if _is_label(label, host)]
            mute = [rank for rank in ranks if rank in beats and beats[rank].exit_code is None]
            if mute and status_of(int(code)) < 0:
                # A host's launcher tells of one rank, the first that ended, and so the first that fell silent.
                told[min(mute, key=lambda rank: beats[rank].time)] = status_of(int(code))
        return told

    def lost(self, before: str, log: str, beats: Mapping[int, Heartbeat]) -> dict[str, str]:
        # Ended here, a host's launcher is killed, of which ssh makes 255 as well.
        labels = [label for label, code in _PDSH_WORDS.findall(before) if code == _OF_SSH]
        said = {label: re.findall(_SSH_WORDS.format(re.escape(label)), before, re.M) for label in labels}
        return {
            host: said[label][-1] if said[label] else f"ssh ended with exit code {_OF_SSH}"
            for label in labels
            for host in self._hosts
            if _is_label(label, host)
        }

    def is_own_end(self, status: int, log: str) -> bool:
        # DeepSpeed's above it makes 256 - N of a pdsh that signal N has killed, as of a rank: of that pdsh has a line.
        return status < 0 or not _PDSH_WORDS.search(log)


def _of_srun(log: str) -> dict[int, int]:
    """Rank -> how it ended, 0 where srun says it in words that are not known here."""
    told: dict[int, int] = {}
    for ranks, code, words in _SRUN_WORDS.findall(log):
        status = int(code) if code else -_SIGNALS.get(words, 0)
        for part in ranks.split(","):
            first, _, last = part.partition("-")
            told |= dict.fromkeys(range(int(first), int(last or first) + 1), status)
    return told


def _is_label(label: str, host: str) -> bool:
    """Whether pdsh means this host of the file: it leaves out the user, and a domain that all hosts have."""
    name = host.rpartition("@")[2]
    return label == name or name.startswith(label + ".")
