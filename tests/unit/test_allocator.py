"""The allocator is set before torch is imported, in all programs that train, and never over the user's setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# The programs of a rank and of a run of a comparison.
PROGRAMS = ("trainer.train", "benchmarks.compare.trial")
CODE = """
import importlib, os, sys
importlib.import_module(sys.argv[1])
from trainer.parallel.ranks.training_process import ALLOCATOR_VARIABLES
print("torch" in sys.modules, {name: os.environ.get(name) for name in ALLOCATOR_VARIABLES})
"""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "asked", [{}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}]
)
def test_it_is_set_before_torch_is_loaded(asked: dict[str, str], program: str) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    env = {name: value for name, value in os.environ.items() if name not in names} | {"DS_ACCELERATOR": "cpu"} | asked
    done = subprocess.run([sys.executable, "-c", CODE, program], env=env, capture_output=True, text=True, check=True)
    expected = asked or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert done.stdout == f"False { ({name: expected.get(name) for name in names}) }\n"


def test_nothing_else_that_can_be_started_trains() -> None:
    """What imports trainer.run is started by one of the programs above, which set the allocator first."""
    sources = {path: path.read_text(encoding="utf-8") for path in (CHECKOUT / "trainer").rglob("*.py")}
    training = [path for path, text in sources.items() if "from trainer.run import" in text]
    assert training and not [path for path in training if "__main__" in sources[path]]


def test_commands_that_compute_on_no_device_choose_none_for_who_imports_them() -> None:
    code = "import os, trainer.commands.validate, trainer.commands.estimate; print(os.environ.get('DS_ACCELERATOR'))"
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "None"
