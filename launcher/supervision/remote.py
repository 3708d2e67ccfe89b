"""Stop or kill ranks started by srun, mpirun or pdsh, and read from the launcher's log how they exited."""

import re
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from launcher.supervision.failure_report import decode_exit_code
from launcher.supervision.terminal import ConsoleFile
from launcher.targets.hostfile import Slots, run_over_ssh
from launcher.targets.slurm import Allocation
from trainer.contract.exit_codes import STOP_CODES
from trainer.contract.heartbeat import Heartbeat, read_heartbeats

END_TIMEOUT_S = 20.0
# "mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 9 (Killed)."
_MPIRUN_STATUS = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
# "srun: error: n2: task 1: Killed", "srun: error: n2: tasks 0,2-7: Exited with exit code 1"
_SRUN_STATUS = re.compile(
    r"^srun: error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+?)(?: \(core.*)?)$", re.M
)
# "srun: error: Task launch for StepId=44.0 failed on node n2: Communication connection failure"
_SRUN_UNSTARTED = re.compile(r"^srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M)
# After this line, srun reports tasks that it kills itself.
_SRUN_ENDS = re.compile(r"^srun: (?:forcing job termination|Job step aborted)", re.M)
# "pdsh@login: n2: ssh exited with exit code 247"; also for a host on which no rank started.
_PDSH_STATUS = re.compile(r"^pdsh@\S+: (\S+): ssh exited with exit code (\d+)$", re.M)
# Messages from ssh itself: "n2: ssh: connect to host n2 port 22: Connection refused"
_SSH_MESSAGE = r"^{}: ((?:ssh: |Connection |client_loop: |Timeout|kex_exchange|Host key|\S+: Permission denied).*?)\.?$"
_SSH_ERROR = "255"
# Written by DeepSpeed's launcher on a host once one of its ranks has failed.
_DEEPSPEED_FAILURE = "Killing subprocess"
# "srun: error: n2: task 1: Exited with exit code 1", "srun: error: n2: tasks 0-7: Killed"; also for lost nodes.
_SRUN_FAILURE = re.compile(r"^srun: error: .*?(?:[Tt]ask|Node).*?(?:exit code (\d+))?$", re.M)
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}


class RemoteRanks:
    """Signals ranks through mpirun and parses from its log how they exited; subclasses support srun and ssh."""

    def find_host(self, rank: int) -> str:
        """Return a rank's host, or an empty string if it is unknown."""
        return ""

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> bool:
        """Signal the ranks to save and stop; return False if no rank can be reached yet.

        Signaling one rank is enough, because ranks agree by all-reduce; srun and mpirun forward SIGUSR1 to all ranks.
        """
        process.send_signal(signal.SIGUSR1)
        return True

    def kill(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        """Kill every rank now. srun and mpirun kill them on SIGTERM; SIGKILL would kill only srun or mpirun."""
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)

    def parse_statuses(self, log: str, beats: Mapping[int, Heartbeat]) -> dict[int, int]:
        """Return the exit status (negative for a signal) of each rank reported in the launcher's log."""
        return {int(rank): -int(number) for rank, number in _MPIRUN_STATUS.findall(log)}

    def find_lost_hosts(self, log_before_kill: str, log: str, beats: Mapping[int, Heartbeat]) -> dict[str, str]:
        """Return the evidence for each lost host; `log_before_kill` is the log before this process killed a rank."""
        return {}

    def is_launcher_failure(self, status: int, log: str) -> bool:
        """Return whether the launcher itself failed, given that it exited without reporting a failed rank."""
        return status < 0


