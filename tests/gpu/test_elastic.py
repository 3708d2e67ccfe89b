"""Two real GPUs, of which one is lost and comes back."""

from pathlib import Path

import pytest
import torch

from tests.chaos.places import OnGpus
from tests.restarting import lose_one_and_come_back, write_short_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() != 2, reason="needs two GPUs")]


def test_the_other_gpu_goes_on_alone_until_both_are_there_again(tmp_path: Path) -> None:
    lose_one_and_come_back(write_short_run(tmp_path), OnGpus())
