"""Entry point of `zerolora`: handle signals and closed pipes, then run launcher/commands.py."""

import _signal  # type: ignore[import-not-found]  # built in: `signal` would import more modules
import os
import sys


def _command() -> int:
    from launcher.commands import main
    from trainer.contract.launcher_process import LauncherWatch

    LauncherWatch(os.environ, is_rank=False).start()
    return main()


def main() -> None:
    """Run the command line."""
    # Until launcher/entry.py is imported, Ctrl-C ends the process silently, not in a traceback of these imports.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from launcher.import_path import exclude_working_folder, find_foreign_package

    exclude_working_folder()
    if foreign := find_foreign_package():
        print(f"error: {foreign}", file=sys.stderr)
        sys.exit(2)
    from launcher.entry import Stopped, run
    from trainer.contract.standard_streams import PROGRESS

    PROGRESS.show(" ".join(["zerolora", *sys.argv[1:2]]))
    sys.exit(run(_command, exception=Stopped))


if __name__ == "__main__":
    main()
