"""Set-up: what it would install here, its pins within the declared ranges, and CI running what people type."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
SETUP = ROOT / "scripts" / "setup.sh"
HAS_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.slow
@pytest.mark.skipif(HAS_NVIDIA_DRIVER, reason="with an NVIDIA driver, set-up installs the CUDA build on purpose")
def test_setup_brings_no_cuda_package_without_a_driver(tmp_path: Path) -> None:
    """pip's dry-run report of the very command that set-up runs."""
    report = tmp_path / "report.json"
    result = subprocess.run(
        [SETUP, "--report", report], env={**os.environ, "VENV": sys.prefix}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    chosen: dict[str, str] = {canonicalize_name(item["name"]): item["version"] for item in items}
    assert [name for name in chosen if name.startswith(("nvidia-", "cuda-", "triton"))] == []
    assert chosen["torch"].split("+")[0] == pins()["torch"]
    assert {"zerolora", "deepspeed", "transformers", "peft", "bitsandbytes", "datasets"} <= set(chosen)


def test_setup_refuses_a_cuda_build_without_a_driver_and_names_the_variable(tmp_path: Path) -> None:
    """An index of one wheel, a torch that asks for an NVIDIA package, as the default build does on Linux."""
    index = tmp_path / "index"
    index.mkdir()
    for name, version, needs in (("torch", pins()["torch"], "nvidia-cublas"), ("nvidia_cublas", "13.0", "")):
        info = f"{name}-{version}.dist-info"
        requires = f"Requires-Dist: {needs}\n" if needs else ""
        with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH_INDEX"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    environment |= {"VENV": str(tmp_path / "venv"), "ACCELERATOR": "cpu"}
    result = subprocess.run([SETUP], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "TORCH_INDEX_URL" in last and f"torch=={pins()['torch']}" in last
    assert not (tmp_path / "venv" / ".zerolora-setup").exists()


def test_every_declared_dependency_is_pinned_within_its_range() -> None:
    declared = project()["dependencies"] + [
        line for extra in project()["optional-dependencies"].values() for line in extra
    ]
    pinned = pins()
    wrong = [
        f"{requirement}: pinned to {pinned.get(canonicalize_name(requirement.name))}"
        for requirement in map(Requirement, declared)
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """.ci/run calls `make test` and `make test-ci`, both exist, and the README names the first."""
    script = (ROOT / ".ci" / "run").read_text()
    loop = re.search(r"^for target in (.+); do$", script, re.MULTILINE)
    assert loop and loop[1].split() == ["test", "test-ci"]
    assert 'make "$target"' in script and re.search(r"^make .*system nvcc$", script, re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "test-ci", "test-slow", "lint", "bench", "clean"} <= set(targets)
    assert "make test" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_missing_system_package_is_fatal_in_ci_alone(ci: str, code: int) -> None:
    environment = os.environ | {"CI": ci, "ZEROLORA_APT": "0"}
    command = [str(ROOT / "scripts" / "system.sh"), "no-such-package"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr == "system packages: no-such-package missing, skipped: ZEROLORA_APT=0\n"


def test_no_file_names_a_package_registry() -> None:
    """Machines behind a mirror configure pip; a host written down here would go past it."""
    hosts = [f"{host}.org" for host in ("pypi", "pythonhosted", "download.pytorch")]
    files = ["pyproject.toml", "constraints.txt", "Makefile", "Dockerfile", ".pre-commit-config.yaml", ".ci/run"]
    files += ["scripts/nvcc.sh", "scripts/setup.sh", "scripts/system.sh"]
    texts = {path: (ROOT / path).read_text() for path in files}
    assert [(path, host) for path, text in texts.items() for host in hosts if host in text] == []


def test_the_launcher_starts_without_torch() -> None:
    """A login node has no GPU and little patience: the command line loads none of the heavy libraries."""
    heavy = "'torch', 'transformers', 'deepspeed'"
    code = f"import launcher.commands, sys; print([name for name in ({heavy}) if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr
