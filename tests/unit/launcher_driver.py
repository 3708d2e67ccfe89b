"""`zerolora train` around `launcher_rank` in place of the trainer. Arguments: behaviour, folder."""

import sys
from pathlib import Path

from launcher.supervision.supervisor import Supervisor
from launcher.supervision.terminal import ConsolePipe
from launcher.targets.local import build_local_command
from trainer.contract.rendezvous import free_port

if __name__ == "__main__":
    with ConsolePipe(Path(sys.argv[2]) / "logs") as pipe:
        command = build_local_command(
            [*sys.argv[1:], *pipe.arguments()],
            gpus=[],
            num_gpus=2,
            port=free_port(),
            module="tests.unit.launcher_rank",
        )
        code = Supervisor(command, Path(sys.argv[2]) / "logs").run()
    sys.exit(code)
