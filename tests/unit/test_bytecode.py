"""Bytecode of the libraries: what is missing is found, compiled for a rank's imports, and reported by doctor."""

import json
import os
import subprocess
import sys
import time
from importlib.util import cache_from_source
from pathlib import Path

import psutil
import pytest

from launcher.doctor.this_host import check_bytecode
from trainer.contract import bytecode

IMPORTED = """
import json, sys
import peft
print(json.dumps([module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "peft"]))
"""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which this process and its children look for bytecode."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    return tmp_path / "cache"


def test_all_that_a_library_imports_is_compiled(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "ROOTS", ("peft",))
    monkeypatch.setattr(bytecode, "OWN", ())
    monkeypatch.setattr(bytecode, "WANTED", {"peft"})
    monkeypatch.setattr(sys, "stdlib_module_names", frozenset())
    compiled = bytecode.compile_imports(1)
    printed = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True).stdout
    imported = json.loads(printed)
    assert compiled >= len(imported) > 100
    assert not [path for path in imported if not os.path.exists(cache_from_source(path))]
    assert empty.is_dir()


def test_missing_bytecode_is_compiled_in_the_background(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytecode.missing_bytecode() == ["torch", "transformers", "deepspeed"]
    found = check_bytecode()
    assert found.state == "WARN" and found.found.startswith("none for torch, transformers, deepspeed: ")
    # As in an environment of another user: bytecode goes to the cache folder, and the next process finds it there.
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("ZEROLORA_CACHE", str(tmp_path / "zerolora"))
    monkeypatch.setattr(bytecode, "missing_bytecode", lambda: ["torch"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    bytecode.use_bytecode(compiles=False)
    assert sys.pycache_prefix == os.environ["PYTHONPYCACHEPREFIX"] == str(tmp_path / "zerolora" / "bytecode")
    assert not bytecode.IN_BACKGROUND
    bytecode.use_bytecode(compiles=True)
    with bytecode.IN_BACKGROUND.pop() as process:
        while not any(Path(sys.pycache_prefix).rglob("*.pyc")) and process.poll() is None:
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children()
        process.terminate()
    assert not psutil.wait_procs(workers, timeout=30)[1]
    assert any(Path(sys.pycache_prefix).rglob("*.pyc"))
