"""The operators under DeepSpeed on two CPU ranks: the same losses for every ZeRO stage, base type, checkpointing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = (0, 1, 2, 3)
KINDS = ("none", "reentrant", "non-reentrant")


@pytest.mark.distributed
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_losses_agree_over_stages_and_checkpointing(base, tmp_path):
    out = tmp_path / "losses.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        [*command, str(ROOT / "tests/numerics/zero_rank.py"), base, str(out)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    losses = json.loads(out.read_text())
    assert set(losses) == {f"{stage} {kind}" for stage in STAGES for kind in KINDS}
    expected = losses["0 none"]
    assert expected[-1] < expected[0]
    for case, found in losses.items():
        assert found == expected, case
