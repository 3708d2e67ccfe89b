"""`zerolora train`: check the run, start its ranks, and supervise them."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from launcher.attempts import Attempts
from launcher.job_starts import record_end, record_start
from launcher.plan import Request, plan
from launcher.rank_slots import RankSlots
from launcher.supervision.prestarted_ranks import FAILED, PrestartedRanks
from launcher.supervision.processes import run_child
from launcher.supervision.terminal import say, show
from trainer.config import LoadedConfig
from trainer.config.files import UnreadableFile
from trainer.contract.folder_lock import FolderLock, refuse_if_held
from trainer.contract.known_versions import installed_version
from trainer.contract.launcher_process import tie_children_to_this_process
from trainer.contract.rank_arguments import encode_command


def start(
    arguments: Sequence[str],
    loaded: LoadedConfig,
    request: Request,
    flags: Sequence[str],
    *,
    dry_run: bool,
    is_job_start: bool = False,
) -> int:
    """Check the run, tokenize its data, run the ranks, and return the exit code.

    `flags` are for the ranks' console. `is_job_start`: record this as one of the starts of a SLURM job.
    """
    run_dir = Path(loaded.config.output_dir)
    logs = run_dir / "logs"
    if not dry_run:
        tie_children_to_this_process()
        if request.chosen_launcher() == "hostfile":  # takes as long as the slowest login
            show(f"asking the hosts of {request.hostfile}")
    build, reach = plan(request, logs)
    command = build(list(arguments))  # raises UserError before any work is done
    if dry_run:
        print(command.shell())
        say("note: model and data were not checked; `zerolora validate` does that")
        return 0
    resumes = loaded.config.training.resume_from_checkpoint == "auto"
    refuse_if_held(run_dir, resumes=resumes)
    show(f"zerolora {get_version()}: {arguments[0]}")
    from trainer.checkpoint.output_folder import check_early  # imports numpy, which other commands do not need

    check_early(loaded.config)
    with PrestartedRanks.start(command) if reach is None else nullcontext() as prestarted:
        slots = RankSlots(request, logs, build)
        hang_timeout = loaded.config.training.hang_timeout
        if prestarted is not None:
            code = prestarted.wait_for_checks(hang_timeout)
        else:
            # On this machine, for ranks elsewhere. Prints only its progress; rank 0 prints the findings later.
            prepare = ["trainer.commands.prepare_run", "--phases", *arguments, f"--world-size={command.ranks}"]
            code = run_child([sys.executable, "-m", "launcher.module", *prepare], FAILED)
        if code:
            return code
        with FolderLock.take(run_dir, resumes=resumes, say=say) as lock:
            if is_job_start:
                record_start(run_dir, os.environ)
            words = [*arguments, "--lock", lock.token, encode_command(sys.argv), *flags]
            code = Attempts(words, loaded.config.training, run_dir, (build, reach), slots, prestarted).train()
            if is_job_start and lock.is_held:
                with suppress(OSError, UnreadableFile):  # an unreadable folder does not change how the run ended
                    record_end(run_dir, os.environ, code)
            return code


def get_version() -> str:
    """Return zerolora's installed version."""
    return installed_version("zerolora") or "(not installed)"  # an uninstalled checkout, as on a shared file system
