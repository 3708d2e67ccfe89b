"""Which hosts take part after a failure: of those present, the most that divide the global batch."""

from functools import partial
from pathlib import Path

import pytest

from launcher import rank_slots
from launcher.plan import LaunchRequest, plan_launch
from launcher.rank_slots import RestartPlanner, find_largest_divisor
from launcher.targets.local import build_local_command
from launcher.targets.slurm import Allocation, build_srun_command
from trainer.config import UserError

NONE: frozenset[int] = frozenset()


@pytest.fixture
def plan_on_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RestartPlanner, set[str]]:
    """Slots of three hosts, 4, 2 and 2; and those that answer."""
    (tmp_path / "hostfile").write_text("a slots=4\nb slots=2\nc slots=2\n")
    answering = {"a", "b", "c"}
    monkeypatch.setattr(
        rank_slots,
        "detect_unreachable_hosts",
        lambda hosts, folder: {one: "down" for one in hosts if one not in answering},
    )
    monkeypatch.setattr("launcher.plan.check_reachable", lambda hosts, folder: None)
    monkeypatch.setattr("launcher.plan._find_reachable_name", lambda host: host)
    request = LaunchRequest(hostfile=tmp_path / "hostfile", master_addr="a.cluster")
    return RestartPlanner(request, tmp_path, plan_launch(request, tmp_path)[0]), answering


@pytest.fixture
def on_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RestartPlanner, list[str]]:
    """Four nodes with two ranks each; and those that are lost."""
    lost: list[str] = []
    build = partial(build_srun_command, allocation=Allocation(7, ("n1", "n2", "n3", "n4"), 2))
    monkeypatch.setattr(rank_slots, "detect_lost_nodes", lambda allocation: list(lost))
    return RestartPlanner(LaunchRequest(launcher="slurm", master_addr="n1-ib"), tmp_path, build), lost


def included(places: RestartPlanner, excluded: frozenset[int], total: int | None) -> str:
    build, _ = places.plan_restart(excluded, total).plan
    return next(word for word in build([]).argv if word.startswith("--include="))


