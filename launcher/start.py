"""`zerolora train`: check the run, start its ranks, and supervise them."""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from launcher.adapters import record_arguments
from launcher.job_attempts import record_attempt, record_attempt_end
from launcher.plan import CPU_RANK_VARIABLES, ENVIRONMENT_FILE, CommandBuilder, LaunchPlan, LaunchRequest, plan_launch
from launcher.rank_slots import RestartPlanner
from launcher.status import record_job
from launcher.supervision.prestarted_ranks import CHECKS_FAILED, PrestartedRanks
from launcher.supervision.processes import run_child
from launcher.supervision.remote import RemoteRanks, SrunRanks, SshRanks
from launcher.supervision.restarts import AttemptResult, RestartLoop
from launcher.supervision.supervisor import Supervisor
from launcher.supervision.terminal import ConsoleFile, log, print_progress, restore_terminal, share_stdout
from launcher.targets.local import write_environment
from launcher.targets.slurm import can_be_requeued, detect_lost_nodes
from trainer.config import LoadedConfig, RunConfig, UserError
from trainer.config.errors import format_count
from trainer.config.files import Positive, UnreadableFileError, read_value
from trainer.contract.exit_codes import EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE, STOP_CODES
from trainer.contract.folder_lock import FolderLock, check_not_locked
from trainer.contract.known_versions import get_installed_version
from trainer.contract.launcher_process import export_launcher_identity
from trainer.contract.rank_arguments import encode_command

DEFAULT_RESTARTS = 3


def start(
    arguments: Sequence[str],
    loaded: LoadedConfig,
    request: LaunchRequest,
    flags: Sequence[str],
    *,
    dry_run: bool,
    is_job_attempt: bool = False,
) -> int:
    """Check the run, tokenize its data, run the ranks, and return the exit code.

    `flags` are console options for the ranks. `is_job_attempt` records this as an attempt of a SLURM job.
    """
    run_dir = Path(loaded.config.output_dir)
    logs = run_dir / "logs"
    if not dry_run:
        export_launcher_identity()
    build, remote = plan_launch(request, logs)
    command = build(list(arguments))  # raises UserError before any work is done
    if dry_run:
        print(command.format_shell())
        log("note: model and data were not checked; to check them, run `zerolora validate`")
        return 0
    resumes = loaded.config.training.resume_from_checkpoint == "auto"
    check_not_locked(run_dir, resumes=resumes)
    print_progress(f"zerolora {get_version()}: {arguments[0]}")
    # Imports numpy, which other commands do not need.
    from trainer.checkpoint.output_folder import check_inputs_and_output

    check_inputs_and_output(loaded.config)
    terminal_fd = share_stdout()
    with PrestartedRanks.start(command) if remote is None else nullcontext() as prestarted:
        slots = RestartPlanner(request, logs, build)
        if prestarted is not None:
            code = prestarted.wait_for_checks(loaded.config.training.hang_timeout)
        else:
            # Check here, on behalf of remote ranks. Print only progress; rank 0 prints notes and warnings later.
            prepare = ["trainer.commands.prepare_run", "--phases", *arguments, f"--world-size={command.ranks}"]
            code = run_child([sys.executable, "-m", "launcher.module", *prepare], CHECKS_FAILED)
        if code:
            return code
        with FolderLock.acquire(run_dir, resumes=resumes, log=log) as lock:
            if is_job_attempt:
                record_attempt(run_dir, os.environ)
            record_arguments(loaded.config, list(arguments))
            rank_arguments = [*arguments, "--lock", lock.token, encode_command(sys.argv), *flags]
            code = AttemptRunner(rank_arguments, loaded.config, (build, remote), slots, prestarted, terminal_fd).train()
            if is_job_attempt and lock.is_held:
                with suppress(OSError, UnreadableFileError):  # an unreadable folder does not change the exit code
                    record_attempt_end(run_dir, os.environ, code)
            return code


def get_version() -> str:
    return get_installed_version("zerolora") or "(not installed)"  # in an uninstalled checkout


