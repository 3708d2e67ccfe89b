"""What every rank runs: read the configuration, prepare, train (trainer/run.py), and end with an honest exit code."""

import argparse
import sys
import traceback
from pathlib import Path

from rich.markup import escape

from trainer.config import CommandParser, LoadedConfig, UserError, load_config
from trainer.console import open_console, tell_torchrun
from trainer.liveness.progress import phase
from trainer.liveness.watchdog import Watchdog
from trainer.prepare import prepare
from trainer.rank_variables import host_name
from trainer.ranks import Ranks, leave_process_group
from trainer.run import Run
from trainer.signals import StopRequest
from trainer.training_process import LAUNCHER_WATCH


def main(argv: list[str] | None = None) -> int:
    """Train; exit code 0 done, 1 failed or hung, 2 usage, 75 preempted and saved, 128+signal after a save."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    stop = StopRequest()
    try:
        ranks = Ranks.from_environment(expected=arguments.world_size)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        loaded = load_config(arguments.config, arguments.overrides)
    except UserError as error:
        return _refuse(error, ranks)
    logs, training = Path(loaded.config.output_dir) / "logs", loaded.config.training
    LAUNCHER_WATCH.look_at_file(logs, training.launcher_timeout)
    watchdog = Watchdog(ranks, logs, training.hang_timeout)
    return watchdog.end(_train(loaded, arguments, ranks, stop))


def _train(loaded: LoadedConfig, arguments: argparse.Namespace, ranks: Ranks, stop: StopRequest) -> int:
    """Prepare, train, and say what went wrong; the exit code."""
    try:
        with phase("tokenise"):
            prepared = prepare(loaded.config)
    except UserError as error:
        return _refuse(error, ranks)
    console = open_console(
        Path(loaded.config.output_dir),
        ranks.rank,
        arguments.console,
        width=arguments.console_width,
        terminal=arguments.console_tty,
    )
    run = Run(loaded, prepared, ranks, console, stop)
    try:
        run.train()
    except UserError as error:
        run.close()
        if arguments.console is None:
            console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        else:
            print(f"error: {error}")  # into this rank's log, whence the launcher shows it
        return error.exit_code
    except Exception as error:  # not swallowed: traceback in the log, one line shown, exit code 1
        traceback.print_exc()  # into this rank's log
        tell_torchrun(error)
        run.close()
        if ranks.is_main:
            console.print(f"[red]failed:[/red] {escape(f'{type(error).__name__}: {error}')}", soft_wrap=True)
        # No farewell to the group: its other ranks may be waiting in a collective that will never come.
        return 1
    leave_process_group(together=bool(stop))
    return stop.exit_code if stop else 0


def _refuse(error: UserError, ranks: Ranks) -> int:
    """One line on stderr from one rank of each host, for a file may be missing on some; the exit code."""
    if ranks.local_rank == 0:
        where = "" if ranks.is_main else f"{host_name()}: "
        print(f"error: {where}{error}", file=sys.stderr)
    return error.exit_code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(prog="trainer.train", description="Train as CONFIG says; one process per GPU.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed command")
    parser.add_argument("--world-size", type=int, help="how many ranks there must be")
    parser.add_argument("--console", help="where rank 0 writes what the user sees, if not its stdout")
    parser.add_argument("--console-width", type=int)
    parser.add_argument("--console-tty", action="store_true")
    return parser.parse_intermixed_args(argv)