def test_slots_of_the_hosts_that_answer_and_divide(
    plan_on_hosts: tuple[RestartPlanner, set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    places, answering = plan_on_hosts
    assert included(places, NONE, None) == "--include=a:0,1,2,3@b:0,1@c:0,1"
    answering.remove("b")
    again = places.plan_restart(NONE, 8)
    assert again.slots == (0, 1, 2, 3) and again.available == 6
    assert "not reachable by ssh: b" in capsys.readouterr().err
    assert included(places, NONE, 8) == "--include=a:0,1,2,3"
    assert included(places, NONE, 12) == "--include=a:0,1,2,3@c:0,1"
    answering.clear()
    with pytest.raises(UserError, match="no slot is available on a reachable host"):
        places.plan_restart(NONE, 8)


def test_ranks_meet_at_master_addr_while_its_host_takes_part(
    plan_on_hosts: tuple[RestartPlanner, set[str]],
) -> None:
    places, answering = plan_on_hosts
    assert "--master_addr=a.cluster" in places.plan_restart(NONE, 8).plan[0]([]).argv
    answering.remove("a")
    assert "--master_addr=b" in places.plan_restart(NONE, 8).plan[0]([]).argv


def test_another_host_in_the_file_takes_part_where_all_are_taken(
    plan_on_hosts: tuple[RestartPlanner, set[str]], tmp_path: Path
) -> None:
    places, answering = plan_on_hosts
    answering.add("d")
    (tmp_path / "hostfile").write_text("a slots=4\nd slots=2\nc slots=2\n")
    assert included(places, NONE, None) == "--include=a:0,1,2,3@d:0,1@c:0,1"
    (tmp_path / "hostfile").write_text("a slots=4\nc slots=2\nd slots=4\n")
    assert included(places, NONE, None) == "--include=a:0,1,2,3@c:0,1@d:0,1", "no more than at first"


def test_a_slot_that_failed_is_left_out_by_its_host(plan_on_hosts: tuple[RestartPlanner, set[str]]) -> None:
    places, _ = plan_on_hosts
    name, with_it = places.find_failure_domain(5) or ("", NONE)
    assert (name, with_it) == ("slot 1 of b", {5})
    assert included(places, frozenset(with_it), 7 * 3) == "--include=a:0,1,2,3@b:0@c:0,1"
    assert included(places, frozenset({0, 1, 2, 3}), 8) == "--include=b:0,1@c:0,1"
    build, remote = places.plan_restart(frozenset({0, 1, 2, 3}), 8).plan
    assert build([]).ranks == 4 and remote is not None
    with pytest.raises(UserError, match="no slot is available"):
        places.plan_restart(frozenset(range(8)), 8)


@pytest.mark.parametrize(
    ("lost", "total", "shape", "available"),
    [
        ([], 16, "--ntasks=8", 8),
        (["n2"], 16, "--ntasks=4", 6),  # three nodes of two: six ranks would not divide
        (["n2"], 12, "--ntasks=6", 6),
        (["n2"], 9, "--ntasks=3", 6),
        ([], 4, "--nodelist=n1,n2", 8),  # of two with four ranks the one on fewer nodes
        (["n1", "n2", "n3"], 16, "--ntasks=2", 2),
    ],
)
def test_nodes_that_are_left_and_divide(
    on_nodes: tuple[RestartPlanner, list[str]], lost: list[str], total: int, shape: str, available: int
) -> None:
    places, gone = on_nodes
    gone += lost
    again = places.plan_restart(NONE, total)
    command = again.plan[0]([])
    assert shape in command.argv and command.ranks == len(again.slots) and again.available == available
    taking_part = [f"n{place // 2 + 1}" for place in again.slots]
    assert not set(taking_part) & set(lost)
    assert command.set_variables["MASTER_ADDR"] == ("n1-ib" if "n1" in taking_part else taking_part[0])


def test_the_whole_node_of_a_failed_rank_is_excluded(on_nodes: tuple[RestartPlanner, list[str]]) -> None:
    places, gone = on_nodes
    assert places.find_failure_domain(3) == ("node n2", {2, 3})
    again = places.plan_restart(frozenset({2, 3}), 12)
    assert again.slots == (0, 1, 4, 5, 6, 7) and "--nodelist=n1,n3,n4" in again.plan[0]([]).argv
    gone += ["n1", "n3", "n4"]
    with pytest.raises(UserError, match="none of its nodes is available"):
        places.plan_restart(frozenset({2, 3}), 12)


def test_ranks_of_this_machine(tmp_path: Path) -> None:
    request = LaunchRequest(launcher="local", num_gpus=2)
    places = RestartPlanner(request, tmp_path, partial(build_local_command, gpus=[], num_gpus=2, port=1))
    assert places.find_failure_domain(1) == ("the slot of rank 1", {1})
    again = places.plan_restart(frozenset({1}), 12)
    assert again.slots == (0,) and again.available == 1 and again.plan[0]([]).ranks == 1
    assert places.plan_restart(NONE, None).slots == (0, 1)


def test_a_gpu_is_known_by_its_own_name_where_the_numbers_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CUDA_VISIBLE_DEVICES=2,3,5,7 of eight."""
    there = [f"GPU-{number}" for number in range(8)]
    monkeypatch.setattr(rank_slots, "list_installed_gpus", lambda: list(there))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    request = LaunchRequest(launcher="local")
    places = RestartPlanner(request, tmp_path, partial(build_local_command, gpus=[2, 3, 5, 7], num_gpus=None, port=1))
    assert places.find_failure_domain(2) == ("GPU 5", {2})
    there.remove("GPU-2")
    again = places.plan_restart(frozenset({2}), None)
    variables = [rank["CUDA_VISIBLE_DEVICES"] for rank in again.plan[0]([]).rank_environments]
    assert again.slots == (1, 3) and variables == ["2,6", "2,6"]  # those that were 3 and 7
    assert "the driver no longer lists GPU 2" in capsys.readouterr().err
    there.clear()
    with pytest.raises(UserError, match="no GPU of this machine is available"):
        places.plan_restart(NONE, 8)


@pytest.mark.parametrize(("total", "most"), [(None, 7), (16, 4), (7, 7), (11, 1)])
def test_the_most_that_divide(total: int | None, most: int) -> None:
    assert find_largest_divisor(range(1, 8), total) == most
    assert find_largest_divisor([], total) == 0
