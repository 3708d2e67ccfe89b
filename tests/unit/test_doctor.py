"""The doctor's checks of one machine, each made to fail for real."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.doctor.command import _run_json_command, _run_on_hosts, print_checks
from launcher.doctor.this_host import (
    check_build_locks,
    check_folders,
    check_memory,
    check_packages,
    check_port,
)
from launcher.supervision.build_locks import remove_stale_locks
from launcher.targets.local import Command
from trainer.commands.doctor.probe import check_inputs
from trainer.commands.doctor.ranks import check_all_reduce
from trainer.config import DatasetSection, RunConfig, TrainingSection, compute_collective_timeout
from trainer.contract.json_records import RESULT_PREFIX, CheckResult
from trainer.parallel.ranks.agreement import RankReport, find_differences

CHECKOUT = Path(__file__).parents[2]


def config(folder: Path, **values: object) -> RunConfig:
    dataset = DatasetSection(path=str(folder / "data.jsonl"), cache_dir=str(folder / "cache"))
    settings = {"base_model": str(folder / "model"), "output_dir": str(folder / "run"), "dataset": dataset}
    return RunConfig.model_validate(settings | values)


def test_a_busy_port_is_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        check = check_port(port)
    assert check.state == "FAIL" and "is already in use" in check.found and "--master-port" in check.fix
    assert check_port(port).state == "OK"


def test_a_stale_lock_is_found_and_one_in_use_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's FileBaton: a file that is open as long as its builder lives."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert [check.state for check in check_build_locks()] == ["OK"]
    locks = [tmp_path / "py311_cu128" / "fused_adam" / "lock", tmp_path / "zerolora_lora_0" / "lock"]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    program = "import sys, time; f = open(sys.argv[1]); print(1, flush=True); time.sleep(600)"
    builder = subprocess.Popen([sys.executable, "-c", program, str(locks[0])], stdout=subprocess.PIPE)
    try:
        assert builder.stdout is not None and builder.stdout.readline()
        held, stale = check_build_locks()
        assert held.state == "OK" and f"process {builder.pid} is building" in held.found
        assert stale.state == "FAIL" and stale.fix == f"rm {locks[1]}"
    finally:
        builder.kill()
        builder.wait()
    assert [check.state for check in check_build_locks()] == ["FAIL", "FAIL"]


def test_a_run_removes_locks_of_killed_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    locks = {name: tmp_path / name / "lock" for name in ("old", "young", "held")}
    for lock in locks.values():
        lock.parent.mkdir()
        lock.touch()
    for name in ("old", "held"):
        os.utime(locks[name], (time.time() - 600.0,) * 2)
    with locks["held"].open():
        remove_stale_locks()
    assert [lock.exists() for lock in locks.values()] == [False, True, True]
    assert capsys.readouterr().err == f"note: removed {locks['old']}, a lock left by a killed build 10 minutes ago\n"


def test_too_little_memory_or_disk_fails(tmp_path: Path) -> None:
    need = {"host_per_rank": 2**50, "disk": 2**60}
    memory, _ = check_memory(2, need, on_gpus=False)
    assert memory.state == "FAIL" and "needed for 2 ranks" in memory.found
    assert check_folders(config(tmp_path), need).__next__().state == "FAIL"
    assert next(check_memory(0, {}, on_gpus=False)).state == "OK"


def test_a_folder_that_cannot_be_written_fails() -> None:
    output_dir = next(check_folders(config(Path("/proc/self")), {}))
    assert output_dir.name == "disk: output_dir"
    assert output_dir.state == "FAIL" and "cannot be written" in output_dir.found


@pytest.mark.parametrize(
    ("hang", "collectives", "in_force"), [(10.0, 60.0, 60.0), (0.0, 30.0, 30.0), (10.0, 30.0, 35.0), (30.0, 20.0, 95.0)]
)
def test_torch_gives_a_collective_up_after_the_watchdog_could_have_spoken(
    hang: float, collectives: float, in_force: float
) -> None:
    assert compute_collective_timeout(TrainingSection(hang_timeout=hang, timeout_minutes=collectives)) == in_force


def test_a_model_with_a_missing_shard_or_without_data_fails(tmp_path: Path) -> None:
    from tests.tiny import make_model, write_chats

    folder = make_model(tmp_path / "model")
    (check,) = check_inputs(config(tmp_path))
    assert check.state == "FAIL" and "data.jsonl: no such file" in check.found
    write_chats(tmp_path / "data.jsonl", 3)
    (whole,) = check_inputs(config(tmp_path))
    assert whole.state == "OK", whole
    steered = config(tmp_path, scu={"enabled": True, "measure": "kl", "reference": str(tmp_path / "prose.jsonl")})
    (check,) = check_inputs(steered)
    assert check.state == "FAIL" and "prose.jsonl" in check.found
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    (check,) = check_inputs(config(tmp_path))
    assert check.state == "FAIL" and "model-00002-of-00002.safetensors" in check.found


def test_an_unavailable_model_fails(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n")
    (check,) = check_inputs(config(tmp_path, base_model="nobody/has-this"))
    assert check.state == "FAIL" and "nobody/has-this" in check.found and "hf download" in check.fix


def test_a_package_outside_its_range_is_named(tmp_path: Path) -> None:
    """An older peft stands before the installed one, as after `pip install --user`."""
    info = tmp_path / "peft-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.1.0\n")
    program = (
        "from launcher.doctor.this_host import *; [print(c.name, c.state, c.found, c.fix) for c in check_packages()]"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)])}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "peft FAIL 0.1.0 is installed pip install 'peft" in shown.stdout
    assert [check.state for check in check_packages()] == ["OK", "OK", "OK"]


def test_one_rank_has_no_link_to_be_slow() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = [(finding.name, finding.state) for finding in check_all_reduce(torch.device("cpu"))]
    finally:
        dist.destroy_process_group()
    assert found == [("all-reduce", "OK")]


def test_versions_that_differ_are_named_by_host() -> None:
    """The comparison that the ranks of the doctor share with the start of a run."""
    good = RankReport(0, "n1", "cpu", "", {"peft": "0.21.2"})
    ((problem, _),) = find_differences([good, RankReport(1, "n2", "cpu", "", {"peft": "0.20.0"})])
    assert "0.21.2 on n1" in problem and "0.20.0 on n2" in problem


def test_the_table_has_a_fix_below_each_line_and_counts_the_good_ones_of_other_hosts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = [
        CheckResult("port", "OK", "a free one"),
        CheckResult("build lock", "FAIL", "/x/[1]/lock: stale", "rm /x/[1]/lock"),
        *[CheckResult(name, "OK", "good", host="n2") for name in ("torch", "driver")],
        CheckResult("/dev/shm", "WARN", "0.1 GiB free", "--shm-size=8g", host="n2"),
    ]
    print_checks(checks, as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "OK port a free one",
        "FAIL build lock /x/[1]/lock: stale",
        "fix: rm /x/[1]/lock",
        "WARN n2: /dev/shm 0.1 GiB free",
        "fix: --shm-size=8g",
        "OK n2 2 checks passed",
        "3 OK, 1 WARN, 1 FAIL",
    ]
    print_checks(checks, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["counts"] == {"OK": 3, "WARN": 1, "FAIL": 1} and report["checks"][1]["fix"] == "rm /x/[1]/lock"


def test_the_table_fits_100_columns_and_no_good_line_has_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 40
    checks = [CheckResult("torch", "OK", long, "install a CUDA build"), CheckResult("disk", "FAIL", "x" * 300, long)]
    print_checks(checks, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("fix:" in line for line in lines) == 1


def test_a_slow_answer_is_not_waited_for(tmp_path: Path) -> None:
    found, words = _run_json_command(Command(("sh", "-c", "sleep 3600"), 1, {}, ()), 1.0)
    assert found is None and "no response within 1 s" in words


def test_hosts_that_print_no_checks_fail(tmp_path: Path) -> None:
    found = [asdict(CheckResult("disk", "OK", "x" * 700)), asdict(CheckResult("gpu", "WARN", "none", "a fix"))]
    (tmp_path / "answer").write_text(f"a notice\n{RESULT_PREFIX}a {json.dumps(found)}\n")
    good, damaged = ["cat", str(tmp_path / "answer")], ["head", "-c", "500", str(tmp_path / "answer")]
    unreachable = ["sh", "-c", "echo no route >&2; exit 1"]
    checks = _run_on_hosts({"a": good, "b": damaged, "c": unreachable, "d": ["/missing/srun"]})
    assert [(check.host, check.name, check.state) for check in checks] == [
        ("a", "disk", "OK"), ("a", "gpu", "WARN"), *((host, "doctor", "FAIL") for host in "bcd")
    ]  # fmt: skip
    assert checks[3].found == "`zerolora doctor` returned no results: no route"
