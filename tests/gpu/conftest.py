"""What tests of the operators on a card share."""

from collections.abc import Iterator

import pytest
import torch

import ops


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    """The CUDA operators, with memory in which an element that a kernel does not write shows."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    assert ops.load_backend("cuda").name == "cuda"
    # Every torch.empty is filled with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    # Products of cuBLAS: with 16-bit reductions inside them the budget of fp32 sums would not hold.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.use_deterministic_algorithms(False)
