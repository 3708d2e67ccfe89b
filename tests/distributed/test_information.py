"""The controller on two gloo ranks and real DeepSpeed engines of every ZeRO stage equals one process without any."""

import json
import math
from typing import Any

import pytest

from tests.distributed.conftest import environment, run_ranks

CASES = [
    *(f"{measure}-stage{stage}" for measure in ("delta", "factors") for stage in (0, 1, 2, 3)),
    *(f"{measure}-stage3-resident" for measure in ("delta", "factors")),
    *(f"{measure}-stage{stage}-checkpointing" for measure in ("delta", "factors") for stage in (2, 3)),
    "delta-stage2-dora",
]

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One launch of two ranks runs every case."""
    out = tmp_path_factory.mktemp("scu") / "results.json"
    log = out.with_suffix(".log")
    code = run_ranks(2, "tests.distributed.scu_case", str(out), env=environment(), log=log, timeout_s=300)
    assert code == 0, log.read_text()[-4000:]
    return dict(json.loads(out.read_text(encoding="utf-8")))


@pytest.mark.parametrize("case", CASES)
def test_param_bpt_equals_the_unsharded_value(results: dict[str, Any], case: str) -> None:
    got, want = results[case]["squares"]
    assert len(got) == 3 and min(want) > 0
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_adapter_can_be_read_before_the_first_forward(results: dict[str, Any], case: str) -> None:
    """As the check of the target does: with a reach of 0 both bounds are the value of the first step."""
    assert results[case]["before"] == pytest.approx([results[case]["squares"][1][0]] * 2, rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_engine_does_not_time_the_throughput(results: dict[str, Any], case: str) -> None:
    """DeepSpeed's timer waits for the device twice a micro-step."""
    assert results[case]["timed"] is False


@pytest.mark.parametrize("case", [case for case in CASES if "stage1" in case or "stage2" in case])
def test_our_gradient_norm_is_deepspeeds_and_not_finite_where_one_rank_has_a_nan(
    results: dict[str, Any], case: str
) -> None:
    norms = results[case]["norms"]
    assert len(norms) == 3
    for theirs, ours, broken in norms:
        assert theirs > 0 and ours == pytest.approx(theirs, rel=1e-6)
        assert math.isnan(broken)


@pytest.mark.parametrize("measure", ["delta", "factors"])
def test_stage_3_had_partitioned_the_adapter_when_the_term_was_made(results: dict[str, Any], measure: str) -> None:
    assert results[f"{measure}-stage3"]["partitioned"] > 0
    assert results[f"{measure}-stage3-checkpointing"]["partitioned"] > 0
    assert results[f"{measure}-stage3-resident"]["partitioned"] == 0


@pytest.mark.parametrize("case", CASES)
def test_data_bpt_over_ragged_micro_steps_equals_the_single_process_value(results: dict[str, Any], case: str) -> None:
    got, want = results[case]["data_bpt"]
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_three_steps_move_the_weights_as_the_single_process_does(results: dict[str, Any], case: str) -> None:
    """SGD: a weight's move is its gradient, so a term counted twice, per micro-step or not at all would show."""
    assert results[case]["weight_moved"] > 0.01
    assert results[case]["weight_error"] < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_lambda_takes_the_same_values(results: dict[str, Any], case: str) -> None:
    got, want = results[case]["lambda"]
    assert len(set(want)) == 3
    assert got == pytest.approx(want, rel=1e-5)


def test_every_case_ran(results: dict[str, Any]) -> None:
    assert set(results) == {*CASES, "agreement"}


def test_lambda_has_the_same_bits_on_both_ranks_for_50_steps(results: dict[str, Any]) -> None:
    first, second = results["agreement"]["lambdas"]
    assert len(first) == 50 and len(set(first)) > 10
    assert first == second


def test_one_bit_of_difference_stops_the_run_and_names_the_rank(results: dict[str, Any]) -> None:
    fault = results["agreement"]["fault"]
    assert "step 350" in fault and "differ between ranks" in fault and "rank 1" in fault
