"""A wheel that is installed elsewhere has all that its commands read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = {".yaml", ".css", ".jinja"}
SOURCES = ("launcher", "trainer", "ops", "configs", "slurm")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has unpacked the wheel in."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "built"))
    for file in FILES:
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(target), str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    return target


def zerolora(installed: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "launcher.cli", *arguments]
    done = subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_commands_find_presets_and_the_job_script(installed: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    assert zerolora(installed, "--version").strip()
    assert str(config) in zerolora(installed, "init", "--preset", "tinyllama", "--output", str(config))
    output = f"output_dir={tmp_path}/run"
    script = zerolora(installed, "submit", str(config), "dataset.path=data.jsonl", output, "--dry-run")
    home = installed / "trainer" / "contract" / "home"
    assert script.startswith("#!") and f"ZEROLORA_HOME={home}" in script
    assert (home / "slurm" / "env.sh").is_file() and (home / "pyproject.toml").is_file()
    assert list((installed / "ops" / "csrc").rglob("*.cu"))
    files = [path for folder in SOURCES[:3] for path in (ROOT / folder).rglob("*") if path.suffix in DATA]
    assert {path.suffix for path in files} == DATA
    assert all((installed / path.relative_to(ROOT)).is_file() for path in files)


def test_a_package_that_was_installed_over_ours_is_one_message(installed: Path, tmp_path: Path) -> None:
    """Both are in site-packages, in one folder."""
    both = tmp_path / "both"
    shutil.copytree(installed, both)
    (both / "trainer" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (both / "trainer" / "trainer.py").touch()
    metadata = both / "trainer-0.0.36.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trainer\nVersion: 0.0.36\n")
    (metadata / "RECORD").write_text("trainer/__init__.py,,\ntrainer/trainer.py,,\n")
    command = [sys.executable, "-m", "launcher.cli", "--version"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(both)}, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "pip uninstall trainer and reinstall zerolora" in done.stderr
