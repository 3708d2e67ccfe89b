"""torch.compile changes the time of a step and nothing else; compiling takes minutes on a CPU."""

from pathlib import Path

import pytest

from tests.distributed.conftest import Matrix, environment, launch
from tests.distributed.plan import case

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]


def test_a_compiled_model_has_the_same_losses(tmp_path: Path) -> None:
    plan = [case("plain"), case("compiled", training__torch_compile=True, ops__backend="reference")]
    launch(tmp_path, 1, plan, environment())
    runs = Matrix(tmp_path, plan)
    assert runs["compiled"].losses == pytest.approx(runs["plain"].losses, abs=1e-5)
    times = runs["compiled"].records("perf/step_ms")
    assert times[0] > 10 * times[-1], "the first step compiles, or nothing was compiled"
    assert "0 of them grouped" in runs["compiled"].console
