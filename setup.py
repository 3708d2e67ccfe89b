"""ZEROLORA_BUILD_OPS=1 pip install --no-build-isolation -e .   builds the CUDA operators too, ahead of their first use.

Everything else about the package is in pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithOperators(build_py):
    """build_py, preceded by the operators' build where that is asked for; a failed build fails the installation.

    A wheel carries the files that commands read next to the packages of a checkout; trainer/contract/home.py finds it.
    """

    def run(self) -> None:
        if os.environ.get("ZEROLORA_BUILD_OPS") == "1":
            code = subprocess.call([sys.executable, "-m", "ops.builder", "build"], cwd=Path(__file__).parent)
            if code:
                sys.exit(code)  # an exception would be swallowed by setuptools in an editable installation
        super().run()
        if not self.editable_mode:
            home = Path(self.build_lib, "trainer", "contract", "home")
            shutil.rmtree(home, ignore_errors=True)
            for folder in ("configs", "slurm"):
                shutil.copytree(folder, home / folder)
            shutil.copy("pyproject.toml", home)


setup(cmdclass={"build_py": BuildWithOperators})
