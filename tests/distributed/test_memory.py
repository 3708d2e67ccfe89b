"""Under ZeRO-3 no rank ever holds the whole model, quantised or not."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.distributed.conftest import ROOT, deepspeed_command, environment
from tests.tiny import make_model

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, int]], int]:
    """Peaks of both ranks in bytes, and the bytes of the whole model in fp32."""
    folder = tmp_path_factory.mktemp("memory")
    make_model(folder / "small")
    make_model(folder / "model", layers=16, hidden=768)
    log = (folder / "log").open("w")
    command = deepspeed_command(2, "tests.distributed.memory_case", str(folder))
    # Freed tensors go back to the system at once, so that resident memory is what is held.
    env = environment() | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=log, stderr=log, timeout=300, check=False)
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    size = sum(path.stat().st_size for path in Path(folder / "model").glob("*.safetensors"))
    return [json.loads((folder / f"peaks-{rank}.json").read_text()) for rank in (0, 1)], size


def test_the_measure_sees_a_whole_model(measured: tuple[list[dict[str, int]], int]) -> None:
    peaks, size = measured
    assert size > 300 * 2**20
    assert all(peak["whole"] > 0.9 * size for peak in peaks)


def test_a_rank_holds_its_half_and_one_module(measured: tuple[list[dict[str, int]], int]) -> None:
    peaks, size = measured
    assert max(peak["lora"] for peak in peaks) < 0.65 * size


def test_a_rank_holds_its_half_of_the_4bit_model_and_one_module(measured: tuple[list[dict[str, int]], int]) -> None:
    """4 bits and scales are 0.13 of fp32; half of that and one module in full precision are far below a model."""
    peaks, size = measured
    assert max(peak["qlora"] for peak in peaks) < 0.2 * size
