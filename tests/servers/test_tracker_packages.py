"""tests/unit/test_trackers.py in an environment with the packages of all trackers."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.distributed.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PACKAGES = ("wandb", "mlflow-skinny", "swanlab", "comet_ml", "trackio")


def test_metrics_reach_every_service(tmp_path: Path) -> None:
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = place / "lib" / version / "site-packages" / "base.pth"
    own.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for package in PACKAGES:  # one by one: pip's search for versions of all together takes very long
        subprocess.run([str(place / "bin" / "pip"), "install", "-q", package], check=True)
    command = [
        str(place / "bin" / "python"),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/unit/test_trackers.py",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]
