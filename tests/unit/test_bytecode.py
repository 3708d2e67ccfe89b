"""Bytecode of the libraries: what is missing is reported by doctor, and kept by a rank where it may be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.doctor.this_host import check_bytecode
from trainer.contract import bytecode

START = "from trainer.contract.bytecode import redirect_bytecode; redirect_bytecode(); import deepspeed.pydantic_v1"


def test_doctor_names_libraries_without_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    found = check_bytecode()
    assert found.state == "WARN" and found.found.startswith("missing for torch, transformers, deepspeed: ")
    assert "compileall" in found.fix


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_rank_keeps_bytecode_that_containers_do_not(tmp_path: Path, is_kept: bool) -> None:
    """In a library without bytecode, where PYTHONDONTWRITEBYTECODE is set; with bytecode nothing changes."""
    library = tmp_path / "site" / "deepspeed"
    library.mkdir(parents=True)
    for name in ("__init__", "pydantic_v1"):
        (library / f"{name}.py").write_text("")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    paths = [str(Path(bytecode.__file__).parents[2]), str(tmp_path / "site")]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "ZEROLORA_CACHE": str(tmp_path / "cache")}
    if not is_kept:
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(library)], check=True)
    start = [sys.executable, "-S", "-c", START]  # without the environment's own libraries
    subprocess.run(start, env=environment | {"PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    kept = list((tmp_path / "cache").rglob("pydantic_v1*.pyc"))
    assert bool(kept) == is_kept
