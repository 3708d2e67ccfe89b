"""A slow rank is named where the others wait for it within their forward passes, timed by the card's clock."""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.conftest import ROOT
from tests.ends import HOST, TRAIN, runs_below, write_endless_run
from tests.tiny import make_model
from trainer.parallel.ranks.stragglers import MIN_SLOW_WINDOWS, WINDOW_STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
STEPS = WINDOW_STEPS * MIN_SLOW_WINDOWS


@pytest.mark.parametrize("gather", ["layer", "module"])
@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_rank_is_named_under_zero_3(tmp_path: Path, gather: str, slow: bool) -> None:
    workplace = write_endless_run(tmp_path)
    model = make_model(workplace / "deep", layers=12)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env.pop("DS_ACCELERATOR", None)
    settings = [f"base_model={model}", "zero.stage=3", f"zero.gather={gather}", f"training.max_steps={STEPS}"]
    if gather == "module":  # by default all of a small model stays whole
        settings += ["zero.persistence_threshold=0", "zero.prefetch_bucket_size=0"]
    with runs_below(tmp_path, env) as start:
        command = [*TRAIN, str(workplace / "config.yaml"), "--num-gpus", "2"]
        code, out, err = start(command, *settings, mischief="1:slow layer:1" if slow else "").end()
    assert code == 0, err
    notes = [line for line in (out + err).splitlines() if " is slow: its own work" in line]
    print(*notes, sep="\n")
    assert len(notes) == slow, out + err
    assert not slow or f"step {STEPS}: rank 1 on {HOST}" in notes[0]
