"""`python -m launcher.module MODULE ARGUMENTS`: run MODULE as `python -m` would, with orderly ends."""

import _signal  # type: ignore[import-not-found]
import os
import sys


def _command() -> int:
    import runpy

    from launcher.entry import quiet_libraries
    from trainer.config.errors import find_path_mistake
    from trainer.contract.exit_codes import EXIT_USAGE
    from trainer.contract.launcher_process import LauncherWatch
    from trainer.contract.standard_streams import PROGRESS

    LauncherWatch(os.environ, is_rank=False).start()
    quiet_libraries()
    del sys.argv[0]
    PROGRESS.show("importing")
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except OSError as error:
        mistake = find_path_mistake(error)
        if mistake is None:
            raise
        print(f"error: {mistake}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # as in launcher/cli.py
    # The parent blocks Ctrl-C until here, because it would end Python's own startup in a traceback.
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])
    from launcher.entry import run

    sys.exit(run(_command))
