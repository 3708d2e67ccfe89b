"""Tests that need packages which the test environment lacks, in an environment with them."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.distributed.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

DEPLOY = "tests/integration/test_deploy.py"
PACKAGES = {
    "trackers": ("tests/unit/test_trackers.py", "", ("mlflow-skinny", "swanlab", "comet_ml", "trackio")),
    "s3": ("tests/integration/test_s3.py", "", ("s3fs", "moto[s3]", "flask", "flask-cors")),
    "kubeflow": (DEPLOY, "kubeflow and knows", ("kubeflow-trainer-api",)),
    "skypilot": (DEPLOY, "skypilot and knows", ("skypilot",)),
    "ray": (DEPLOY, "ray_takes", ("ray[default]",)),
    "quantizers": ("tests/servers/test_quantizers.py", "", ("auto-round",)),
}
"""File, names of its tests, and packages."""


@pytest.mark.parametrize("name", PACKAGES)
def test_with_the_packages_of_others(tmp_path: Path, name: str) -> None:
    file, chosen, packages = PACKAGES[name]
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = place / "lib" / version / "site-packages" / "base.pth"
    own.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for package in packages:  # one by one: pip's search for versions of all together takes very long
        subprocess.run([str(place / "bin" / "pip"), "install", "-q", package], check=True)
    command = [
        str(place / "bin" / "python"),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
        file,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]
