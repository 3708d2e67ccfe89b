"""The kernels of older cards on whatever card is here, as PTX that the driver compiles: tests/gpu/older_cards.py.

Of 7.5 plain fused multiply-adds in every type, from 8.0 on mma.sync.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ops import prebuilt
from tests.gpu.older_cards import PARTS

TIMEOUT_S = 1200
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs an NVIDIA GPU of compute capability 8.0 or newer",
    ),
]
ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("compute_75", "compute_80", "compute_86", "compute_89")
"""7.0 has no compiler in CUDA 13; Hopper's driver compiles nothing newer than its own."""
Started = dict[str, tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A process and its output for each; all at once, as most of the time is nvcc's."""
    folder = tmp_path_factory.mktemp("older-cards")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != prebuilt.OPS_PATH_VARIABLE} | {
        "PYTHONPATH": path
    }
    newest = 10 * torch.cuda.get_device_capability()[0] + 9
    started: Started = {}
    for name in ARCHITECTURES:
        if int(name.removeprefix("compute_")) <= newest:
            command = [sys.executable, "-m", "tests.gpu.older_cards", name]
            with (folder / name).open("wb") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
            started[name] = process, folder / name
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kernels_of_older_cards_agree(running: Started, name: str, part: str) -> None:
    if name not in running:
        pytest.skip("newer than this card")
    process, path = running[name]
    process.wait(timeout=TIMEOUT_S)
    output = path.read_text()
    found = [line for line in output.splitlines() if line.startswith(f"{name} {part} ")]
    assert len(found) == 1, output[-2000:]
    outcome = found[0].removeprefix(f"{name} {part} ")
    if outcome.startswith("skipped: "):
        pytest.skip(outcome.removeprefix("skipped: "))
    assert outcome == "agrees", output[-6000:]
