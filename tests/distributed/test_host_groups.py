"""zero.shard_within: a copy of the base per host gives the same training as one copy sharded over all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Matrix, environment, launch, run_ranks
from tests.distributed.host_groups_case import CASES, COMMON

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Matrix, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("hosts")
    launch(folder, 1, [], environment())  # writes the model and the data
    log = folder / "launch-4.log"
    code = run_ranks(
        4, "tests.distributed.host_groups_case", str(folder), env=environment(), log=log, timeout_s=1500
    )  # fmt: skip
    assert code == 0, log.read_text()[-3000:]
    folders = {name: str(changes.get("output_dir", name)).removeprefix("OUT/") for name, changes in CASES.items()}
    cases = [{"name": name, "overrides": {"output_dir": place}} for name, place in folders.items()]
    return Matrix(folder, cases), [json.loads((folder / f"bytes-{rank}.json").read_text()) for rank in range(4)]


def test_no_weights_cross_between_hosts(runs: tuple[Matrix, list[Any]]) -> None:
    for received in runs[1]:
        assert all(received[name]["far"] == 0 < received[name]["near"] for name in ("host", "auto", "nf4", "resumed"))
        # Of three other ranks one is on this host; each sends a quarter of the base where a host's other sends a half.
        assert received["all"]["far"] == 2 * received["all"]["near"] > 0
        assert received["pairs"]["far"] == 0 < received["pairs"]["near"]


@pytest.mark.parametrize(("name", "other"), [("host", "all"), ("auto", "all"), ("pairs", "all"), ("nf4", "nf4-all")])
def test_losses_and_adapters_are_equal_to_the_bit(runs: tuple[Matrix, list[Any]], name: str, other: str) -> None:
    one, two = runs[0][name], runs[0][other]
    steps = int(COMMON["training.max_steps"])
    assert one.losses[:steps] == two.losses[:steps] and len(one.losses) >= steps
    if "all" in (name, other):  # which another case resumes
        return
    adapters = one.adapter(), two.adapter()
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(value, adapters[1][key]) for key, value in adapters[0].items())


def test_a_run_resumes_with_another_group(runs: tuple[Matrix, list[Any]]) -> None:
    one, two = runs[0]["resumed"], runs[0]["resumed-all"]
    assert one.losses == two.losses and len(one.losses) == 6
    assert all(torch.equal(value, two.adapter()[key]) for key, value in one.adapter().items())


def test_a_run_resumes_on_uneven_hosts(runs: tuple[Matrix, list[Any]]) -> None:
    one, two = runs[0]["uneven"], runs[0]["resumed-all"]
    assert one.losses == two.losses and len(one.losses) == 6
    assert all(torch.equal(value, two.adapter()[key]) for key, value in one.adapter().items())
    received = [each["uneven"] for each in runs[1]]
    assert not any(each["far"] for each in received)
    assert [bool(each["near"]) for each in received] == [True, True, True, False]


def test_the_console_names_the_group(runs: tuple[Matrix, list[Any]]) -> None:
    assert "units over 2 ranks" in runs[0]["host"].console
    assert "units over 2 ranks" not in runs[0]["all"].console