class SrunRanks(RemoteRanks):
    """Signals ranks through srun, in an allocation that may lose nodes."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation

    def find_host(self, rank: int) -> str:
        node = rank // self.allocation.ranks_per_node
        return self.allocation.nodes[node] if node < len(self.allocation.nodes) else ""

    def parse_statuses(self, log: str, beats: Mapping[int, Heartbeat]) -> dict[int, int]:
        return {rank: status for rank, status in _parse_srun(_SRUN_ENDS.split(log)[0]).items() if status}

    def find_lost_hosts(self, log_before_kill: str, log: str, beats: Mapping[int, Heartbeat]) -> dict[str, str]:
        unstarted = {host: f"srun could not start its ranks: {reason}" for host, reason in _SRUN_UNSTARTED.findall(log)}
        if unstarted:
            return unstarted
        # srun also reports tasks that it kills itself, unless the slurmstepd on their node has died.
        statuses = _parse_srun(log)
        silent = [beat.host for rank, beat in beats.items() if beat.exit_code is None and rank not in statuses]
        evidence = "srun does not know how its ranks exited, because their slurmstepd has died"
        return dict.fromkeys(silent, evidence) if statuses and _SRUN_ENDS.search(log) else {}

    def is_launcher_failure(self, status: int, log: str) -> bool:
        # run_until_launcher_exits.py returns 128 + N for signal N. So does srun for a task, but then it logs the task.
        return status < 0 or (status > 128 and not _parse_srun(log))


class SshRanks(RemoteRanks):
    """Signals ranks over ssh, because pdsh does not forward signals. Ranks are numbered in the order of `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._hosts = list(slots)
        self._hosts_by_rank = [host for host, gpus in slots.items() for _ in gpus]

    def find_host(self, rank: int) -> str:
        return self._hosts_by_rank[rank] if rank < len(self._hosts_by_rank) else ""

    def stop(self, process: subprocess.Popen[bytes], logs: Path) -> bool:
        alive = [beat for _, beat in sorted(read_heartbeats(logs).items()) if beat.exit_code is None]
        beat = next((beat for beat in alive if self.find_host(beat.rank)), None)
        if beat is not None:
            run_over_ssh(self.find_host(beat.rank), f"kill -USR1 {beat.pid}")
        return beat is not None

    def kill(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        if process.poll() == 0:
            return  # the ranks on every host have exited
        # Match ranks, and launchers that have not started ranks yet, by the run's console file. Do not match their
        # `deepspeed` and pdsh parents, in case this host is in the hostfile.
        console = re.sub(r"[^\w/]", ".", str(ConsoleFile.get_path(logs)))
        pattern = f"^[^ ]*python[^ ]* -u -m (deepspeed.launcher.launch|trainer.train) .*--console {console}"
        with ThreadPoolExecutor(max_workers=64) as pool:
            list(pool.map(lambda host: run_over_ssh(host, f"pkill -KILL -f '{pattern}'"), self._hosts))

    def parse_statuses(self, log: str, beats: Mapping[int, Heartbeat]) -> dict[int, int]:
        statuses: dict[int, int] = {}
        for label, code in _PDSH_STATUS.findall(log):
            ranks = [rank for rank, host in enumerate(self._hosts_by_rank) if _matches_host(label, host)]
            silent = [rank for rank in ranks if rank in beats and beats[rank].exit_code is None]
            if silent and decode_exit_code(int(code)) < 0:
                # A host's launcher reports the rank that exited first: the one with the oldest heartbeat.
                statuses[min(silent, key=lambda rank: beats[rank].time)] = decode_exit_code(int(code))
        return statuses

    def find_lost_hosts(self, log_before_kill: str, log: str, beats: Mapping[int, Heartbeat]) -> dict[str, str]:
        # Only `log_before_kill`, because ssh also returns 255 when this launcher kills a host's launcher.
        labels = [label for label, code in _PDSH_STATUS.findall(log_before_kill) if code == _SSH_ERROR]
        messages = {label: re.findall(_SSH_MESSAGE.format(re.escape(label)), log_before_kill, re.M) for label in labels}
        return {
            host: messages[label][-1] if messages[label] else f"ssh exited with code {_SSH_ERROR}"
            for label in labels
            for host in self._hosts
            if _matches_host(label, host)
        }

    def is_launcher_failure(self, status: int, log: str) -> bool:
        # DeepSpeed returns 256 - N if signal N killed pdsh or a rank; pdsh writes a line only for a rank.
        return status < 0 or not _PDSH_STATUS.search(log)


def _parse_srun(log: str) -> dict[int, int]:
    """Return each rank's exit status in srun's log: negative for a signal, 0 for an unknown signal."""
    statuses: dict[int, int] = {}
    for ranks, code, description in _SRUN_STATUS.findall(log):
        status = int(code) if code else -_SIGNALS.get(description, 0)
        for part in ranks.split(","):
            first, _, last = part.partition("-")
            statuses |= dict.fromkeys(range(int(first), int(last or first) + 1), status)
    return statuses


def _matches_host(label: str, host: str) -> bool:
    """Return whether a pdsh label refers to this host. Labels omit the user, and the domain if all hosts share it."""
    name = host.rpartition("@")[2]
    return label == name or name.startswith(label + ".")


class LauncherLog:
    """Reads what the ranks' launcher has written to its log since `skip_existing_output`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = 0
        self._text = ""
        self.text_before_end = ""
        """Text at the first failure or stop, before this process killed any rank."""

    def skip_existing_output(self) -> None:
        self._start = self._path.stat().st_size

    def has_failure(self) -> bool:
        """Return whether the log reports a failed rank or host; an incomplete last line is ignored."""
        lines = self.read().rpartition("\n")[0]
        codes = [code for _, code in _PDSH_STATUS.findall(lines)] + _SRUN_FAILURE.findall(lines)
        return _DEEPSPEED_FAILURE in lines or any(int(code or 1) not in STOP_CODES for code in codes)

    def read(self) -> str:
        """Return the log's text, or the text of the last successful read if the file cannot be read."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._start)
            self._text = file.read().decode(errors="replace")
        return self._text
