"""Choose the hosts and GPUs of a run: read the hostfile, apply filters, and check that ssh reaches the hosts.

A hostfile has a line per host, `gpu-a slots=8`; `#` begins a comment. `--include` and `--exclude` have DeepSpeed's
syntax: `gpu-a@gpu-b:0,2` means all GPUs of gpu-a, and GPUs 0 and 2 of gpu-b.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trainer.config import UserError
from trainer.config.errors import to_text
from trainer.config.files import UnreadableFileError, read_text

Slots = dict[str, list[int]]
"""Host -> indices of its GPUs, in rank order."""
SSH_TIMEOUT_S = 15
SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_TIMEOUT_S}")
_ENTRY = re.compile(r"(\S+)\s+slots=([0-9]{1,4})\s*(?:#.*)?")
_NAME = re.compile(r"[\w.][\w.-]*(@[\w.-]+)?")


def read_hostfile(path: Path) -> Slots:
    """Return the slots of a hostfile. Raises UserError for a missing or empty file and invalid or repeated entries."""
    slots: Slots = {}
    try:
        lines = read_text(path).splitlines()
    except (FileNotFoundError, UnreadableFileError) as error:
        reason = getattr(error, "problem", "no such file")
        raise UserError(f"--hostfile {path}: {reason}; write one line per host, `gpu-a slots=8`") from None
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(text)
        if entry is None or not _NAME.fullmatch(entry[1]) or int(entry[2]) == 0:
            raise UserError(f"--hostfile {path}: line {number} is {to_text(text)!r}; it must look like `gpu-a slots=8`")
        if entry[1] in slots:
            raise UserError(f"--hostfile {path}: line {number} names {entry[1]} again; keep one line per host")
        slots[entry[1]] = list(range(int(entry[2])))
    if not slots:
        raise UserError(f"--hostfile {path}: names no host; write one line per host, `gpu-a slots=8`")
    return slots


def filter_slots(
    slots: Slots,
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> Slots:
    """Return the slots that pass the filters. Raises UserError for unknown hosts or GPUs, and if no slot passes."""
    if include is not None and exclude is not None:
        raise UserError("--include and --exclude cannot be combined; remove one")
    if include is not None:
        chosen = _parse_filter("--include", include, slots)
        slots = {host: chosen[host] for host in slots if host in chosen}
    if exclude is not None:
        excluded = _parse_filter("--exclude", exclude, slots)
        remaining = {host: [gpu for gpu in gpus if gpu not in excluded.get(host, ())] for host, gpus in slots.items()}
        slots = {host: gpus for host, gpus in remaining.items() if gpus}
        if not slots:
            raise UserError(f"--exclude {exclude}: leaves no GPU; exclude fewer")
    if num_nodes is not None:
        if not 1 <= num_nodes <= len(slots):
            raise UserError(f"--num-nodes {num_nodes}: must be 1 to {len(slots)}, the number of hosts in use")
        slots = dict(list(slots.items())[:num_nodes])
    if num_gpus is not None:
        if short := [host for host, gpus in slots.items() if not 1 <= num_gpus <= len(gpus)]:
            raise UserError(
                f"--num-gpus {num_gpus}: must be 1 to {len(slots[short[0]])}, the number of GPUs of {short[0]}"
            )
        slots = {host: gpus[:num_gpus] for host, gpus in slots.items()}
    return slots


def check_reachable(hosts: Sequence[str], folder: Path) -> None:
    if problems := detect_unreachable_hosts(hosts, folder):
        raise UserError("--hostfile: " + "; ".join(f"{host}: {problem}" for host, problem in problems.items()))


def detect_unreachable_hosts(hosts: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the problem with each host that ssh cannot reach, or on which this Python or `folder` is missing."""
    command = f"test -x {shlex.quote(sys.executable)} && cd {shlex.quote(str(folder))}"
    with ThreadPoolExecutor(max_workers=64) as pool:
        problems = pool.map(lambda host: _detect_ssh_problem(host, command), hosts)
        return {host: problem for host, problem in zip(hosts, problems, strict=True) if problem is not None}


def run_over_ssh(host: str, command: str) -> None:
    """Run a shell command on a host over ssh, ignoring failures and timeouts."""
    with suppress(subprocess.TimeoutExpired):  # ranks on that host cannot be running either
        subprocess.run([*SSH, host, command], stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * SSH_TIMEOUT_S)


def _detect_ssh_problem(host: str, command: str) -> str | None:
    try:
        result = subprocess.run(
            [*SSH, host, command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3 * SSH_TIMEOUT_S
        )
    except FileNotFoundError:
        return "ssh is missing on this machine; install openssh-client"
    except subprocess.TimeoutExpired:
        return f"ssh does not respond within {3 * SSH_TIMEOUT_S} s"
    if result.returncode == 255:
        output = result.stderr.strip().splitlines() or ["no reason given"]
        return f"not reachable by ssh without a password ({output[-1]}); try `ssh {host} hostname`"
    if result.returncode:
        return f"{sys.executable} or this folder is missing; use a shared file system"
    return None


def _parse_filter(option: str, text: str, slots: Slots) -> Slots:
    chosen: Slots = {}
    for word in text.split("@"):
        host, _, numbers = word.partition(":")
        if host not in slots:
            raise UserError(f"{option} {text}: {host or 'an empty name'} must be one of {', '.join(slots)}")
        gpus = numbers.split(",") if ":" in word else [str(gpu) for gpu in slots[host]]
        for gpu in gpus:
            if not gpu.isdigit() or int(gpu) not in slots[host]:
                raise UserError(f"{option} {text}: {host} has no slot {gpu!r}; use 0 to {max(slots[host])}")
        chosen[host] = sorted({*chosen.get(host, ()), *map(int, gpus)})
    return chosen
