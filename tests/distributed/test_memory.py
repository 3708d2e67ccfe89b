"""Under ZeRO-3 no rank ever holds the whole model, quantised or not."""

import json
from pathlib import Path

import pytest

from tests.distributed.conftest import environment, run_ranks
from tests.mixtures import make_mixture
from tests.tiny import make_model

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the peaks of both ranks, in bytes."""
    folder = tmp_path_factory.mktemp("memory")
    make_model(folder / "small")
    make_model(folder / "model", layers=16, hidden=768)
    make_mixture(folder / "small-experts", "mixtral")
    shape = {"hidden_size": 512, "intermediate_size": 256, "num_local_experts": 16, "num_hidden_layers": 10}
    make_mixture(folder / "model-experts", "mixtral", **shape)
    # Freed tensors go back to the system at once, so that resident memory is what is held.
    env = environment() | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    module, log = "tests.distributed.memory_case", folder / "log"
    assert run_ranks(2, module, str(folder), env=env, log=log, timeout_s=300) == 0, log.read_text()[-3000:]
    return folder


def peaks_of(folder: Path, kind: str) -> list[int]:
    return [json.loads((folder / f"peaks-{rank}.json").read_text())[kind] for rank in (0, 1)]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_the_measure_sees_a_whole_model(folder: Path) -> None:
    size = size_of(folder / "model")
    assert size > 300 * 2**20
    assert min(peaks_of(folder, "whole")) > 0.9 * size


@pytest.mark.parametrize(("kind", "model"), [("lora", "model"), ("experts-lora", "model-experts")])
def test_a_rank_holds_its_half_and_one_module(folder: Path, kind: str, model: str) -> None:
    """Size of one layer's experts in an MoE model that stores experts one by one."""
    assert max(peaks_of(folder, kind)) < 0.65 * size_of(folder / model)


@pytest.mark.parametrize(("kind", "model"), [("qlora", "model"), ("experts-qlora", "model-experts")])
def test_a_rank_holds_its_half_of_the_4bit_model_and_one_module(folder: Path, kind: str, model: str) -> None:
    """4 bits and scales are 0.13 of fp32; half of that and one module in full precision are far below a model."""
    assert max(peaks_of(folder, kind)) < 0.2 * size_of(folder / model)
