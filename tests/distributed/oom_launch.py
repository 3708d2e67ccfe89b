"""`zerolora train` around oom_rank in place of the trainer. Arguments: SHORTAGE.json, output folder, CONFIG, key=value.

Both sides of a restart are the product's own: the note, and launcher/supervision/restarts.py that reads it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.supervision.restarts import AttemptResult, RestartLoop
from launcher.supervision.supervisor import Supervisor
from launcher.supervision.terminal import share_stdout
from launcher.targets.local import build_local_command
from trainer.contract.rendezvous import find_free_port

if __name__ == "__main__":
    shortage, folder, *arguments = sys.argv[1:]
    screen = str(share_stdout())

    def start(more: Sequence[str]) -> AttemptResult:
        command = build_local_command(
            [shortage, *arguments, f"output_dir={folder}", *more, "--console", screen],
            gpus=[],
            num_gpus=2,
            port=find_free_port(),
            module="tests.distributed.oom_rank",
        )
        code = Supervisor(command, Path(folder) / "logs").run()
        return AttemptResult(code, ranks=command.ranks)

    sys.exit(RestartLoop(Path(folder), start, max_restarts=0, resumes=False).run())
