"""Hostfiles and the filters on them: everything wrong is said, nothing falls back to this machine."""

import sys
from pathlib import Path

import pytest

from launcher.plan import LaunchRequest
from launcher.targets.hostfile import filter_slots, read_hostfile
from launcher.targets.local import build_hostfile_command, select_exported_variables, write_environment
from launcher.targets.mpi import build_mpirun_command
from launcher.targets.slurm import Allocation, build_srun_command, read_allocation
from trainer.config import UserError

SLOTS = {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "c": [0, 1]}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "h", "# two\n\na slots=4\nuser@b.example.org   slots=2  # old\n")
    assert read_hostfile(path) == {"a": [0, 1, 2, 3], "user@b.example.org": [0, 1]}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no host"),
        ("# only words\n", "names no host"),
        ("a slots=4\na slots=4\n", "line 2 names a again"),
        ("a slots=4\nb\n", "line 2 is 'b'"),
        ("a slots=0\n", "line 1"),
        ("a slots=four\n", "line 1"),
        ("a;reboot slots=4\n", "line 1"),
        ("-oProxyCommand=x slots=4\n", "line 1"),
    ],
)
def test_a_bad_hostfile_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read_hostfile(write(tmp_path / "h", text))


def test_a_missing_hostfile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_hostfile(tmp_path / "h")
    with pytest.raises(UserError, match="is a folder"):
        read_hostfile(tmp_path)


@pytest.mark.parametrize(
    ("filters", "chosen"),
    [
        ({}, SLOTS),
        ({"include": "a"}, {"a": [0, 1, 2, 3]}),
        ({"include": "c@a:0,2"}, {"a": [0, 2], "c": [0, 1]}),
        ({"include": "a:0@a:3"}, {"a": [0, 3]}),
        ({"exclude": "b"}, {"a": [0, 1, 2, 3], "c": [0, 1]}),
        ({"exclude": "a:1@b:0,1,2,3"}, {"a": [0, 2, 3], "c": [0, 1]}),
        ({"num_nodes": 1}, {"a": [0, 1, 2, 3]}),
        ({"num_gpus": 2}, {"a": [0, 1], "b": [0, 1], "c": [0, 1]}),
        ({"include": "b:2,3", "num_gpus": 1}, {"b": [2]}),
    ],
)
def test_filters(filters: dict[str, object], chosen: dict[str, list[int]]) -> None:
    found = filter_slots(SLOTS, **filters)  # type: ignore[arg-type]
    assert found == chosen and list(found) == list(chosen)


@pytest.mark.parametrize(
    ("filters", "complaint"),
    [
        ({"include": "a", "exclude": "b"}, "--include and --exclude cannot be combined"),
        ({"include": "d"}, "--include d: d must be one of a, b, c"),
        ({"include": "a:7"}, "a has no slot '7'"),
        ({"include": "a:x"}, "a has no slot 'x'"),
        ({"include": ""}, "an empty name"),
        ({"exclude": "a@b@c"}, "leaves no GPU"),
        ({"num_nodes": 4}, "--num-nodes 4: must be 1 to 3, the number of hosts"),
        ({"num_nodes": 0}, "--num-nodes 0"),
        ({"num_gpus": 3}, "--num-gpus 3: must be 1 to 2, the number of GPUs of c"),
        ({"num_gpus": 0}, "--num-gpus 0"),
    ],
)
def test_filters_that_cannot_be(filters: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        filter_slots(SLOTS, **filters)  # type: ignore[arg-type]


def test_deepspeed_gets_exactly_these_slots_and_never_runs_here_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pdsh").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    command = build_hostfile_command(
        ["c.yaml"], hostfile=Path("h"), slots={"a": [0, 2]}, address="a", port=1234, environment_file=Path("/e")
    )
    assert command.ranks == 2 and command.set_variables["DS_ENV_FILE"] == "/e"
    assert command.argv[1:] == (
        "--hostfile=h", "--include=a:0,2", "--force_multi", "--launcher=pdsh", "--master_port=1234", "--master_addr=a",
        "--module", "trainer.train", "c.yaml", "--world-size=2",
    )  # fmt: skip
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="pdsh is not installed"):
        build_hostfile_command(
            [], hostfile=Path("h"), slots={"a": [0]}, address="a", port=1, environment_file=Path("/e")
        )


