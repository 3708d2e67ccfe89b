"""The operators under DeepSpeed on two CPU ranks: the same losses for every ZeRO stage, base type, checkpointing."""

import json

import pytest

from tests.distributed.conftest import environment, run_ranks

STAGES = (0, 1, 2, 3)
KINDS = ("none", "reentrant", "non-reentrant")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    """Of both bases, by stage and kind of checkpointing."""
    folder = tmp_path_factory.mktemp("zero")
    out, log = folder / "losses.json", folder / "log"
    code = run_ranks(2, "tests.numerics.zero_rank", str(out), env=environment(), log=log, timeout_s=500)
    assert code == 0, log.read_text()[-3000:]
    return dict(json.loads(out.read_text()))


@pytest.mark.distributed
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_losses_agree_over_stages_and_checkpointing(losses: dict[str, dict[str, list[float]]], base: str) -> None:
    assert set(losses[base]) == {f"{stage} {kind}" for stage in STAGES for kind in KINDS}
    expected = losses[base]["0 none"]
    assert expected[-1] < expected[0]
    for case, found in losses[base].items():
        assert found == expected, case
