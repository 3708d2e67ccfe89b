"""Where Python finds modules: never in the working folder, whose trainer.py or ops/ would take the place of ours.

Nothing of trainer or ops is imported here: which files those names stand for is what is checked.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "trainer", "ops")


def leave_out_working_folder() -> None:
    """Import nothing from the working folder, in this process and in all that it starts."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder (`python -m`), or the folder of the script
    os.environ["PYTHONSAFEPATH"] = "1"
    if str(ROOT) not in sys.path:  # a checkout that is not installed
        sys.path.insert(0, str(ROOT))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def find_foreign_package() -> str | None:
    """Return an error message if another distribution's package has the name of one of ours; else None."""
    for name in PACKAGES:
        spec, own = find_spec(name), ROOT / name / "__init__.py"
        origin = spec.origin if spec is not None and spec.origin else str(own)
        if not os.path.samefile(origin, own) or b"zerolora" not in own.read_bytes():
            from importlib.metadata import packages_distributions

            others = sorted(set(packages_distributions().get(name, ())) - {"zerolora"})
            fix = f"pip uninstall {' '.join(others)} and reinstall zerolora" if others else "remove it from PYTHONPATH"
            return f"{origin}: takes the place of zerolora's package {name}; {fix}"
    return None
