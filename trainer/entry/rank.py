"""Entry point of every rank: load the configuration, prepare, train (trainer/run.py), and return an exit code."""

import argparse
import sys
import time
import traceback
from pathlib import Path

from rich.markup import escape

from trainer.config import CommandParser, LoadedConfig, RunConfig, UserError, compute_collective_timeout, load_config
from trainer.contract.exit_codes import EXIT_DELAY_S
from trainer.contract.folder_lock import FolderLock, check_not_locked
from trainer.contract.heartbeat import clear_rank_reports
from trainer.contract.rank_arguments import TYPED_OPTION
from trainer.contract.rank_errors import RankErrorRecord
from trainer.contract.rendezvous import get_host_name
from trainer.data.prepared import PreparedRun
from trainer.entry.joint_run import JointRun
from trainer.monitor.console import open_console
from trainer.parallel.ranks.agreement import decide_on_rank_0
from trainer.parallel.ranks.group import Ranks, leave_process_group
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.signals import StopRequest
from trainer.parallel.ranks.training_process import LAUNCHER_WATCH
from trainer.parallel.ranks.watchdog import Watchdog
from trainer.run import Run
from trainer.setup.preflight import check_folder, prepare


def main(argv: list[str] | None = None, prepared: PreparedRun | None = None) -> int:
    """Train, and return the exit code of this rank.

    0: completed. 1: failed or hung. 2: usage error. 75: preempted. 128 + signal: stopped. Preempted and stopped
    runs are saved. `prepared`: data or model files that this process has already prepared.
    """
    arguments = _parse_arguments(sys.argv[1:] if argv is None else argv)
    stop, ranks = StopRequest(), Ranks(0, 1, 0)
    try:
        ranks = Ranks.from_environment(expected_world_size=arguments.world_size)
        loaded = load_config(arguments.config, arguments.overrides)
    except UserError as error:
        # For ranks on other hosts, the console file is in the logs of the run.
        logs = None if (arguments.console or "1").isdecimal() else Path(arguments.console).parent
        return _report_error(error, ranks, logs)
    run_dir = Path(loaded.config.output_dir)
    LAUNCHER_WATCH.watch_file(run_dir / "logs", loaded.config.training.launcher_timeout)
    watchdog = Watchdog(ranks, run_dir / "logs", loaded.config.training.hang_timeout)
    # Nothing is written before the folder is locked, by the launcher or by `_lock_folder`.
    watchdog.writes_heartbeats = watchdog.all_write = arguments.lock is not None
    stop.write_exit_code = watchdog.write_exit_code
    lock = None
    try:
        if arguments.lock is None and ranks.is_main:
            check_not_locked(run_dir, resumes=loaded.config.training.resume_from_checkpoint == "auto")
        with phase("tokenise"):
            if prepared is not None and prepared.data is not None:
                check_folder(loaded.config)  # again, because the folder was not yet locked during the first check
            else:
                prepared = prepare(loaded.config, model_files=prepared)
        with phase("join"):
            lock = _lock_folder(loaded.config, ranks, arguments.lock)
        watchdog.writes_heartbeats = True
        code = _train_run(loaded, prepared, arguments, ranks, stop, lock)
        watchdog.writes_heartbeats = lock is None or lock.is_held
    except UserError as error:
        code = _report_error(error, ranks, run_dir / "logs" if watchdog.writes_heartbeats else None)
    code = watchdog.end(code)
    if lock is not None:
        lock.release()
    return code


def _lock_folder(config: RunConfig, ranks: Ranks, token: str | None) -> FolderLock | None:
    """Acquire or join the lock on the run's folder on rank 0; other ranks wait unless the launcher holds the lock."""
    run_dir = Path(config.output_dir)

    def acquire_or_join() -> FolderLock:
        lock = FolderLock.join(run_dir, token) if token else None
        if lock is None:
            resumes = config.training.resume_from_checkpoint == "auto"
            lock = FolderLock.acquire(run_dir, resumes=resumes, log=lambda line: print(line, file=sys.stderr))
        if token is None:
            # Heartbeats from an earlier run, which a launcher would have removed; other ranks write theirs later.
            clear_rank_reports(run_dir / "logs")
        return lock

    if token is not None:
        return acquire_or_join() if ranks.is_main else None
    return decide_on_rank_0(ranks, compute_collective_timeout(config.training), acquire_or_join)


def _train_run(
    loaded: LoadedConfig,
    prepared: PreparedRun,
    arguments: argparse.Namespace,
    ranks: Ranks,
    stop: StopRequest,
    lock: FolderLock | None,
) -> int:
    console = open_console(
        Path(loaded.config.output_dir),
        ranks.rank,
        arguments.console,
        width=arguments.console_width,
        terminal=arguments.console_tty,
    )
    run_class = JointRun if loaded.config.runs else Run
    run = run_class(loaded, prepared, ranks, console, stop, lock, verbose=arguments.verbose)
    try:
        run.train()
    except UserError as error:
        _record_error(error, loaded.config, ranks, lock)
        run.close()
        if arguments.console is None:
            console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        else:
            print(f"error: {error}")  # into this rank's log; the launcher prints it
        return error.exit_code
    except Exception as error:  # traceback in the log, a message on the console, exit code 1
        traceback.print_exc()  # into this rank's log
        _record_error(error, loaded.config, ranks, lock)
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # into the file from which torchrun prints it, if torchrun is used
        run.close()
        if ranks.is_main:
            console.print(f"[red]failed:[/red] {escape(f'{type(error).__name__}: {error}')}", soft_wrap=True)
        # Do not destroy the process group: other ranks may wait in a collective that this rank never joins.
        return 1
    leave_process_group(wait_for_all=bool(stop))
    return stop.exit_code if stop else 0


def _record_error(error: Exception, config: RunConfig, ranks: Ranks, lock: FolderLock | None) -> None:
    """Write the error for the launcher, unless another run has taken over the folder."""
    if lock is None or lock.is_held:
        RankErrorRecord.from_exception(ranks.rank, error).write(Path(config.output_dir) / "logs")


def _report_error(error: UserError, ranks: Ranks, logs: Path | None) -> int:
    """Report the error on one rank per host, and return its exit code.

    The rank prints the error and, unless `logs` is None, writes it for the launcher. Each host reports, because
    files may be missing on some hosts only. Other ranks wait, so that the error is printed before they exit.
    """
    if ranks.local_rank == 0:
        where = "" if ranks.is_main else f"{get_host_name()}: "
        if logs is not None:
            RankErrorRecord(ranks.rank, f"{where}{error}", is_user_error=True).write(logs)
        print(f"error: {where}{error}", file=sys.stderr)
    else:
        time.sleep(EXIT_DELAY_S)
    return error.exit_code


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(prog="trainer.train", description="Run one rank of a training run; start one per GPU.")
    parser.add_config()
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=0, help="set by DeepSpeed and torch's launchers"
    )
    parser.add_argument("--world-size", type=int, help="expected number of ranks")
    parser.add_argument("--lock", help="token of the launcher's lock on the output folder")
    parser.add_argument(TYPED_OPTION, help="the command typed by the user, for the run's record")
    parser.add_argument("--verbose", action="store_true", help="show all lines before the first step")
    parser.add_argument("--console", help="file or descriptor for rank 0's console output, instead of stdout")
    parser.add_argument("--console-width", type=int)
    parser.add_argument("--console-tty", action="store_true")
    return parser.parse_intermixed_args(argv)
