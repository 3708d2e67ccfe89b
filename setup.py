"""ZEROLORA_BUILD_OPS=1 pip install --no-build-isolation -e .   builds the CUDA operators too, ahead of their first use.

Everything else about the package is in pyproject.toml.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithOperators(build_py):
    """build_py, preceded by the operators' build where that is asked for; a failed build fails the installation."""

    def run(self) -> None:
        if os.environ.get("ZEROLORA_BUILD_OPS") == "1":
            code = subprocess.call([sys.executable, "-m", "ops.builder", "build"], cwd=Path(__file__).parent)
            if code:
                sys.exit(code)  # an exception would be swallowed by setuptools in an editable installation
        super().run()


setup(cmdclass={"build_py": BuildWithOperators})
