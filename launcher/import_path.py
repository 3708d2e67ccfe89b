"""Keep the working folder out of sys.path: its trainer.py or ops/ would shadow ours.

Imports nothing of trainer or ops, because it checks which files those names resolve to.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "trainer", "ops")


def exclude_working_folder() -> None:
    """Remove the working folder from the import path of this process and its children."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder (`python -m`), or the folder of the script
    os.environ["PYTHONSAFEPATH"] = "1"
    if str(ROOT) not in sys.path:  # an uninstalled checkout
        sys.path.insert(0, str(ROOT))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def find_foreign_package() -> str | None:
    """Return an error message if another distribution shadows one of our packages, else None."""
    for name in PACKAGES:
        spec, own = find_spec(name), ROOT / name / "__init__.py"
        origin = spec.origin if spec is not None and spec.origin else str(own)
        if not os.path.samefile(origin, own) or b"zerolora" not in own.read_bytes():
            from importlib.metadata import packages_distributions

            others = sorted(set(packages_distributions().get(name, ())) - {"zerolora"})
            fix = f"pip uninstall {' '.join(others)} and reinstall zerolora" if others else "remove it from PYTHONPATH"
            return f"{origin}: shadows zerolora's package {name}; {fix}"
    return None