class AttemptRunner:
    """Starts and restarts a run's ranks, while the caller holds the lock of the run's folder."""

    def __init__(
        self,
        arguments: Sequence[str],
        config: RunConfig,
        first_plan: LaunchPlan,
        slots: RestartPlanner,
        prestarted: PrestartedRanks | None,
        terminal_fd: int,
    ) -> None:
        """Use `first_plan` and the `prestarted` ranks for the first attempt; restarts choose among `slots`.

        `terminal_fd` is the file descriptor that rank 0 writes to if it runs on this machine.
        """
        self._arguments, self._training, self._prestarted = arguments, config.training, prestarted
        self._adapters, self._terminal_fd = config.adapters, terminal_fd
        self._first_plan: LaunchPlan | None = first_plan
        self._slots = slots
        self._logs = Path(config.output_dir) / "logs"
        self._full_size = 0
        self._used_slots: Sequence[int] = ()
        self._excluded: frozenset[int] = frozenset()
        _, remote = first_plan
        if isinstance(remote, SrunRanks):
            record_job(remote.allocation.job_id, self._logs.parent)
        self._max_restarts = resolve_max_restarts(self._training.max_restarts, remote)

    def train(self) -> int:
        return RestartLoop(
            self._logs.parent,
            self._run_attempt,
            max_restarts=self._max_restarts,
            resumes=self._training.resume_from_checkpoint is not None,
            exclude=self._exclude if self._training.elastic else None,
            adapters=self._adapters,
        ).run()

    def _run_attempt(self, settings: Sequence[str]) -> AttemptResult:
        settings = list(settings)
        if self._first_plan is not None:
            (build, remote), self._first_plan = self._first_plan, None
        else:
            try:
                build, remote, batch_settings = self._plan_restart()
            except UserError as error:
                log(f"not restarted: {error}")
                return AttemptResult(1)
            settings += batch_settings
        with nullcontext() if remote is None else ConsoleFile(self._logs) as console:
            console_arguments = ["--console", str(self._terminal_fd)] if console is None else console.build_arguments()
            arguments = [*self._arguments, *settings, *console_arguments]
            command = build(arguments)
            self._full_size = self._full_size or command.ranks
            self._used_slots = self._used_slots or range(self._full_size)
            if isinstance(remote, SshRanks):
                write_environment(self._logs / ENVIRONMENT_FILE, CPU_RANK_VARIABLES | os.environ)
            device = " on the CPU" if command.set_variables.get("DS_ACCELERATOR") == "cpu" else ""
            print_progress(f"starting {format_count(command.ranks, 'rank')}{device}")
            # Prestarted ranks take part in the first attempt only.
            ranks = self._prestarted
            start_ranks = partial(ranks.start_training, arguments) if ranks is not None and ranks.is_waiting else None
            minutes = self._training.hang_timeout
            supervisor = Supervisor(command, self._logs, hang_timeout_minutes=minutes, remote=remote, start=start_ranks)
            code = supervisor.run()
        restore_terminal()
        failure = None if supervisor.signals else supervisor.failure
        if not (self._training.elastic and self._max_restarts):
            code = _adjust_exit_code(code, remote)
        return AttemptResult.from_heartbeats(self._logs, code, failure, command.ranks)

    def _plan_restart(self) -> tuple[CommandBuilder, RemoteRanks | None, list[str]]:
        """Plan a restart on the available slots; return the plan and the settings that preserve the global batch size.

        Uses the initial number of ranks or, with `training.elastic`, the largest one that divides the global batch
        size. Raises UserError if too few slots are available.
        """
        total = self._read_global_batch() if self._training.elastic else None
        restart = self._slots.plan_restart(self._excluded, total)
        ranks, (build, remote), previous_ranks = len(restart.slots), restart.plan, len(self._used_slots)
        if ranks != self._full_size and (total is None or total % ranks):
            raise UserError(
                f"only {ranks} of {self._full_size} ranks can be started; fix the failed hosts or GPUs"
                + ", or set training.elastic=true to continue with these" * (total is None)
            )
        self._used_slots = restart.slots
        if ranks == previous_ranks == self._full_size:
            return build, remote, []
        if ranks < self._full_size:
            log(
                f"continuing with {ranks} of {self._full_size} ranks"
                + f"; {restart.available} ranks cannot split the batch of {total} samples" * (restart.available > ranks)
                + f"; to use all {self._full_size} again, stop the run and start it with resume_from_checkpoint=auto"
            )
        # training.batch_size remains the upper bound for the micro-batch size.
        return build, remote, [f"training.global_batch_size={total}", "training.gradient_accumulation_steps=1"]

    def _exclude(self, result: AttemptResult) -> str | None:
        rank = result.failure.rank if result.failure is not None else None
        if rank is None or rank >= len(self._used_slots):
            return None
        domain = self._slots.find_failure_domain(self._used_slots[rank])
        if domain is None or len(self._excluded | domain[1]) >= self._full_size:
            return None
        name, slots = domain
        self._excluded |= slots
        return name

    def _read_global_batch(self) -> int | None:
        """Return the global batch size from the run's resolved settings, or None if they are not yet written."""
        try:
            names = ("training.batch_size", "training.gradient_accumulation_steps")
            sizes = [read_value(self._logs.parent / "training_config.json", name, Positive) for name in names]
            ranks: int = read_value(self._logs.parent / "run.json", "world_size", Positive)
            return ranks * int(math.prod(sizes))
        except FileNotFoundError:
            return None


def resolve_max_restarts(setting: int | None, remote: RemoteRanks | None) -> int:
    """Return `training.max_restarts`, or its default: 0 under srun in a job that SLURM requeues, otherwise 3."""
    if setting is not None:
        return setting
    return 0 if isinstance(remote, SrunRanks) and can_be_requeued(remote.allocation.job_id) else DEFAULT_RESTARTS


def _adjust_exit_code(code: int, remote: RemoteRanks | None) -> int:
    if not isinstance(remote, SrunRanks) or code in (EXIT_OK, EXIT_USAGE, *STOP_CODES):
        return code
    if not (lost := detect_lost_nodes(remote.allocation)):
        return code
    log(f"lost nodes: {', '.join(lost)}; requeue the job (exit code {EXIT_PREEMPTED})")
    return EXIT_PREEMPTED
