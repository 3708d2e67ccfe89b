"""`zerolora doctor`: what would keep a run from starting or slow it down, each with its fix, before it starts."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launcher.become import become_module
from launcher.doctor.other_hosts import MARK, answer_lines, ask_by_srun, ask_by_ssh, check_mpi, check_srun, check_ssh
from launcher.doctor.this_host import (
    Check,
    Need,
    check_driver,
    check_folders,
    check_locks,
    check_memory,
    check_packages,
    check_port,
    check_timeouts,
)
from launcher.plan import ENVIRONMENT_FILE, OF_CPU_RANKS, Request, plan
from launcher.supervision.processes import end_sessions
from launcher.supervision.remote import ThroughSsh
from launcher.targets.environment import write_environment
from launcher.targets.hostfile import choose_slots, read_hostfile
from launcher.targets.local import Command
from launcher.targets.slurm import read_allocation
from trainer.config import LoadedConfig, UserError, load_config
from trainer.config.errors import printable
from trainer.contract.default_ranks import CPU_RANKS, in_allocation, visible_gpus
from trainer.contract.rank_variables import host_name
from trainer.contract.standard_streams import PROGRESS

PROBE_PATIENCE_S = 300.0
RANKS_PATIENCE_S = 300.0
LAST_WORDS_S = 10.0
POLL_S = 0.1
LINE_WIDTH = 100
COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The YAML file of the run.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    launcher: Annotated[str, typer.Option(help="auto, local, hostfile, slurm or mpi, as for train.")] = "auto",
    hostfile: Annotated[Path | None, typer.Option(help="A line per host: `gpu-a slots=8`.")] = None,
    include: Annotated[str | None, typer.Option(help="Hosts and GPUs to use, as for train.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Hosts and GPUs to leave out.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="The first N hosts.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="Ranks on each host.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address at which the ranks are to meet.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port at which the ranks are to meet.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    patches: Annotated[bool, typer.Option(help="Only list what is replaced in the libraries, and why.")] = False,
    only_here: Annotated[bool, typer.Option(hidden=True, help="This machine alone, as a line of JSON.")] = False,
) -> None:
    """Check everything that a run needs: exit code 1 if something will fail, with its fix."""
    if patches:
        become_module("trainer.patches.register", ["--json"] * as_json)
    loaded = load_config(config, overrides or []) if config is not None else None
    arguments = [] if config is None else [str(config), *(overrides or [])]
    if only_here:
        checks = check_this_host(loaded, arguments, num_gpus or len(visible_gpus()) or CPU_RANKS, port=None)
        for line in answer_lines(host_name(), checks):
            typer.echo(line)
        return
    request = Request(launcher, hostfile, include, exclude, num_nodes, num_gpus, master_addr, master_port)
    checks = run_checks(loaded, arguments, request)
    show(checks, as_json=as_json)
    raise typer.Exit(1 if any(check.state == "FAIL" for check in checks) else 0)


def run_checks(loaded: LoadedConfig | None, arguments: Sequence[str], request: Request) -> list[Check]:
    """This host, the way to the others, the others, and all ranks together, as far as each can be had."""
    chosen = request.chosen_launcher()
    per_host = request.num_gpus or len(visible_gpus()) or CPU_RANKS
    checks = check_this_host(loaded, arguments, per_host, port=request.master_port)
    way, others = _other_hosts(chosen, request, [*arguments, *_num_gpus(request)])
    checks += [*way, *others]
    if any(check.state == "FAIL" for check in way) or (chosen == "slurm" and not in_allocation(os.environ)):
        return [*checks, Check("ranks", "WARN", "not tested: they cannot be started", "see the lines above")]
    if any(check.name == "port" and check.state == "FAIL" for check in checks):
        request = replace(request, master_port=None)  # the rest can be tested at another one
    with tempfile.TemporaryDirectory() as folder:
        try:
            build, reach = plan(request, Path(folder))
            command = build(arguments, module="trainer.commands.doctor.ranks")
        except UserError as error:
            return [*checks, Check("ranks", "FAIL", str(error), "as it says")]
        if isinstance(reach, ThroughSsh):
            write_environment(Path(folder) / ENVIRONMENT_FILE, OF_CPU_RANKS | os.environ)
        return checks + measure_ranks(command)


def check_this_host(
    loaded: LoadedConfig | None, arguments: Sequence[str], ranks: int, *, port: int | None
) -> list[Check]:
    """Everything that concerns this host alone, for so many ranks on it."""
    config = None if loaded is None else loaded.config
    checks = [*check_packages(), *check_driver(), *check_locks(), check_port(port), *check_timeouts(config)]
    told, need = probe(arguments, ranks)
    return [
        *checks, *told, *check_folders(config, need), *check_memory(ranks, need, on_gpus=bool(visible_gpus()))
    ]  # fmt: skip


def _other_hosts(chosen: str, request: Request, arguments: Sequence[str]) -> tuple[list[Check], list[Check]]:
    """Checks of the way to the other hosts, and of each host that is reached."""
    if chosen == "slurm":
        if not in_allocation(os.environ) or "SLURM_JOB_NODELIST" not in os.environ:
            return [check_srun()], []
        allocation = read_allocation(
            os.environ, include=request.include, exclude=request.exclude, num_nodes=request.num_nodes
        )
        return [], ask_by_srun(allocation, arguments)
    way = [*check_mpi()] if chosen == "mpi" else []
    if request.hostfile is None:
        return way, []
    slots = choose_slots(
        read_hostfile(request.hostfile),
        include=request.include,
        exclude=request.exclude,
        num_nodes=request.num_nodes,
        num_gpus=request.num_gpus,
    )
    reached = list(check_ssh(list(slots)))
    return [*way, *reached], ask_by_ssh([check.host for check in reached if check.state == "OK"], arguments)


def _num_gpus(request: Request) -> list[str]:
    return [] if request.num_gpus is None else [f"--num-gpus={request.num_gpus}"]


def probe(arguments: Sequence[str], ranks: int) -> tuple[list[Check], Need]:
    """What needs torch on this machine, in a process of its own."""
    PROGRESS.show("checking this machine")
    argv = (sys.executable, "-m", "trainer.commands.doctor.probe", *arguments, "--ranks", str(ranks))
    found, last_words = _run(Command(argv, 1, {}, ()), PROBE_PATIENCE_S)
    if found is None:
        return [Check("torch", "FAIL", last_words, "python -m trainer.commands.doctor.probe shows all of it")], Need()
    return [Check(**check) for check in found["checks"]], Need(**found["need"])


def measure_ranks(command: Command) -> list[Check]:
    """What the ranks find out about each other, started as a run would be."""
    PROGRESS.show(f"starting {command.ranks} ranks, which look at each other")
    found, last_words = _run(command, RANKS_PATIENCE_S)
    if found is None:
        return [Check("ranks", "FAIL", last_words, f"the same by hand: {command.shell()}")]
    return [Check(**check) for check in found["checks"]]


def _run(command: Command, patience_s: float) -> tuple[Any, str]:
    """Return the JSON that a command prints after MARK, or None and the last words it said."""
    with tempfile.TemporaryFile() as output:
        processes = command.start(output, output)
        deadline = time.monotonic() + patience_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.returncode for process in processes):  # the others wait for it in vain
                deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
            time.sleep(POLL_S)
        late = [process for process in processes if process.poll() is None]
        for process in late:
            process.terminate()  # srun and mpirun end their ranks then
        end_sessions([process.pid for process in processes])
        codes = [process.wait() for process in processes]
        output.seek(0)
        said = output.read().decode(errors="replace")
    for line in said.splitlines():
        if MARK in line:
            with suppress(ValueError):  # srun passes on what it gets in pieces
                return json.loads(line.partition(MARK)[2].rpartition("}")[0] + "}"), ""
    lines = [line.strip("- ") for line in said.splitlines() if line.strip("- ")] or ["it said nothing"]
    errors = [line for line in lines if "Error" in line][-1:] or lines[:2]
    if len(late) == len(processes):
        return None, f"no answer within {patience_s:g} s"
    return None, f"exit code {next((code for code in codes if code), 0)}: {' '.join(errors)[:300]}"


def show(checks: Iterable[Check], *, as_json: bool) -> None:
    """The table, or one JSON object with `checks` and the counts of each state."""
    listed = list(checks)
    counts = {state: sum(check.state == state for check in listed) for state in COLOURS}
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in listed], "counts": counts}, indent=1))
        return
    console = Console(highlight=False, width=min(shutil.get_terminal_size((LINE_WIDTH, 25)).columns, LINE_WIDTH))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    # Of other hosts only what is wrong: a hundred good ones are a line each.
    good = {check.host: 0 for check in listed if check.host}
    for check in listed:
        if check.host and check.state == "OK":
            good[check.host] += 1
            continue
        name = f"{check.host}: {check.name}" if check.host else check.name
        word = "better" if check.state == "OK" else "fix"
        fix = f"\n[bold]{word}:[/bold] {escape(printable(check.fix))}" if check.fix else ""
        table.add_row(
            f"[{COLOURS[check.state]}]{check.state}[/]", escape(printable(name)), escape(printable(check.found)) + fix
        )
    for host, count in good.items():
        table.add_row("[green]OK[/]", escape(host), f"{count} checks are good")
    console.print(table)
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()))
