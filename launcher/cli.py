"""Entry point of `zerolora`: set up signals, the import path and output streams, then run launcher/commands.py.

The working directory is kept out of sys.path, because a trainer.py or ops/ there would shadow our packages.
"""

import _signal  # type: ignore[import-not-found]  # built-in; `signal` would import more modules
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ("launcher", "trainer", "ops")


def _run_command() -> int:
    from launcher.commands import main
    from trainer.contract.launcher_process import LauncherWatch

    LauncherWatch(os.environ, is_rank=False).start()
    return main()


def main() -> None:
    # Until launcher/entry.py is imported, Ctrl-C terminates the process silently, without a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if os.environ.get("COLUMNS") == "0":  # an unknown width, at which rich would print nothing
        del os.environ["COLUMNS"]
    exclude_working_folder()
    if problem := describe_unusable_process() or describe_shadowed_package():
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    from launcher.entry import SignalInterrupt, run
    from trainer.contract.standard_streams import PROGRESS

    PROGRESS.show(" ".join(["zerolora", *sys.argv[1:2]]))
    sys.exit(run(_run_command, exception=SignalInterrupt))


def exclude_working_folder() -> None:
    """Remove the working directory from the import path of this process and its children."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory (`python -m`), or the script's folder
    os.environ["PYTHONSAFEPATH"] = "1"
    if ROOT not in sys.path:  # an uninstalled checkout
        sys.path.insert(0, ROOT)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))


def describe_unusable_process() -> str | None:
    """Return an error message if the working directory was deleted, or Python drops docstrings."""
    if sys.flags.optimize > 1:
        return "PYTHONOPTIMIZE=2 or -OO: removes docstrings, which transformers needs; unset it"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory was deleted; change to another folder"
    return None


def describe_shadowed_package() -> str | None:
    """Return an error message if another package shadows one of ours, without importing any of them."""
    from importlib.util import find_spec
    from pathlib import Path

    for name in PACKAGES:
        spec, expected = find_spec(name), Path(ROOT, name, "__init__.py")
        origin = spec.origin if spec is not None and spec.origin else str(expected)
        if not os.path.samefile(origin, expected) or b"zerolora" not in expected.read_bytes():
            from importlib.metadata import packages_distributions

            others = sorted(set(packages_distributions().get(name, ())) - {"zerolora"})
            fix = f"pip uninstall {' '.join(others)} and reinstall zerolora" if others else "remove it from PYTHONPATH"
            return f"{origin}: shadows zerolora's package {name}; {fix}"
    return None


if __name__ == "__main__":
    main()
