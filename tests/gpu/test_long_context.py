"""Inputs and attention of recomputed layers in host memory on a real GPU: the gradients and the memory of a pass."""

import gc

import pytest
import torch

from tests.bench.long_context import VARIANTS, build, one_pass
from trainer.patches import recompute

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("documents", [1, 4])
@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_gradients_are_those_of_layers_that_are_recomputed_whole(variant: str, documents: int) -> None:
    """Sums in 16 bits depend on their order; tests/unit/test_tiled_mlp.py compares the same pass in 32 bits."""
    length = 4 * 4096
    whole = one_pass(build("tinyllama-1.1b", 4, CUDA, {}), length, documents).float()
    model = build("tinyllama-1.1b", 4, CUDA, VARIANTS[variant] | {"tiled_mlp": 4096})
    for _ in range(2):  # the second pass reuses the buffers of the first
        found = one_pass(model, length, documents).float()
        assert float((found - whole).norm() / whole.norm()) < 4e-2


def test_host_memory_frees_the_inputs_of_all_but_two_layers() -> None:
    """Eight layers of 2,048 in 16 bits at 16,384 tokens: 64 MiB each, the embedding among them."""
    peaks = []
    for training in (VARIANTS["tiles"], VARIANTS["tiles, host"]):
        model = build("tinyllama-1.1b", 8, CUDA, training)
        one_pass(model, 16_384)
        torch.cuda.reset_peak_memory_stats()
        one_pass(model, 16_384)
        peaks.append(torch.cuda.max_memory_allocated())
        del model
        gc.collect()  # its patches refer to it, and its weights would count for the next one
    assert peaks[0] - peaks[1] > 5 * 2**26


@pytest.mark.parametrize("room", [0, 3])
def test_inputs_without_room_in_host_memory_stay_on_the_device(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight inputs of 64 MiB, the host takes none or the first three; gradients are the same."""
    whole = one_pass(build("tinyllama-1.1b", 8, CUDA, VARIANTS["tiles, host"]), 16_384).float()
    taken = list[int]()

    def compute_host_memory_budget() -> int:
        taken.append(2**26 if sum(taken) < room * 2**26 else 0)
        return taken[-1]

    monkeypatch.setattr(recompute, "compute_host_memory_budget", compute_host_memory_budget)
    found = one_pass(build("tinyllama-1.1b", 8, CUDA, VARIANTS["tiles, host"]), 16_384).float()
    assert float((found - whole).norm() / whole.norm()) < 1e-2
    assert sum(taken) == room * 2**26 and len(taken) >= 8
