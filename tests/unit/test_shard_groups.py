"""Groups of ranks that share a copy of the base, and their use by estimate and `auto`."""

import json
from pathlib import Path

import pytest

from tests.tiny import make_model, write_chats
from trainer.commands.doctor.ranks import check_shard_groups
from trainer.commands.estimate import build_planner, main
from trainer.config import UserError, load_config
from trainer.parallel.ranks.group import ShardScope, list_shard_groups

HOSTS = ["a", "b", "a", "b", "a", "c"]


@pytest.mark.parametrize(
    ("within", "groups"),
    [
        ("host", [[0, 2, 4], [1, 3], [5]]),
        ("all", [[0, 2, 4, 1, 3, 5]]),
        ("auto", [[0, 2, 4, 1, 3, 5]]),
        (2, [[0, 2], [4, 1], [3, 5]]),
        (3, [[0, 2, 4], [1, 3, 5]]),
        (6, [[0, 2, 4, 1, 3, 5]]),
    ],
)
def test_groups_follow_the_hosts(within: ShardScope, groups: list[list[int]]) -> None:
    assert list_shard_groups(within, HOSTS) == groups


def test_groups_of_unequal_size_are_refused() -> None:
    with pytest.raises(UserError, match=r"zero.shard_within=4: 6 ranks cannot .* use host, all or a divisor"):
        list_shard_groups(4, HOSTS)


@pytest.mark.parametrize(
    ("settings", "state", "found"),
    [
        (
            ["zero.stage=3"],
            "OK",
            "auto: 3 replica(s) of the base model, each sharded over 1 or 2 or 3 ranks, if a replica fits on a host",
        ),
        (
            ["zero.stage=3", "zero.shard_within=all"],
            "WARN",
            "all: 1 replica(s) of the base model, each sharded over 6 ranks; every layer's weights",
        ),
        (["zero.stage=3", "zero.shard_within=4"], "FAIL", "6 ranks cannot be divided into groups of 4"),
    ],
)
def test_doctor_reports_the_groups(config: Path, settings: list[str], state: str, found: str) -> None:
    (check,) = check_shard_groups(load_config(config, settings).config, HOSTS)
    assert (check.name, check.state) == ("zero.shard_within", state) and found in check.found
    assert not [*check_shard_groups(load_config(config, ["zero.stage=2"]).config, HOSTS)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    write_chats(tmp_path / "train.jsonl", 40)
    path = tmp_path / "c.yaml"
    values = {
        "base_model": str(tmp_path / "model"), "output_dir": str(tmp_path / "out"),
        "dataset": {"path": str(tmp_path / "train.jsonl"), "max_length": 64, "cache_dir": str(tmp_path / "cache")},
        "training": {"batch_size": 1, "max_steps": 2}, "zero": {"stage": 3},
    }  # fmt: skip
    path.write_text(json.dumps(values))
    return path


def test_auto_shards_within_a_host_if_that_fits(config: Path) -> None:
    planner, _ = build_planner(load_config(config, []).config, 8, 2)
    within = load_config(config, []).config
    host, everywhere = (
        planner.estimate(load_config(config, [f"zero.shard_within={each}"]).config).needed for each in ("host", "all")
    )
    assert host > everywhere
    assert planner.resolve(within, host).zero.shard_within == "host"
    assert planner.resolve(within, host - 1).zero.shard_within == "all"
    assert planner.resolve(within, None).zero.shard_within == "host"


def test_estimate_counts_the_traffic_between_hosts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def received(within: str, *options: str) -> dict[str, int]:
        given = [str(config), f"zero.shard_within={within}", "--json", "--gpus", "8", *options]
        assert main(given) == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)["bytes_received"]
        return found

    host, everywhere, one = (
        received("host", "--gpus-per-host", "4"),
        received("all", "--gpus-per-host", "4"),
        received("all"),
    )
    assert host["weights_from_other_hosts"] == one["weights_from_other_hosts"] == 0
    # Of 8 shards 4 are on the other host and 3 on other GPUs of this one; of 4 on a host 3 are on other GPUs.
    assert 3 * everywhere["weights_from_other_hosts"] == pytest.approx(4 * everywhere["weights_from_its_host"], abs=8)
    assert 7 * host["weights_from_its_host"] == pytest.approx(6 * one["weights_from_its_host"], abs=16)
    assert len({each["gradients"] for each in (host, everywhere, one)}) == 1


def test_impossible_hosts_are_a_usage_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for hosts in ("5", "3"):
        assert main([str(config), "--gpus", "4", "--gpus-per-host", hosts]) == 2
        assert f"--gpus-per-host {hosts}: must be between 1 and --gpus (4), and divide it" in capsys.readouterr().err
