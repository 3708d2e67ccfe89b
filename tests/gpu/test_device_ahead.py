"""What ranks on GPUs have done in threads by the time that it is needed."""

import pytest

from trainer.parallel.ranks.device_ahead import hash_triton_ahead

pytestmark = pytest.mark.gpu


def test_tritons_library_is_hashed_before_the_first_kernel() -> None:
    cache = pytest.importorskip("triton.runtime.cache", reason="needs Triton, which comes with torch's CUDA builds")
    cache.triton_key.cache_clear()
    hash_triton_ahead().join()
    assert cache.triton_key.cache_info().currsize == 1