def test_secrets_do_not_travel_on_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"HF_HOME": "/shared", "HF_TOKEN": "hf_x", "WANDB_API_KEY": "k", "NCCL_DEBUG": "WARN", "SHELL": "/bin/sh"}
    env |= {"CUDA_VISIBLE_DEVICES": "0", "HF_SECRET": "s", "NCCL_PASSWORD": "p"}
    assert select_exported_variables(env) == {"HF_HOME": "/shared", "NCCL_DEBUG": "WARN", "PYTHONSAFEPATH": "1"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / ".deepspeed_env", "OWN=1\n")
    write_environment(tmp_path / "e", env)
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    ours = ["HF_HOME=/shared", "NCCL_DEBUG=WARN", "PYTHONSAFEPATH=1"]
    assert (tmp_path / "e").read_text().splitlines() == [path, "PYTHONPATH=", "OWN=1", *ours]


def test_srun_starts_every_rank_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = build_srun_command(["c.yaml"], Allocation(40_123, ("n3", "n4"), 8))
    assert command.ranks == 16
    for word in ("--ntasks=16", "--ntasks-per-node=8", "--nodelist=n3,n4", "--cpus-per-task=12", "--world-size=16"):
        assert word in command.argv
    assert command.set_variables == {"MASTER_ADDR": "n3", "MASTER_PORT": "10123", "OMP_NUM_THREADS": "12"}
    assert "RANK" in command.unset_variables


@pytest.mark.parametrize("nodes", [{}, {"SLURM_JOB_NODELIST": ""}, {"SLURM_JOB_ID": "x", "SLURM_JOB_NODELIST": "n1"}])
def test_half_the_environment_of_a_job_is_refused(nodes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    with pytest.raises(
        UserError, match=r"--launcher slurm: SLURM_JOB_ID=.* not valid for a SLURM job; run this in a job, or unset"
    ):
        read_allocation({"SLURM_JOB_ID": "7"} | nodes)


def test_outside_of_an_allocation_slurm_is_refused() -> None:
    with pytest.raises(UserError, match="not inside a SLURM allocation; use `zerolora submit CONFIG`"):
        read_allocation({})


def test_mpirun_takes_gpus_from_0_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="ranks on a use its first GPUs"):
        build_mpirun_command([], {"a": [2, 3]})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="mpirun is not installed"):
        build_mpirun_command([], {"a": [0, 1]})


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (LaunchRequest("ssh"), "--launcher ssh: must be one of auto, local, hostfile, slurm, mpi"),
        (LaunchRequest("hostfile"), "--launcher hostfile: needs --hostfile FILE"),
        (LaunchRequest("slurm", Path("h")), ": slurm takes no hostfile; use --launcher"),
        (LaunchRequest("local", Path("h")), ": local takes no hostfile; use --launcher"),
        (LaunchRequest("local", num_nodes=2), "--num-nodes 2: a local run"),
        (LaunchRequest("local", include="a:0"), "--include a:0: needs --hostfile"),
        (LaunchRequest("local", exclude="a:0"), "--exclude a:0: needs --hostfile"),
        (LaunchRequest("local", master_addr="10.0.0.1"), "--master-addr 10.0.0.1: a local run"),
        (LaunchRequest("local", master_port=70_000), "--master-port 70000"),
        (LaunchRequest("hostfile", Path("h"), master_addr="-x y"), "--master-addr -x y: must be a host name"),
    ],
)
def test_requests_that_contradict_themselves(request_: LaunchRequest, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        request_.resolve_launcher()


def test_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert LaunchRequest().resolve_launcher() == "local"
    assert LaunchRequest(hostfile=Path("h")).resolve_launcher() == "hostfile"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert LaunchRequest().resolve_launcher() == "slurm"
    assert LaunchRequest(hostfile=Path("h")).resolve_launcher() == "hostfile"
    assert LaunchRequest("local").resolve_launcher() == "local"
