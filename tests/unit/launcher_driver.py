"""`zerolora train` around `launcher_rank` in place of the trainer. Arguments: behaviour, folder."""

import sys
from pathlib import Path

from launcher.supervision.supervisor import Supervisor
from launcher.supervision.terminal import restore_terminal, share_stdout
from launcher.targets.local import build_local_command
from trainer.contract.rendezvous import find_free_port

if __name__ == "__main__":
    command = build_local_command(
        [*sys.argv[1:], "--console", str(share_stdout())],
        gpus=[],
        num_gpus=2,
        port=find_free_port(),
        module="tests.unit.launcher_rank",
    )
    code = Supervisor(command, Path(sys.argv[2]) / "logs").run()
    restore_terminal()
    sys.exit(code)
