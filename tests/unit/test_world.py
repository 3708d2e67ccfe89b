"""What ranks tell of themselves, and what is said where they differ."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.plan import LaunchRequest, plan_launch
from trainer.config import RunConfig, UserError, compute_collective_timeout
from trainer.contract.folder_lock import FolderLock
from trainer.contract.rendezvous import describe_port_problem, find_free_port, get_host_name
from trainer.entry.rank import main as train
from trainer.parallel.ranks.agreement import (
    RankReport,
    check_ranks_agree,
    check_shared_folder,
    compute_code_version,
    find_differences,
    format_summary,
)
from trainer.parallel.ranks.group import Ranks

ROOT = Path(__file__).parents[2]
MEET = """
import os, sys
from pathlib import Path
from trainer.config import RunConfig, UserError, compute_collective_timeout
from trainer.parallel.ranks.agreement import check_ranks_agree
from trainer.parallel.ranks.group import Ranks

ranks = Ranks.from_environment()
os.environ["SLURMD_NODENAME"] = f"n{ranks.rank + 1}"
config = RunConfig.model_validate({"base_model": "m", "output_dir": "run", "dataset": {"path": "d"}})
try:
    token = sys.argv[1] if ranks.is_main else ""
    timeout = compute_collective_timeout(config.training)
    world = check_ranks_agree(ranks, config.model_dump_json(), Path(config.output_dir), timeout, token)
    print(world.summary)
    print(world.hosts)
except UserError as error:
    print("refused:", error)
"""

DECIDE = """
from trainer.config import UserError
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.agreement import decide_on_rank_0

def refuse():
    raise UserError("output_dir=x: no")

ranks = Ranks.from_environment()
try:
    decide_on_rank_0(ranks, 2.0, refuse)
except UserError as error:
    print("refused:", error)
print("given:", decide_on_rank_0(ranks, 2.0, lambda: "a lock"))
"""

FACTS = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "code": "0.1.0+aa", "configuration": "cc"}


def world(hosts: int = 3, per_host: int = 2) -> list[RankReport]:
    return [
        RankReport(rank, f"n{rank // per_host + 1}", "cuda NVIDIA H200", f"GPU-{rank}", dict(FACTS))
        for rank in range(hosts * per_host)
    ]


def test_nothing_differs() -> None:
    assert find_differences(world()) == []
    assert (
        format_summary(world())
        == "world        6 ranks on n1, n2, n3: cuda NVIDIA H200; torch 2.13.0, deepspeed 0.19.8"
    )


def test_a_version_is_named_with_its_hosts() -> None:
    reports = world()
    reports[2] = replace(reports[2], values=FACTS | {"torch": "2.11.0"})
    reports[3] = replace(reports[3], values=FACTS | {"torch": "2.11.0"})
    reported = find_differences(reports)
    assert reported == [("torch differs: 2.13.0 on n1, n3; 2.11.0 on n2", "install one version of torch on all hosts")]


def test_a_missing_package_and_other_code_and_another_configuration() -> None:
    reports = world()
    values = {name: value for name, value in FACTS.items() if name != "deepspeed"}
    reports[4] = replace(reports[4], values=values | {"code": "0.1.0+bb", "configuration": "dd"})
    reported = "\n".join(map("; ".join, find_differences(reports)))
    assert "deepspeed differs: 0.19.8 on n1, n2, n3; not installed on n3" in reported
    assert "code differs: 0.1.0+aa on n1, n2; 0.1.0+bb on n3; use one checkout" in reported
    assert "configuration differs: cc on n1, n2, n3; dd on n3; give every rank the same file" in reported


def test_a_host_without_its_gpu() -> None:
    reports = world()
    reports[1] = replace(reports[1], device="cpu", device_id="")
    (problem, fix), *_ = find_differences(reports)
    assert problem == "device differs: cuda NVIDIA H200 on n1, n2, n3; cpu on n1" and "`zerolora doctor`" in fix


def test_two_ranks_on_one_gpu() -> None:
    reports = world()
    reports[3] = replace(reports[3], device_id="GPU-2")
    assert find_differences(reports) == [("ranks 2, 3 on n2 use the same GPU", "start one rank per GPU")]


def test_many_hosts_are_cut_short() -> None:
    assert " on n1, n2, n3, n4, ... n40 (40):" in format_summary(world(hosts=40))


def test_the_code_is_the_sources() -> None:
    version, _, digest = compute_code_version().partition("+")
    assert version and len(digest) == 12 and int(digest, 16) >= 0


def test_a_taken_port_is_reported_with_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command where the ranks meet on its host, by the first rank elsewhere."""
    port = find_free_port()
    assert not describe_port_problem(port)
    config = RunConfig.model_validate({"base_model": "m", "output_dir": "o", "dataset": {"path": "d"}})
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as listener:
        listener.bind(("", port))
        listener.listen()
        with pytest.raises(UserError, match=f"^--master-port {port}: not free on this host .Address already in use"):
            plan_launch(LaunchRequest(master_port=port), Path())
        with pytest.raises(UserError, match=f"^--master-port {port}: not free on {get_host_name()} "):
            timeout = compute_collective_timeout(config.training)
            check_ranks_agree(Ranks(0, 2, 0), config.model_dump_json(), Path(config.output_dir), timeout)


