"""The derivative in C++ (ops/csrc/autograd.cpp), which CUDA tensors take, compiled here for CPU tensors.

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
pytestmark = pytest.mark.slow
NAME = "zerolora_autograd_cpu"
# In a child as well: torch loads what it has built.
BUILD = """
import sys
from torch.utils import cpp_extension
import ops
from ops.builder import CSRC, LoraOpBuilder

flags = [*LoraOpBuilder().cxx_args(), "-O0", "-DZEROLORA_AUTOGRAD=AutogradCPU"]
options = dict(extra_cflags=flags, build_directory=sys.argv[2], is_python_module=False)
cpp_extension.load(sys.argv[1], [str(CSRC / "autograd.cpp")], **options)
"""
# A decoder layer in small: the last linear of the region that is computed again has outputs nobody asks for.
EARLY_STOP = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
import tests.numerics.autograd_on_cpu
from ops import lora_group

NAMES = "lora_project", "lora_forward", "lora_backward"

class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("zerolora::")
        self.names += [name] if name in NAMES else []
        return function(*args, **(kwargs or {}))

torch.manual_seed(0)
p = float(sys.argv[1])
x = torch.randn(12, 16, requires_grad=True)
shapes = (16, 24), (24, 16)
weights = [torch.randn(out, width) for width, out in shapes]
adapters = [[torch.randn(4, i, requires_grad=True), torch.randn(o, 4, requires_grad=True)] for i, o in shapes]
leaves = [x, *adapters[0], *adapters[1]]

def layer(x):
    y = x
    for weight, (down, up) in zip(weights, adapters):
        (y,) = lora_group(torch.tanh(y), [weight], [None], [down], [up], [0.5], p)
    return x + y

def gradients(run):
    torch.manual_seed(1)
    with Calls() as calls:
        loss = run(layer, x).square().sum()
        forward = len(calls.names)
        found = torch.autograd.grad(loss, leaves)
    return found, calls.names[:forward], calls.names[forward:]

plain, forward, backward = gradients(lambda function, x: function(x))
again, first, second = gradients(lambda function, x: checkpoint(function, x, use_reentrant=False))
assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
assert forward == first == ["lora_project", "lora_forward"] * 2, forward
assert backward == ["lora_backward"] * 2, backward
assert second == ["lora_project", "lora_forward", "lora_project", "lora_backward", "lora_backward"], second
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
assert all(packed() is None for packed in kept), "kept by a graph that is gone"
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
    """Gradients, opcheck, graph breaks, freed and refilled weights, NF4, and every refusal."""
    files = ["tests/numerics/test_reference.py", "tests/numerics/test_groups.py"]
    run(env, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN, *files)


@pytest.mark.parametrize("dropout", ["0.0", "0.3"])
def test_a_checkpoint_does_not_compute_its_last_outputs_again(env: dict[str, str], dropout: str) -> None:
    run(env, "-c", EARLY_STOP, dropout)


def test_what_is_kept_goes_with_the_backward_or_the_graph(env: dict[str, str]) -> None:
    run(env, "-c", LIFETIME)
