"""The allocator's setting is there before torch is, and never over the user's."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
import trainer.allocator
print("torch" in sys.modules)
import trainer.train
print({name: os.environ.get(name) for name in trainer.allocator.NAMES})
"""


@pytest.mark.parametrize(
    "asked", [{}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}]
)
def test_it_is_set_before_torch_is_loaded(asked: dict[str, str]) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    env = {name: value for name, value in os.environ.items() if name not in names} | {"DS_ACCELERATOR": "cpu"} | asked
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    expected = asked or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    loaded, variables = done.stdout.splitlines()[-2:]
    assert loaded == "False"
    assert variables == str({name: expected.get(name) for name in names})
