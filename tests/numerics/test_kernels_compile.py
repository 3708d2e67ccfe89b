"""Every CUDA source compiles, for Ampere and for Hopper, given nvcc; no GPU, no CUDA build of torch is needed.

What has once compiled with the same headers, flags and compiler, is not compiled again: its hash is kept.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ops.builder import CSRC, LoraOpBuilder

CACHE = Path(os.environ.get("ZEROLORA_CI_CACHE") or Path.home() / ".cache" / "zerolora-ci")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=str(CACHE / "nvcc" / "nvidia" / "cu13" / "bin"))
LONG = (
    "rank/rank_wgmma.cu",
    "rank/rank_mma.cu",
    "experts/expert_gate.cu",
    "experts/expert_rank.cu",
    "frozen/frozen.cu",
)
SOURCES = [
    pytest.param(source, marks=pytest.mark.slow if source in LONG else ())
    for source in sorted(str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cu"))
]


@pytest.mark.skipif(NVCC is None, reason="needs nvcc, which scripts/nvcc.sh installs")
@pytest.mark.parametrize("source", SOURCES)
def test_it_compiles(tmp_path: Path, source: str) -> None:
    assert NVCC is not None
    builder = LoraOpBuilder(["80", "90a"])
    flags = [*builder.nvcc_args(), *(f"-I{path}" for path in builder.include_paths()), "-Xcompiler=-fPIC"]
    version = subprocess.run([NVCC, "--version"], capture_output=True, text=True, timeout=300, check=True).stdout
    known = hashlib.sha256(repr((version, flags)).encode())
    for path in (CSRC / source, *sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh"))):
        known.update(path.read_bytes())
    compiled = CACHE / "compiled" / known.hexdigest()
    if compiled.exists():
        return
    command = [NVCC, *flags, "-c", str(CSRC / source), "-o", str(tmp_path / "object.o")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "object.o").stat().st_size > 0
    compiled.parent.mkdir(parents=True, exist_ok=True)
    compiled.touch()
