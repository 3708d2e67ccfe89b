"""Checks of `zerolora doctor` for other hosts."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from launcher.targets.hostfile import SSH, check_reachable
from launcher.targets.local import exported_variables
from launcher.targets.slurm import Allocation
from trainer.config import UserError
from trainer.config.files import UnreadableFile, parse_json
from trainer.contract.json_records import MARK, Check
from trainer.contract.rendezvous import host_name

# srun forwards lines in pieces of 1,024 bytes, interleaved with those of other nodes.
PIECE = 400
_PIECE = re.compile(rf"{MARK}(\S+) ([0-9]{{1,9}}) ([0-9]{{1,9}}) (\S+)[ \t]*$", re.M)
HOST_PATIENCE_S = 300.0


def check_ssh(hosts: Sequence[str]) -> Iterator[Check]:
    """Check that ssh reaches every host without a password, and that this Python and folder exist there."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        yield from pool.map(_check_host, hosts)


def _check_host(host: str) -> Check:
    try:
        check_reachable([host], Path.cwd())
    except UserError as error:
        problem = str(error).partition(f"{host}: ")[2]
        return Check("ssh", "FAIL", problem, f"`ssh {host} hostname` must work without a password", host)
    return Check("ssh", "OK", "reachable, with the same Python and folder", host=host)


def ask_by_ssh(hosts: Sequence[str], arguments: Sequence[str]) -> list[Check]:
    """Run the doctor on each of these hosts except this one, and return its checks."""
    variables = exported_variables(os.environ)
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    line = f"cd {shlex.quote(str(Path.cwd()))} && env {settings} {shlex.join(_local_doctor_command(arguments))}"
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = list(pool.map(lambda host: _run([*SSH, host, line]), hosts))
    checks: list[Check] = []
    for host, done in zip(hosts, answers, strict=True):
        fix = "run `zerolora doctor` there"
        failed = Check("doctor", "FAIL", f"does not run there: {_last_line(done)}", fix, host)
        checks += parse_answers(done.stdout) or [failed]
    return [check for check in checks if check.host != host_name()]


def ask_by_srun(allocation: Allocation, arguments: Sequence[str]) -> list[Check]:
    """Run the doctor on every node of an allocation except this one, and return its checks."""
    count = len(allocation.nodes)
    srun = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--mpi=none"]
    done = _run([*srun, f"--nodelist={','.join(allocation.nodes)}", *_local_doctor_command(arguments)])
    checks = parse_answers(done.stdout)
    silent = set(allocation.nodes) - {check.host for check in checks}
    checks += [Check("doctor", "FAIL", f"does not run there: {_last_line(done)}", "sinfo -R", node) for node in silent]
    return [check for check in checks if check.host != host_name()]


def _local_doctor_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "launcher.cli", "doctor", *arguments, "--only-here"]


def format_answers(host: str, checks: Sequence[Check]) -> Iterator[str]:
    """Encode checks as short lines, which arrive whole among the output of other hosts."""
    text = base64.b64encode(json.dumps([asdict(check) for check in checks]).encode()).decode()
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    for number, piece in enumerate(pieces):
        yield f"{MARK}{host} {number} {len(pieces)} {piece}"


def parse_answers(printed: str) -> list[Check]:
    """Return the checks that doctors on other hosts printed, without hosts with missing or damaged lines."""
    pieces: dict[tuple[str, int], dict[int, str]] = {}
    for host, number, count, piece in _PIECE.findall(printed):
        pieces.setdefault((host, int(count)), {})[int(number)] = piece
    checks: list[Check] = []
    for (host, count), found in pieces.items():
        with suppress(ValueError, UnreadableFile):
            text = (
                base64.b64decode("".join(found[number] for number in sorted(found))) if len(found) == count else b"[]"
            )
            checks += [replace(check, host=host) for check in parse_json(text, Path(host), list[Check])]
    return checks


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=HOST_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {HOST_PATIENCE_S:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    said = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1][:300]
