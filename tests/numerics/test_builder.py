"""The builder: registration, architectures, one-line errors, and one build at a time per node."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ops import backend
from ops.builder import LoraOpBuilder, build_lock, main, register, report
from ops.toolkit import BuildError, all_architectures, check_capability, check_toolkit, gencode

ROOT = Path(__file__).resolve().parents[2]


def test_registers_into_deepspeeds_table():
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builder = register()
    assert ALL_OPS["zerolora_lora"] is builder
    lines = report().splitlines()
    ours = next(line for line in lines if line.startswith("zerolora_lora"))
    assert re.fullmatch(r"zerolora_lora +(yes|no) +(yes|no)", ours)
    assert any(line.startswith("fused_adam") for line in lines)


def test_sources_are_absolute_and_all_there():
    builder = LoraOpBuilder()
    assert all(Path(path).is_absolute() and Path(path).exists() for path in builder.sources())
    assert {Path(path).suffix for path in builder.sources()} == {".cu", ".cpp"}


@pytest.mark.parametrize(
    ("toolkit", "expected"),
    [
        ((11, 8), ["70", "75", "80", "86", "89"]),
        ((12, 4), ["70", "75", "80", "86", "89", "90a"]),
        ((12, 8), ["70", "75", "80", "86", "89", "90a", "120"]),
        ((13, 0), ["75", "80", "86", "89", "90a", "120"]),
    ],
)
def test_architectures_follow_the_toolkit(toolkit, expected):
    assert all_architectures(toolkit) == expected


def test_flags_carry_sm_90a_and_no_fast_math():
    flags = LoraOpBuilder(["80", "90a", "compute_120"]).nvcc_args()
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert "-gencode=arch=compute_120,code=compute_120" in flags
    assert "-DZEROLORA_HOPPER" in flags and "-DZEROLORA_HOPPER" not in LoraOpBuilder(["80"]).nvcc_args()
    assert not any("fast_math" in flag for flag in flags)
    assert gencode("75") == "-gencode=arch=compute_75,code=sm_75"


@pytest.mark.parametrize(
    ("toolkit", "torch_cuda", "message"),
    [
        ((11, 7), "11.7", "nvcc 11.7: at least 11.8"),
        ((12, 8), "13.0", "nvcc 12.8 does not match torch .* CUDA 13.0: set CUDA_HOME"),
    ],
)
def test_toolkits_that_do_not_fit(toolkit, torch_cuda, message):
    with pytest.raises(BuildError, match=message) as caught:
        check_toolkit(toolkit, torch_cuda)
    assert "\n" not in str(caught.value)


def test_cards_that_are_too_old():
    assert check_capability((9, 0), (13, 0)) == "90a"
    assert check_capability((7, 0), (12, 8)) == "70"
    with pytest.raises(BuildError, match=r"6\.1: 7\.0 \(Volta\) or newer"):
        check_capability((6, 1), (12, 8))
    with pytest.raises(BuildError, match=r"7\.0: nvcc 13\.0 starts at 7\.5"):
        check_capability((7, 0), (13, 0))


@pytest.mark.skipif(torch.version.cuda is not None, reason="checks what a torch without CUDA says")
def test_torch_without_cuda_is_one_line_and_auto_takes_the_reference(monkeypatch, capsys):
    assert main(["build"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "built without CUDA" in error and "ops.backend: reference" in error
    monkeypatch.setattr(backend, "_loaded", None)
    monkeypatch.setattr(backend, "_library", None)
    with pytest.raises(ValueError, match=r"ops.backend=cuda: torch .* is built without CUDA"):
        backend.load("cuda")
    chosen = backend.load("auto")
    assert chosen.name == "reference" and "built without CUDA" in chosen.reason
    with pytest.raises(ValueError, match="expected auto, cuda or reference"):
        backend.load("triton")  # type: ignore[arg-type]


def test_missing_nvcc_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    builder = LoraOpBuilder()
    with pytest.raises(BuildError, match="nvcc not found"):
        builder.check()
    assert not builder.is_compatible() and "nvcc not found" in builder.error_log


HOLDER = """
import sys
from pathlib import Path
from ops.builder import build_lock
with build_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_second_builder_waits_and_names_the_first(tmp_path, capsys):
    path = tmp_path / "node.lock"
    first, inside = holder(path), threading.Event()

    def build() -> None:
        with build_lock(path):
            inside.set()

    second = threading.Thread(target=build)
    second.start()
    said = ""
    while "\n" not in said:
        time.sleep(0.01)
        said += capsys.readouterr().out
    assert f"waiting for process {first.pid}" in said
    assert not inside.is_set()
    first.communicate("")
    second.join()
    assert inside.is_set()


def test_a_killed_builder_leaves_no_lock(tmp_path):
    path = tmp_path / "node.lock"
    first = holder(path)
    first.kill()
    first.wait()
    with build_lock(path):  # without waiting for anybody: there is nobody left who would let go
        pass
