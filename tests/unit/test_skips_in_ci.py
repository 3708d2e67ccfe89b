"""In CI a skip for lack of something that could be installed is a failure; examples have no deadline anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[2]
HOOKS = "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
# The second is a fault that is known, which counts as a skip with pytest and is none.
CASES = """
import pytest
def test_gpu():
    pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False

@pytest.mark.skipif(True, reason="no Chromium on this machine")
def test_browser():
    pass
"""
WHOLE_FILE = 'import pytest\npytest.importorskip("no_such_module", reason="needs the wheel no_such_module")\n'


@pytest.mark.parametrize(("ci", "failed"), [("true", 2), ("", 0)])
def test_a_skip_for_lack_of_a_package_fails_in_ci_alone(tmp_path: Path, ci: str, failed: int) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_whole_file.py").write_text(WHOLE_FILE)
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-ra", "--continue-on-collection-errors", "-p", "no:cacheprovider", "."]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == (1 if failed else 0), ran.stdout
    assert f"{3 - failed} skipped, 1 xfailed{', 2 errors' if failed else ''} in" in ran.stdout, ran.stdout
    for reason in ("no Chromium on this machine", "needs the wheel no_such_module"):
        assert (f"skipped, which CI does not allow for this reason: {reason}" in ran.stdout) == (failed > 0)


def test_no_example_has_a_deadline() -> None:
    assert hypothesis.settings().deadline is None
