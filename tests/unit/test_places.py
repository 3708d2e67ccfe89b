"""Which places take part after a failure: what is there, and of it the most that divides the global batch."""

import os
from pathlib import Path

import pytest

from launcher import places as launcher_places
from launcher.places import Places, most_that_divide
from launcher.plan import Request
from launcher.targets.slurm import Allocation
from trainer.config import UserError

NONE: frozenset[int] = frozenset()


@pytest.fixture
def on_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Places, set[str]]:
    """Slots of three hosts, 4, 2 and 2; and those that answer."""
    (tmp_path / "hostfile").write_text("a slots=4\nb slots=2\nc slots=2\n")
    answering = {"a", "b", "c"}
    monkeypatch.setattr(launcher_places, "reachable", lambda hosts, folder: [one for one in hosts if one in answering])
    monkeypatch.setattr("launcher.plan.check_reachable", lambda hosts, folder: None)
    monkeypatch.setattr("launcher.plan._address_of", lambda host: host)
    return Places(Request(hostfile=tmp_path / "hostfile"), tmp_path), answering


@pytest.fixture
def on_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Places, list[str]]:
    """Four nodes with two ranks each; and those that are lost."""
    lost: list[str] = []
    allocation = Allocation(7, ("n1", "n2", "n3", "n4"), 2)
    monkeypatch.setattr(launcher_places, "read_allocation", lambda env, **filters: allocation)
    monkeypatch.setattr(launcher_places, "lost_nodes", lambda allocation: list(lost))
    return Places(Request(launcher="slurm"), tmp_path), lost


def included(places: Places, left_out: frozenset[int], total: int | None) -> str:
    build, _ = places.again(left_out, total).plan
    return next(word for word in build([]).argv if word.startswith("--include="))


def test_slots_of_the_hosts_that_answer_and_divide(
    on_hosts: tuple[Places, set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    places, answering = on_hosts
    assert included(places, NONE, None) == "--include=a:0,1,2,3@b:0,1@c:0,1"
    answering.remove("b")
    again = places.again(NONE, 8)
    assert again.places == (0, 1, 2, 3) and again.idle == 2
    assert "not reached by ssh: b" in capsys.readouterr().err
    assert included(places, NONE, 8) == "--include=a:0,1,2,3"
    assert included(places, NONE, 12) == "--include=a:0,1,2,3@c:0,1"
    answering.clear()
    with pytest.raises(UserError, match="none of its hosts can be reached"):
        places.again(NONE, 8)


def test_a_slot_that_failed_is_left_out_by_its_host(on_hosts: tuple[Places, set[str]]) -> None:
    places, _ = on_hosts
    name, with_it = places.unit(5) or ("", NONE)
    assert (name, with_it) == ("slot 1 of b", {5})
    assert included(places, frozenset(with_it), 7 * 3) == "--include=a:0,1,2,3@b:0@c:0,1"
    assert included(places, frozenset({0, 1, 2, 3}), 8) == "--include=b:0,1@c:0,1"
    build, reach = places.again(frozenset({0, 1, 2, 3}), 8).plan
    assert build([]).ranks == 4 and reach is not None
    with pytest.raises(UserError, match="no slot is left"):
        places.again(frozenset(range(8)), 8)


@pytest.mark.parametrize(
    ("lost", "total", "shape", "idle"),
    [
        ([], 16, "--ntasks=8", 0),
        (["n2"], 16, "--ntasks=4", 2),  # three nodes of two: six ranks would not divide
        (["n2"], 12, "--ntasks=6", 0),
        (["n2"], 9, "--ntasks=3", 3),  # one rank on each
        (["n1", "n2", "n3"], 16, "--ntasks=2", 0),
    ],
)
def test_nodes_that_are_left_and_divide(
    on_nodes: tuple[Places, list[str]], lost: list[str], total: int, shape: str, idle: int
) -> None:
    places, gone = on_nodes
    gone += lost
    again = places.again(NONE, total)
    command = again.plan[0]([])
    assert shape in command.argv and command.ranks == len(again.places) and again.idle == idle
    assert not {f"n{place // 2 + 1}" for place in again.places} & set(lost)


def test_a_node_whose_rank_failed_is_left_out_as_a_whole(on_nodes: tuple[Places, list[str]]) -> None:
    places, gone = on_nodes
    assert places.unit(3) == ("node n2", {2, 3})
    again = places.again(frozenset({2, 3}), 12)
    assert again.places == (0, 1, 4, 5, 6, 7) and "--nodelist=n1,n3,n4" in again.plan[0]([]).argv
    gone += ["n1", "n3", "n4"]
    with pytest.raises(UserError, match="none of its nodes is left"):
        places.again(frozenset({2, 3}), 12)


def test_ranks_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    places = Places(Request(launcher="local", num_gpus=6), tmp_path)
    assert places.unit(4) == ("the place of rank 4", {4})
    again = places.again(frozenset({4}), 12)
    assert again.places == (0, 1, 2, 3) and again.idle == 1
    assert places.again(NONE, None).places == tuple(range(6))


def test_gpus_of_this_machine_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [2, 3, 5, 7]
    monkeypatch.setattr(launcher_places, "visible_gpus", lambda: list(there))
    places = Places(Request(launcher="local"), tmp_path)
    assert places.unit(2) == ("GPU 5", {2})
    assert places.again(frozenset({2}), None).places == (0, 1, 3)
    there.remove(7)
    assert places.again(NONE, None).places == (0, 1, 2)
    there.clear()


@pytest.mark.parametrize(("total", "most"), [(None, 7), (16, 4), (7, 7), (11, 1)])
def test_the_most_that_divide(total: int | None, most: int) -> None:
    assert most_that_divide(range(1, 8), total) == most
    assert most_that_divide([], total) == 0
