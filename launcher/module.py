"""`python -m launcher.module MODULE ARGUMENTS`: run MODULE's `main` with signal handling and one-line errors."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def exec_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with `python -m launcher.module MODULE ARGUMENTS`, keeping its PID and terminal."""
    from trainer.contract.standard_streams import PROGRESS

    PROGRESS.show(" ".join(["zerolora", *sys.argv[1:2]]), on_pipe=True)  # importing torch takes seconds
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # unblocked at the end of this file
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads are four times slower on busy CPUs
    os.execv(sys.executable, [sys.executable, "-m", "launcher.module", module, *arguments])


def run_main(module: str) -> int:
    """Run `main` of a module, or of a package's `__main__`, and return its exit code."""
    from importlib import import_module
    from importlib.util import find_spec

    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return int(import_module(f"{module}.__main__" if is_package else module).main() or 0)


def _run_command() -> int:
    from launcher.entry import silence_libraries
    from trainer.config.errors import convert_path_error
    from trainer.contract.exit_codes import EXIT_USAGE
    from trainer.contract.launcher_process import LauncherWatch
    from trainer.contract.standard_streams import PROGRESS

    LauncherWatch(os.environ, is_rank=False).start()
    silence_libraries()
    del sys.argv[0]
    PROGRESS.show("importing")
    try:
        return run_main(sys.argv[0])
    except OSError as error:
        mistake = convert_path_error(error)
        if mistake is None:
            raise
        print(f"error: {mistake}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in launcher/cli.py
    # The parent blocks Ctrl-C, which would otherwise interrupt Python's startup with a traceback.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    from launcher.entry import run

    sys.exit(run(_run_command))
