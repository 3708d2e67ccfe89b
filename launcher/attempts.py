"""The starts of one run's ranks: the first, and those after a failure, on the same ranks or on those that are left."""

import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launcher.places import Places
from launcher.plan import ENVIRONMENT_FILE, OF_CPU_RANKS, Build, Plan
from launcher.status import note_job
from launcher.supervision.child import run_child
from launcher.supervision.held_ranks import HeldRanks
from launcher.supervision.remote import Reach, ThroughSrun, ThroughSsh
from launcher.supervision.restarts import Ending, Restarts
from launcher.supervision.stop_signals import STOPPED
from launcher.supervision.supervisor import Supervisor
from launcher.supervision.terminal import ConsoleFile, ConsolePipe, say, show
from launcher.targets.environment import write_environment
from launcher.targets.local import Command
from launcher.targets.slurm import is_requeued, job_state, lost_nodes
from trainer.config import LoadedConfig, UserError
from trainer.config.files import Positive, read_value
from trainer.contract.exit_codes import EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE

DEFAULT_RESTARTS = 3


class Attempts:
    """The starts of one run's ranks, in a folder that is held."""

    def __init__(
        self,
        arguments: Sequence[str],
        loaded: LoadedConfig,
        planned: Plan,
        places: Places,
        held: HeldRanks | None,
    ) -> None:
        """`planned` is the first start, in which ranks that are `held` take part; later ones are at its `places`."""
        self._arguments, self._training, self._held = arguments, loaded.config.training, held
        self._planned: Plan | None = planned
        self._of_first_start = places
        self._logs = Path(loaded.config.output_dir) / "logs"
        self._full = 0
        self._places: Sequence[int] = ()
        self._left_out: frozenset[int] = frozenset()
        _, reach = planned
        if isinstance(reach, ThroughSrun):
            note_job(reach.allocation.job_id, self._logs.parent)
        self._most = most_restarts(self._training.max_restarts, reach)

    def train(self) -> int:
        """Start the ranks, again where that helps, and stay with them; the exit code."""
        return Restarts(
            self._logs.parent,
            self._start,
            most=self._most,
            resumes=self._training.resume_from_checkpoint is not None,
            leave_out=self._leave_out if self._training.elastic else None,
            tell_batch=self._tell_batch,
        ).run()

    def _start(self, settings: Sequence[str]) -> Ending:
        settings = list(settings)
        if self._planned is not None:
            (build, reach), self._planned = self._planned, None
        else:
            try:
                build, reach, more = self._plan_again()
            except UserError as error:
                say(f"not started again: {error}")
                return Ending(1)
            settings += more
        with ConsolePipe(self._logs) if reach is None else ConsoleFile(self._logs) as console:
            words = [*self._arguments, *settings, *console.arguments()]
            command = build(words)
            self._full = self._full or command.ranks
            self._places = self._places or range(self._full)
            if isinstance(reach, ThroughSsh):
                write_environment(self._logs / ENVIRONMENT_FILE, OF_CPU_RANKS | os.environ)
            show(f"starting {command.ranks} rank{'s' * (command.ranks > 1)}{_where(command)}")
            # Ranks that were started before the checks take part in the first attempt only.
            first = partial(self._held.release, words) if self._held is not None and self._held.waits else None
            minutes = self._training.hang_timeout
            supervisor = Supervisor(command, self._logs, hang_timeout_minutes=minutes, reach=reach, start=first)
            code = supervisor.run()
        fault = None if supervisor.signals else supervisor.fault
        if not (self._training.elastic and self._most):
            code = _again_if_lost(code, reach)
        return Ending.of(self._logs, code, fault, command.ranks)

    def _plan_again(self) -> tuple[Build, Reach | None, list[str]]:
        """A plan for what is there now, and the settings that keep the global batch; UserError where it is too little.

        With `training.elastic` the largest number of ranks that divides the global batch, else as many as at first.
        """
        total = self._global_batch() if self._training.elastic else None
        again = self._of_first_start.again(self._left_out, total)
        ranks, (build, reach), before = len(again.places), again.plan, len(self._places)
        if ranks != self._full and (total is None or total % ranks):
            raise UserError(
                f"{ranks} of {self._full} ranks can be started now; bring the others back"
                + ", or set training.elastic=true to go on with those" * (total is None)
            )
        self._places = again.places
        if ranks == before == self._full:
            return build, reach, []
        if ranks < self._full:
            idle, there = self._of_first_start.names(again.idle), ranks + len(again.idle)
            say(
                f"going on with {ranks} of {self._full} ranks"
                + f"; idle: {idle}, for {there} ranks would not divide the {total} samples of a step" * bool(idle)
                + f"; to come back to all {self._full}, stop the run and start it with resume_from_checkpoint=auto"
            )
        # The micro-batch stays the most that a rank takes at a time.
        return build, reach, [f"training.global_batch_size={total}", "training.gradient_accumulation_steps=1"]

    def _leave_out(self, ending: Ending) -> str | None:
        """Leave out the place of a rank that failed before it made a step; its name, None if no rank would be left."""
        rank = None if ending.fault is None else ending.fault.rank
        unit = None if rank is None or rank >= len(self._places) else self._of_first_start.unit(self._places[rank])
        if unit is None or len(self._left_out | unit[1]) >= self._full:
            return None
        name, places = unit
        self._left_out |= places
        return name

    def _global_batch(self) -> int | None:
        """Return the samples of a step, from the settings as the run resolved them; None before it has. UserError."""
        try:
            names = ("training.batch_size", "training.gradient_accumulation_steps")
            sizes = [read_value(self._logs.parent / "training_config.json", name, Positive) for name in names]
            ranks: int = read_value(self._logs.parent / "run.json", "world_size", Positive)
            return ranks * int(math.prod(sizes))
        except FileNotFoundError:
            return None

    def _tell_batch(self, step: int) -> None:
        """The samples of a step, as `zerolora inspect` shows them, from the settings as the run resolved them."""
        resolved = self._logs.parent / "training_config.json"
        if step and resolved.is_file():
            say(f"the samples of step {step}:")
            words = [str(resolved), "--step", str(step), "--ranks", str(len(self._places))]
            run_child([sys.executable, "-m", "launcher.module", "trainer.commands.inspect", *words])


def most_restarts(setting: int | None, reach: Reach | None) -> int:
    """`training.max_restarts`; where it is not given 3, but none below srun in a job that SLURM queues again."""
    if setting is not None:
        return setting
    return 0 if isinstance(reach, ThroughSrun) and is_requeued(reach.allocation.job_id) else DEFAULT_RESTARTS


def _where(command: Command) -> str:
    return " on the CPU" if command.set_variables.get("DS_ACCELERATOR") == "cpu" else ""


def _again_if_lost(code: int, reach: Reach | None) -> int:
    """The exit code; 75 where the cluster has failed, so that queueing the job again helps."""
    if not isinstance(reach, ThroughSrun) or code in (EXIT_OK, EXIT_USAGE, *STOPPED):
        return code
    lost = lost_nodes(reach.allocation)
    if not lost:
        return code
    words, state = f"lost nodes: {', '.join(lost)}", job_state(reach.allocation.job_id)
    if set(lost) == set(reach.allocation.nodes) and state not in ("", "RUNNING"):
        words = f"SLURM has ended the job ({state})"  # no step can be started in it, on whichever node
    say(f"{words}; queue the job again (exit code {EXIT_PREEMPTED})")
    return EXIT_PREEMPTED
