"""The derivative in C++ (ops/csrc/operator/autograd.cpp), which CUDA tensors take, compiled here for CPU tensors.

What it registers holds for the whole process, so that every test is one of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ["-p", "tests.numerics.autograd_on_cpu"]
pytestmark = pytest.mark.nightly
NAME = "zerolora_autograd_cpu"
# In a child as well: torch loads what it has built.
BUILD = """
import sys
from torch.utils import cpp_extension
import ops
from ops.builder import CSRC, LoraOpBuilder

flags = [*LoraOpBuilder().cxx_args(), "-O0", "-DZEROLORA_AUTOGRAD=AutogradCPU"]
options = dict(extra_cflags=flags, build_directory=sys.argv[2], is_python_module=False)
cpp_extension.load(sys.argv[1], [str(CSRC / "operator" / "autograd.cpp")], **options)
"""
EARLY_STOP = """
import sys
import tests.numerics.autograd_on_cpu
from tests.numerics.early_stop import assert_last_outputs_are_computed_once

assert_last_outputs_are_computed_once("cpu", float(sys.argv[1]))
"""
LIFETIME = """
import gc, weakref
import torch
import tests.numerics.autograd_on_cpu
from ops import lora_group

class Packed:
    def __init__(self, tensor):
        self.tensor = tensor

kept = []
def pack(tensor):
    kept.append(packed := Packed(tensor))
    return packed

def run():
    down, up = torch.randn(4, 16, requires_grad=True), torch.randn(24, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        (y,) = lora_group(torch.randn(12, 16), [torch.randn(24, 16)], [None], [down], [up], [0.5])
    count, kept[:] = len(kept), [weakref.ref(packed) for packed in kept]
    assert count == 5, count  # x, h, weight, A, B
    return y.sum()

loss = run()
assert all(packed() is not None for packed in kept)
loss.backward(retain_graph=True)
assert all(packed() is not None for packed in kept)
loss.backward()
gc.collect()
assert all(packed() is None for packed in kept), "kept after the backward, while the graph still lives"
try:
    loss.backward()
except RuntimeError as error:
    assert "second time" in str(error), error
else:
    raise AssertionError("a second backward through a graph that was freed")
kept.clear()
loss = run()
del loss
gc.collect()
assert all(packed() is None for packed in kept), "kept by a graph that was freed"
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a child that takes the derivative from the library, which is compiled first."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("autograd")
    env = {**os.environ, "ZEROLORA_AUTOGRAD_LIBRARY": str(folder / f"{NAME}.so"), "PYTHONPATH": str(ROOT)}
    run(env, "-c", BUILD, NAME, str(folder))
    return env


def run(env: dict[str, str], *command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_tests_of_the_reference_hold(env: dict[str, str]) -> None:
    """Gradients, opcheck, graph breaks, freed and refilled weights, NF4, 8 bits, and every refusal."""
    files = [f"tests/numerics/test_{name}.py" for name in ("reference", "groups", "eight_bit")]
    run(env, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN, *files)


@pytest.mark.parametrize("dropout", ["0.0", "0.3"])
def test_a_checkpoint_does_not_compute_its_last_outputs_again(env: dict[str, str], dropout: str) -> None:
    run(env, "-c", EARLY_STOP, dropout)


def test_what_is_kept_goes_with_the_backward_or_the_graph(env: dict[str, str]) -> None:
    run(env, "-c", LIFETIME)