def said_by_two(program: str, *arguments: str, folders: tuple[Path, Path] = (ROOT, ROOT)) -> list[list[str]]:
    """The lines of two ranks that run a program, each in its folder."""
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    env["PYTHONPATH"] = str(ROOT)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments], env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folders[rank], stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    return [process.communicate(timeout=500)[0].splitlines() for process in ranks]


def test_all_ranks_receive_the_decision_of_rank_0() -> None:
    said = said_by_two(DECIDE)
    assert [lines[0] for lines in said] == ["refused: output_dir=x: no"] * 2
    assert [lines[1] for lines in said] == ["given: a lock", "given: None"]


@pytest.mark.nightly
def test_a_folder_that_the_hosts_do_not_share_is_named_on_all_ranks(tmp_path: Path) -> None:
    """Both are given `run`, in folders of their own: the same name and not the same files, as on a local disk."""
    reports = [replace(report, sees_folder=report.host == "n1") for report in world()]
    assert check_shared_folder(reports, "/run") == [
        "output_dir=/run: files that rank 0 on n1 writes there are not visible on n2, n3; use a folder on "
        "a file system that all hosts share"
    ]
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    with FolderLock.acquire(here / "run", resumes=False, log=print) as lock:
        shared = said_by_two(MEET, lock.token, folders=(here, here))
        assert all(lines[0].startswith("world        2 ranks on n1, n2: ") for lines in shared), shared
        assert [lines[1] for lines in shared] == ["2"] * 2
        apart = said_by_two(MEET, lock.token, folders=(here, there))
    reported = "refused: output_dir=run: files that rank 0 on n1 writes there are not visible on n2; use a folder on"
    assert all(lines[0].startswith(reported) for lines in apart), apart


def test_a_rank_that_was_started_by_hand_leaves_another_runs_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even its logs and heartbeats are touched; nor is the model looked at, which is not there."""
    config = tmp_path / "c.yaml"
    config.write_text(f"base_model: none\noutput_dir: {tmp_path / 'run'}\ndataset: {{path: none.jsonl}}\n")
    with FolderLock.acquire(tmp_path / "run", resumes=False, log=print):
        (tmp_path / "run" / "logs" / "heartbeat-0.json").write_text("the other's")
        assert train([str(config)]) == UserError.exit_code
        assert (tmp_path / "run" / "logs" / "heartbeat-0.json").read_text() == "the other's"
        assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["heartbeat-0.json", "lock.json"]
    error = capsys.readouterr().err
    assert f"in use by another run (process {os.getpid()} on " in error and error.count("\n") == 1
