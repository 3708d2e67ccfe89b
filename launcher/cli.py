"""The `zerolora` command, ended in order by a signal or a closed pipe; what it does is in launcher/commands.py."""

import os
import sys

from launcher.entry import Stopped, run


def _command() -> int:
    from launcher.commands import main
    from trainer.config.launcher_process import LauncherWatch

    LauncherWatch(os.environ, is_rank=False).start()
    return main()


def main() -> None:
    """Run the command line."""
    sys.exit(run(_command, exception=Stopped))


if __name__ == "__main__":
    main()
