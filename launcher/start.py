"""`zerolora train`: the checks before the ranks are started, and the run under supervision."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from launcher.attempts import Attempts
from launcher.job_starts import note_end, note_start
from launcher.places import Places
from launcher.plan import Request, plan
from launcher.supervision.child import run_child
from launcher.supervision.held_ranks import FAILED, HeldRanks
from launcher.supervision.terminal import say, show
from trainer.config import LoadedConfig
from trainer.config.files import UnreadableFile
from trainer.contract.command_typed import as_argument
from trainer.contract.folder_lock import FolderLock, refuse_if_held
from trainer.contract.launcher_process import tie_children_to_this_process
from trainer.contract.versions import installed_version


def start(
    arguments: Sequence[str],
    loaded: LoadedConfig,
    request: Request,
    *,
    dry_run: bool,
    goes_on: bool = False,
    profiled: bool = False,
) -> int:
    """Check, tokenise, start the ranks and stay with them; returns the exit code.

    `goes_on`: as one of the starts of a SLURM job, which are noted. `profiled`: the first rank says where the time to
    its first step went.
    """
    run_dir = Path(loaded.config.output_dir)
    logs = run_dir / "logs"
    if not dry_run:
        tie_children_to_this_process()
        if request.chosen_launcher() == "hostfile":  # which takes as long as the slowest login
            show(f"asking the hosts of {request.hostfile}")
    build, reach = plan(request, logs)
    command = build(list(arguments))  # its refusals come before any work
    if dry_run:
        print(command.shell())
        say("note: model and data were not looked at; `zerolora validate` does that")
        return 0
    resumes = loaded.config.training.resume_from_checkpoint == "auto"
    refuse_if_held(run_dir, resumes=resumes)
    show(f"zerolora {own_version()}: {arguments[0]}")
    from trainer.setup.early_checks import check_early  # imports numpy, which other commands do not need

    check_early(loaded.config)
    with HeldRanks.start(command) if reach is None else nullcontext() as held:
        places = Places(request, logs, build)
        hang_timeout = loaded.config.training.hang_timeout
        code = held.until_checked(hang_timeout) if held is not None else _check(arguments, command.ranks)
        if code:
            return code
        with FolderLock.take(run_dir, resumes=resumes, say=say) as lock:
            if goes_on:
                note_start(run_dir, os.environ)
            words = [*arguments, "--lock", lock.token, as_argument(sys.argv), *["--profile-start"] * profiled]
            code = Attempts(words, loaded, (build, reach), places, held).train()
            if goes_on and lock.is_held:
                with suppress(OSError, UnreadableFile):  # a folder that is gone does not change how the run ended
                    note_end(run_dir, os.environ, code)
            return code


def _check(arguments: Sequence[str], ranks: int) -> int:
    """Check and tokenise here for ranks elsewhere; the exit code."""
    # Of what it finds it shows only how far it is: rank 0 says the rest later.
    prepare = ["trainer.commands.prepare_run", "--phases", *arguments, f"--world-size={ranks}"]
    return run_child([sys.executable, "-m", "launcher.module", *prepare], FAILED)


def own_version() -> str:
    """Return the version as it was installed."""
    return installed_version("zerolora") or "(not installed)"  # a checkout, as on a shared file system
