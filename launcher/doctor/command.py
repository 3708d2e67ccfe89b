"""`zerolora doctor`: find problems that would stop or slow down a run, and suggest a fix for each."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from launcher.doctor.this_host import (
    check_build_locks,
    check_bytecode,
    check_driver,
    check_folders,
    check_memory,
    check_packages,
    check_port,
)
from launcher.plan import CPU_RANK_VARIABLES, ENVIRONMENT_FILE, LaunchRequest, plan_launch, select_slots
from launcher.supervision.processes import kill_sessions
from launcher.supervision.remote import SshRanks
from launcher.targets.hostfile import SSH, detect_unreachable_hosts
from launcher.targets.local import Command, select_exported_variables, write_environment
from launcher.targets.slurm import read_allocation
from trainer.config import LoadedConfig, UserError, load_config
from trainer.config.errors import format_count, sanitize
from trainer.config.files import UnreadableFileError, parse_json
from trainer.contract.default_ranks import CPU_RANKS, is_in_allocation, list_visible_gpus
from trainer.contract.json_records import RESULT_PREFIX, CheckResult
from trainer.contract.rendezvous import get_host_name
from trainer.contract.standard_streams import PROGRESS

PROBE_TIMEOUT_S = 300.0
RANKS_TIMEOUT_S = 300.0
LAST_OUTPUT_S = 10.0
POLL_S = 0.1
LINE_WIDTH = 100
COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
HOST_TIMEOUT_S = 300.0


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Settings to override.")] = None,
    launcher: Annotated[str, typer.Option(help="auto, local, hostfile, slurm or mpi, as for train.")] = "auto",
    hostfile: Annotated[Path | None, typer.Option(help="File of hosts, one per line: `gpu-a slots=8`.")] = None,
    include: Annotated[str | None, typer.Option(help="Hosts or GPUs to use, as for train.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Hosts or GPUs to exclude, as for train.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="The first N hosts.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="Ranks per host.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Rendezvous host.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Rendezvous port.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    only_here: Annotated[bool, typer.Option(hidden=True, help="Check only this machine and print JSON.")] = False,
) -> None:
    """Check everything that a run needs. Print a fix for each problem, and exit with code 1 if a check fails."""
    loaded = load_config(config, overrides or []) if config is not None else None
    arguments = [] if config is None else [str(config), *(overrides or [])]
    if only_here:
        checks = check_this_host(loaded, arguments, num_gpus or len(list_visible_gpus()) or CPU_RANKS, port=None)
        typer.echo(f"{RESULT_PREFIX}{get_host_name()} {json.dumps([asdict(check) for check in checks])}")
        return
    request = LaunchRequest(launcher, hostfile, include, exclude, num_nodes, num_gpus, master_addr, master_port)
    checks = run_checks(loaded, arguments, request)
    print_checks(checks, as_json=as_json)
    raise typer.Exit(1 if any(check.state == "FAIL" for check in checks) else 0)


def run_checks(loaded: LoadedConfig | None, arguments: Sequence[str], request: LaunchRequest) -> list[CheckResult]:
    chosen = request.resolve_launcher()
    if request.hostfile is not None:
        select_slots(request)  # raises UserError before the checks, which take seconds
    PROGRESS.show("checking this machine", on_pipe=True)
    per_host = request.num_gpus or len(list_visible_gpus()) or CPU_RANKS
    num_gpus = [] if request.num_gpus is None else [f"--num-gpus={request.num_gpus}"]
    checks = check_this_host(loaded, arguments, per_host, port=request.master_port)
    checks += _check_other_hosts(chosen, request, [*arguments, *num_gpus])
    if any(check.name == "ssh" and check.state == "FAIL" for check in checks):
        return [
            *checks,
            CheckResult("ranks", "WARN", "not tested, because ssh cannot start them", "fix the problems above"),
        ]
    if any(check.name == "port" and check.state == "FAIL" for check in checks):
        request = replace(request, master_port=None)  # test the rest on another port
    with tempfile.TemporaryDirectory() as folder:
        try:
            build, remote = plan_launch(request, Path(folder))
            command = build(arguments, module="trainer.commands.doctor.ranks")
        except UserError as error:
            return [*checks, CheckResult("ranks", "FAIL", str(error), "see the message")]
        if isinstance(remote, SshRanks):
            write_environment(Path(folder) / ENVIRONMENT_FILE, CPU_RANK_VARIABLES | os.environ)
        return checks + check_ranks(command)


def check_this_host(
    loaded: LoadedConfig | None, arguments: Sequence[str], ranks: int, *, port: int | None
) -> list[CheckResult]:
    config = None if loaded is None else loaded.config
    checks = [*check_packages(), check_bytecode(), *check_driver(), *check_build_locks(), check_port(port)]
    probed, need = run_probe(arguments, ranks)
    return [
        *checks, *probed, *check_folders(config, need), *check_memory(ranks, need, on_gpus=bool(list_visible_gpus()))
    ]  # fmt: skip


def _check_other_hosts(launcher: str, request: LaunchRequest, arguments: Sequence[str]) -> list[CheckResult]:
    command = [sys.executable, "-m", "launcher.cli", "doctor", *arguments, "--only-here"]
    if launcher == "slurm":
        if not is_in_allocation(os.environ) or "SLURM_JOB_NODELIST" not in os.environ:
            return []
        allocation = read_allocation(
            os.environ, include=request.include, exclude=request.exclude, num_nodes=request.num_nodes
        )
        srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"]
        return _run_on_hosts({node: [*srun, f"--nodelist={node}", *command] for node in allocation.nodes})
    if request.hostfile is None:
        return []
    ssh_checks = list(check_ssh(list(select_slots(request))))
    settings = [f"{name}={value}" for name, value in select_exported_variables(os.environ).items()]
    line = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(['env', *settings, *command])}"
    reached = [check.host for check in ssh_checks if check.state == "OK"]
    return [*ssh_checks, *_run_on_hosts({host: [*SSH, host, line] for host in reached})]


def run_probe(arguments: Sequence[str], ranks: int) -> tuple[list[CheckResult], dict[str, int]]:
    """Run the checks that need torch in a child process; return them and the estimated memory and disk use in bytes."""
    PROGRESS.show("checking this machine")
    argv = (sys.executable, "-m", "trainer.commands.doctor.probe", *arguments, "--ranks", str(ranks))
    output, problem = _run_json_command(Command(argv, 1, {}, ()), PROBE_TIMEOUT_S)
    if output is None:
        return [
            CheckResult("torch", "FAIL", problem, "run `python -m trainer.commands.doctor.probe` to see all output")
        ], {}
    return [CheckResult(**check) for check in output["checks"]], output["need"]


def check_ranks(command: Command) -> list[CheckResult]:
    PROGRESS.show(f"starting {format_count(command.ranks, 'rank')} to test their connections")
    output, problem = _run_json_command(command, RANKS_TIMEOUT_S)
    if output is None:
        return [CheckResult("ranks", "FAIL", problem, f"to see all output, run {command.format_shell()}")]
    return [CheckResult(**check) for check in output["checks"]]


def _run_json_command(command: Command, timeout_s: float) -> tuple[Any, str]:
    """Run a command; return (JSON printed after RESULT_PREFIX, ""), or (None, error message) if it fails."""
    with tempfile.TemporaryFile() as output:
        processes = command.start(output, output)
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.returncode for process in processes):  # other ranks cannot finish without the failed one
                deadline = min(deadline, time.monotonic() + LAST_OUTPUT_S)
            time.sleep(POLL_S)
        still_running = [process for process in processes if process.poll() is None]
        for process in still_running:
            process.terminate()  # makes srun and mpirun stop their ranks
        kill_sessions([process.pid for process in processes])
        codes = [process.wait() for process in processes]
        output.seek(0)
        printed = output.read().decode(errors="replace")
    for line in printed.splitlines():
        if RESULT_PREFIX in line:
            with suppress(ValueError):  # srun may split lines
                return json.loads(line.partition(RESULT_PREFIX)[2].rpartition("}")[0] + "}"), ""
    lines = [line.strip("- ") for line in printed.splitlines() if line.strip("- ")] or ["no output"]
    errors = [line for line in lines if "Error" in line][-1:] or lines[:2]
    if len(still_running) == len(processes):
        return None, f"no response within {timeout_s:g} s"
    return None, f"exit code {next((code for code in codes if code), 0)}: {' '.join(errors)[:300]}"


def print_checks(checks: Iterable[CheckResult], *, as_json: bool) -> None:
    """Print the checks as a table, or as one JSON object with `checks` and their `counts` by state."""
    listed = list(checks)
    counts = {state: sum(check.state == state for check in listed) for state in COLORS}
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in listed], "counts": counts}, indent=1))
        return
    console = Console(highlight=False, width=min(shutil.get_terminal_size((LINE_WIDTH, 25)).columns, LINE_WIDTH))
    columns = (Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"))
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    # There may be hundreds of other hosts, so list only their problems.
    passed = {check.host: 0 for check in listed if check.host}
    for check in listed:
        if check.host and check.state == "OK":
            passed[check.host] += 1
            continue
        name = f"{check.host}: {check.name}" if check.host else check.name
        label = "better" if check.state == "OK" else "fix"
        fix = f"\n[bold]{label}:[/bold] {escape(sanitize(check.fix))}" if check.fix else ""
        table.add_row(
            f"[{COLORS[check.state]}]{check.state}[/]", escape(sanitize(name)), escape(sanitize(check.found)) + fix
        )
    for host, count in passed.items():
        table.add_row("[green]OK[/]", escape(host), f"{count} checks passed")
    console.print(table)
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()))


def check_ssh(hosts: Sequence[str]) -> Iterator[CheckResult]:
    """Check that ssh reaches every host without a password, and that this Python and working directory exist there."""
    problems = detect_unreachable_hosts(hosts, Path.cwd())
    for host in hosts:
        if host in problems:
            fix = f"`ssh {host} hostname` must work without a password"
            yield CheckResult("ssh", "FAIL", problems[host], fix, host)
        else:
            yield CheckResult("ssh", "OK", "reachable; Python and working directory found", host=host)


def _run_on_hosts(commands: Mapping[str, Sequence[str]]) -> list[CheckResult]:
    """Run `zerolora doctor` on each host with its command; return the checks from all hosts except this one."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        results = list(pool.map(_run_captured, commands.values()))
    checks: list[CheckResult] = []
    for host, result in zip(commands, results, strict=True):
        output = result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}"
        problem = f"`zerolora doctor` returned no results: {output.splitlines()[-1][:300]}"
        checks += parse_doctor_output(result.stdout, host) or [
            CheckResult("doctor", "FAIL", problem, "run `zerolora doctor` on that host", host)
        ]
    return [check for check in checks if check.host != get_host_name()]


def parse_doctor_output(output: str, host: str) -> list[CheckResult]:
    """Return the checks that `zerolora doctor` printed after RESULT_PREFIX, or [] if they are missing or invalid."""
    with suppress(UnreadableFileError):
        name, _, text = output.rpartition(RESULT_PREFIX)[2].partition("\n")[0].partition(" ")
        return [replace(check, host=name) for check in parse_json(text, Path(host), list[CheckResult])]
    return []


def _run_captured(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=HOST_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no response within {HOST_TIMEOUT_S:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
