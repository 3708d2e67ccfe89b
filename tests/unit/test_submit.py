"""`zerolora submit` and `zerolora status` without a cluster: the script, the sweep, and a run's folder."""

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.commands import app, main
from launcher.status import describe_job, describe_run, find_run_dir
from launcher.submit import TEMPLATE, build_sbatch_options, expand_sweep, parse_time_limit, render_script
from trainer.config import UserError
from trainer.contract.folder_lock import FolderLock
from trainer.contract.heartbeat import Heartbeat, HeartbeatFolder

HOLD_AND_DIE = """
import os, sys
from pathlib import Path
from trainer.contract.folder_lock import FolderLock
lock = FolderLock.acquire(Path(sys.argv[1]), resumes=False, log=print)
os.kill(os.getpid(), 9)
"""
CONFIG = "base_model: some/model\noutput_dir: {run}\ndataset: {{path: data.jsonl}}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(run=tmp_path / "run"))
    return path


def dry_run(config: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["submit", str(config), "--dry-run", *options])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.stdout


def options_of(script: str) -> list[str]:
    return [shlex.split(line)[1] for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_is_the_one_in_the_checkout_with_other_options(config: Path, tmp_path: Path) -> None:
    script = dry_run(
        config, "seed=7", "--nodes", "4", "--gpus-per-node", "8", "--time", "12:00:00", "--partition", "big",
        "--account", "me", "--dependency", "afterok:3", "--cpus-per-task", "12", "--sbatch", "--mem=0",
    )  # fmt: skip
    options = options_of(script)
    for expected in (
        "--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=8", "--time=12:00:00", "--partition=big", "--account=me",
        "--dependency=afterok:3", "--cpus-per-task=12", "--mem=0", "--requeue", "--signal=B:USR1@300", "--job-name=run",
        f"--output={tmp_path}/run/logs/slurm-%j.log",
    ):  # fmt: skip
        assert expected in options, options
    assert f"set -- {config} seed=7\n" in script
    template = TEMPLATE.read_text()
    assert script.endswith(template[template.index("\nZEROLORA_HOME=") :])
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not (tmp_path / "run").exists()


def test_a_cpu_cluster_has_no_gpus_to_ask_for(config: Path) -> None:
    options = options_of(dry_run(config, "--gpus-per-node", "0", "--ranks-per-node", "2"))
    assert "--ntasks-per-node=2" in options and not [word for word in options if word.startswith("--gpu")]


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes", "0"), ("--gpus-per-node", "-1"), ("--ranks-per-node", "0"), ("--cpus-per-task", "0"),
        ("--grace", "-5"), ("--grace", "0"), ("--grace", "65536"), ("--max-requeues", "-1"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(
    config: Path, options: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["zerolora", "submit", str(config), *options, "--dry-run"])
    assert main() == 2
    printed = capsys.readouterr()
    assert re.match(rf"error: {' '.join(options)}: must be \d+ or (more|less);", printed.err)
    assert printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    "options",
    [
        ("--partition", ""), ("--qos", " "), ("--dependency", ""), ("--partition", "a\n#SBATCH --exclusive"),
        ("--job-name", "a\nb"),
        ("--sbatch", "--mem=0\nrm x"), ("--sbatch", ""), ("--sbatch", "mem=0"), ("--sbatch", "--nodes"),
        ("--sbatch", "-N"),
        ("--ranks-per-node", "4"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(config: Path, options: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["submit", str(config), *options, "--dry-run"])
    assert isinstance(done.exception, UserError) and str(done.exception).startswith(options[0])
    assert re.search(r"must (not )?be", str(done.exception))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("2:30", 150), ("0:03:00", 180), ("1-", None), ("1-6", 108000), ("1-6:30", 109800), ("0", None),
     ("2-00:00:01", 172801), ("UNLIMITED", None)],
)  # fmt: skip
def test_times_as_sbatch_reads_them(time: str, seconds: int | None) -> None:
    if time == "1-":
        with pytest.raises(UserError, match="--time 1-: must be MINUTES"):
            parse_time_limit(time)
    else:
        assert parse_time_limit(time) == seconds


@pytest.mark.parametrize(
    ("time", "message"),
    [
        (
            "0:03:00",
            "--time 0:03:00: too short to train: saving may take 300 s (--grace), and SLURM may signal up to 60 s",
        ),
        ("6", "use --time 15 or a smaller --grace"),
        ("25:61:61", "--time 25:61:61: must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"),
        ("tomorrow", "--time tomorrow: must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"),
    ],
)
def test_too_short_time_limits_are_refused(config: Path, time: str, message: str) -> None:
    done = CliRunner().invoke(app, ["submit", str(config), "--time", time])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception) and "\n" not in str(done.exception)


def test_a_refused_submit_leaves_nothing(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program named sbatch that refuses as SLURM does, in a PATH of its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: nope' >&2\n"
        "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2\nexit 1\n"
    )
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    done = CliRunner().invoke(app, ["submit", str(config), "--sweep", "seed=1,2"])
    assert isinstance(done.exception, UserError), done.output
    assert str(done.exception) == (
        "sbatch: invalid partition specified: nope; Batch job submission failed: Invalid partition name specified; "
        "nothing was submitted"
    )
    assert not (tmp_path / "run").exists()
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "sweep.txt").write_text("of an array that waits\n")
    assert CliRunner().invoke(app, ["submit", str(config), "--sweep", "seed=1,2"]).exception
    assert (logs / "sweep.txt").read_text() == "of an array that waits\n"
    assert [path.name for path in logs.iterdir()] == ["sweep.txt"]


def test_a_sweep_is_every_combination_in_a_folder_of_its_own(config: Path, tmp_path: Path) -> None:
    lines = expand_sweep(["training.learning_rate=1e-4,2e-4", "lora.r=8,16"], tmp_path)
    assert len(lines) == 4
    assert shlex.split(lines[1]) == [
        "training.learning_rate=1e-4", "lora.r=16", f"output_dir={tmp_path}/learning_rate=1e-4,r=16",
    ]  # fmt: skip
    script = dry_run(config, "--sweep", "seed=1,2,3")
    assert "--array=0-2" in options_of(script)
    assert f"set -- {config} @{tmp_path}/run/logs/sweep.txt\n" in script
    assert "--array=0-2%1" in options_of(dry_run(config, "--sweep", "seed=1,2,3", "--array", "0-2%1"))


@pytest.mark.parametrize("sweep", ["seed", "=1", "seed=", "seed=1,,2"])
def test_an_empty_sweep_is_refused(sweep: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{sweep}: must look like"):
        expand_sweep([sweep], tmp_path)


def test_tasks_that_would_share_a_folder_must_follow_each_other(config: Path) -> None:
    done = CliRunner().invoke(app, ["submit", str(config), "--dry-run", "--array", "0-3"])
    assert isinstance(done.exception, UserError) and "--array 0-3%1" in str(done.exception)
    assert "--array=0-3%1" in options_of(dry_run(config, "--array", "0-3%1"))


def test_tasks_beyond_the_sweep_are_refused(config: Path) -> None:
    sweep = ["submit", str(config), "--dry-run", "--sweep", "seed=1,2", "--array"]
    done = CliRunner().invoke(app, [*sweep, "1,0-2"])
    assert isinstance(done.exception, UserError)
    assert "--array 1,0-2: the sweep has 2 runs; use 0 to 1" in str(done.exception)
    assert CliRunner().invoke(app, [*sweep, "0-1"]).exit_code == 0


@pytest.mark.parametrize("array", ["", "a", "3-1", "-1", "1,2,", "1-2:x%1"])
def test_tasks_that_are_no_numbers_are_refused_as_such(config: Path, array: str) -> None:
    done = CliRunner().invoke(app, ["submit", str(config), "--dry-run", f"--array={array}"])
    assert isinstance(done.exception, UserError) and "must be task numbers" in str(done.exception)


def test_a_task_takes_its_line_of_the_sweep(tmp_path: Path) -> None:
    """The part of the script that does it, run by bash, with a value that holds a space."""
    script = TEMPLATE.read_text()
    part = script[script.index("arguments=()") : script.index('echo "== job')]
    (tmp_path / "sweep.txt").write_text("a=1\n'b=two words' c=3\n")
    program = f'set -uo pipefail\n{part}\nprintf "%s|" "${{arguments[@]}}"\n'
    for task, expected in (("0", "x.yaml|a=1|"), ("1", "x.yaml|b=two words|c=3|")):
        shown = subprocess.run(
            ["bash", "-c", program, "bash", "x.yaml", f"@{tmp_path}/sweep.txt"],
            env={"SLURM_ARRAY_TASK_ID": task, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        )  # fmt: skip
        assert shown.stdout == expected, shown.stderr
    done = subprocess.run(
        ["bash", "-c", program, "bash", f"@{tmp_path}/sweep.txt"],
        env={"SLURM_ARRAY_TASK_ID": "2", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "no line for task 2" in done.stderr


def test_a_script_without_options_of_its_own_would_not_be_sbatchs(tmp_path: Path) -> None:
    script = render_script(build_sbatch_options({"job-name": "a b"}, ()), ["my config.yaml", "x='y'"], 20)
    assert "#SBATCH '--job-name=a b'" in script
    assert shlex.split(next(line for line in script.splitlines() if line.startswith("set -- ")))[2:] == [
        "my config.yaml", "x='y'",
    ]  # fmt: skip


def test_status_refuses_a_folder_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    (tmp_path / "logs").mkdir()
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert isinstance(done.exception, UserError) and done.stdout == ""
    assert f"{tmp_path}: is neither a job ID nor the folder of a run; pass a run's output_dir" in str(done.exception)
    (tmp_path / "logs" / "job.sbatch").touch()  # submitted, and not begun
    assert "none yet" in CliRunner().invoke(app, ["status", str(tmp_path)]).stdout


def test_status_describes_the_folder_of_a_run(tmp_path: Path) -> None:
    assert describe_run(tmp_path)[-1] == ("step", "none yet")
    logs = tmp_path / "logs"
    logs.mkdir()
    beat = {"rank": 0, "host": "n1", "pid": 1, "step": 41, "phase": "backward", "exit_code": None}
    beat |= {"collective": None, "place": None, "collectives_begun": None, "idle_s": 0.0, "stuck": False}
    beat |= {"free_memory_gib": 1.0, "free_shm_gib": 1.0, "time": time.time()}
    (logs / "heartbeat-0.json").write_text(json.dumps(beat))
    record = {"step": 40, "train/loss": 1.25, "train/epoch": 0.8, "perf/tokens_per_second": 12345.6}
    record["perf/step_ms"] = 500.0
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n" + '{"step": 41, "tra')
    settings = {"training": {"max_steps": None, "epochs": 2.0}}
    (tmp_path / "training_config.json").write_text(json.dumps(settings))
    lock = FolderLock.acquire(tmp_path, resumes=False, log=print)
    shown = dict(describe_run(tmp_path))
    assert shown["state"] == "running on n1, rank 0 at step 41, phase backward"
    assert (shown["step"], shown["loss"], shown["speed"]) == ("40 of 100", "1.2500", "12,346 tok/s")
    assert shown["left"] == "0:00:30 of training"
    shown = dict(describe_run(tmp_path, end_state="CANCELLED"))
    assert shown["state"] == "ended with its job (CANCELLED)" and "left" not in shown
    (logs / "heartbeat-0.json").write_text(json.dumps(beat | {"exit_code": 75}))
    shown = dict(describe_run(tmp_path))
    assert shown["state"] == "exited with code 75" and "left" not in shown
    (logs / "heartbeat-0.json").write_text(json.dumps(beat | {"time": time.time() - 4000}))
    assert dict(describe_run(tmp_path))["state"].startswith("no heartbeat for 1:0")
    lock.release()
    # Its last heartbeat is young, and on this machine no process holds the lock that it has left.
    (logs / "heartbeat-0.json").write_text(json.dumps(beat | {"time": time.time()}))
    subprocess.run([sys.executable, "-c", HOLD_AND_DIE, str(tmp_path)], cwd=Path(__file__).parents[2])
    shown = dict(describe_run(tmp_path))
    assert shown["state"] == "killed, rank 0 at step 41, phase backward" and "left" not in shown


def test_a_run_that_has_just_failed_is_not_running(tmp_path: Path) -> None:
    """Rank 1 raised, rank 0 was killed for it a second ago: the launcher has given the folder back."""
    (tmp_path / "logs").mkdir()
    beat = Heartbeat(
        rank=0, host="n1", pid=1, step=41, phase="backward", collective=None, place=None, collectives_begun=None,
        idle_s=0.0, stuck=False, free_memory_gib=1.0, free_shm_gib=1.0, time=time.time(),
    )  # fmt: skip
    for rank, code in ((0, None), (1, 1)):
        HeartbeatFolder(tmp_path / "logs", rank, 2).publish(replace(beat, rank=rank, exit_code=code))
    record = {"step": 40, "time": 1.0, "train/loss": 1.25, "perf/step_ms": 500.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "training_config.json").write_text(json.dumps({"training": {"max_steps": 100}}))
    shown = dict(describe_run(tmp_path))
    assert shown["state"] == "exited with code 1, rank 0 at step 41, phase backward" and "left" not in shown


def test_heartbeat_text_cannot_imitate_another_line(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    beat = {"rank": 0, "host": "n1", "pid": 1, "step": 4, "phase": "x\nloss     0.1\x1b[2J\u009d0;a\u0007", "time": 1.0}
    beat |= {name: None for name in ("collective", "place", "collectives_begun")}
    beat |= {"idle_s": 0.0, "stuck": False, "free_memory_gib": 1.0, "free_shm_gib": 1.0}
    (tmp_path / "logs" / "heartbeat-0.json").write_text(json.dumps(beat) + "\n")
    shown = CliRunner().invoke(app, ["status", str(tmp_path)]).output
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "state", "step"]
    assert "x loss" in lines[1] and "\x1b" not in shown and "\x9d" not in shown


def test_status_shows_held_out_loss_time_and_mean_speed_and_skips_invalid_lines(tmp_path: Path) -> None:
    lines: list[object] = [{"step": 0, "time": 100.0, "eval/loss": 3.0}]
    for step, speed in ((1, 10.0), (2, 100.0), (3, 200.0)):
        values = {"train/loss": 2.0, "perf/tokens_per_second": speed, "perf/step_ms": 1000.0}
        lines.append({"step": step, "time": 100.0 + 10 * step, **values})
    lines += [{"step": 3, "time": 135.0, "eval/loss": 1.5}, {"step": 3, "time": 90_000.0, "eval/loss": 1.75}]
    lines += [[1], "text", {"step": "4"}, {"step": 4, "train/loss": "low"}, {"train/loss": 1.0}, 7, None]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_bytes(text.encode() + b"\xff\xfe\n" + b"[" * 100_000 + b"\n")
    shown = dict(describe_run(tmp_path))
    assert shown["held out"] == "1.7500 at step 3, best 1.5000 at step 3"
    assert shown["speed"] == "150 tok/s"
    assert shown["step"] == "3"
    (tmp_path / "metrics.jsonl").write_text(text.replace("tokens_per_second", "images_per_second"))
    assert dict(describe_run(tmp_path))["speed"] == "150.00 images/s"


def test_slurm_fields_of_a_job_are_described() -> None:
    job = {"JobId": "12", "ArrayJobId": "10", "ArrayTaskId": "2", "JobState": "PENDING", "Reason": "Resources"}
    job |= {"NodeList": "(null)", "RunTime": "00:00:00", "TimeLimit": "01:00:00", "Restarts": "1", "StdOut": "/x"}
    assert describe_job(job) == [
        ("job", "10_2 PENDING (Resources)"), ("time", "00:00:00 of 01:00:00, attempt 2"), ("log", "/x"),
    ]  # fmt: skip
    assert find_run_dir({"Comment": "zerolora /runs/a b"}) == Path("/runs/a b")
    assert find_run_dir({"Comment": "mine"}) is None


SCRIPT = """
scontrol() { echo "scontrol $*"; [ "$1" = requeue ] || echo "JobId=7 $STATE "; return 0; }
sleep() { :; }
"""


def run_script(tmp_path: Path, env_sh: str, zerolora: str, **variables: str) -> tuple[int, str]:
    """slurm/train.sbatch with an env.sh and a zerolora of the test, and SLURM's commands that say what they hear."""
    (tmp_path / "slurm").mkdir(exist_ok=True)
    (tmp_path / "slurm" / "env.sh").write_text(env_sh)
    (tmp_path / "zerolora").write_text(f"#!/bin/bash\n{zerolora}\n")
    (tmp_path / "zerolora").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"} | variables
    program = TEMPLATE.read_text().replace("set -uo pipefail", "set -uo pipefail" + SCRIPT)
    # Into a file: what env.sh has started may outlive the script here, as it does not in SLURM, and keep a pipe open.
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            ["bash", "-c", program, "bash", "x.yaml"], env={"SLURM_JOB_NODELIST": "n1", "STATE": ""} | env,
            stdout=out, stderr=out, timeout=300,
        )  # fmt: skip
    return done.returncode, (tmp_path / "out").read_text()


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_while_the_environment_is_set_up(tmp_path: Path, number: str) -> None:
    """`module load` takes long: USR1 then ended the job without a requeue. The script is its own sender here."""
    ended = tmp_path / "ended"
    slow = f"( /bin/sleep 1; kill -{number} $$ ) &\nuntil [ -e {ended} ]; do /bin/sleep 0.1; done\necho loaded\n"
    code, said = run_script(tmp_path, slow, "echo trained", STATE="JobState=RUNNING PreemptTime=2026-01-01T00:00:00")
    ended.touch()
    assert "loaded" not in said and "trained" not in said
    assert "scontrol requeue 7" in said, said
    assert code == {"USR1": 138, "TERM": 143}[number]


@pytest.mark.parametrize(
    ("code", "state", "can_be_requeued"),
    [
        (0, "JobState=RUNNING PreemptTime=2026-01-01T00:00:00", False),
        (2, "JobState=RUNNING PreemptTime=2026-01-01T00:00:00", False),
        (75, "JobState=RUNNING PreemptTime=None", True),
        (143, "JobState=RUNNING PreemptTime=2026-01-01T00:00:00", True),
        (143, "JobState=PREEMPTED PreemptTime=None", True),
        (143, "JobState=CANCELLED PreemptTime=None", False),
        (1, "JobState=RUNNING PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None", False),
    ],
)
def test_exit_codes_that_are_queued_again(tmp_path: Path, code: int, state: str, can_be_requeued: bool) -> None:
    ended, said = run_script(tmp_path, "", f"exit {code}", STATE=state)
    assert ended == code and ("scontrol requeue 7" in said) == can_be_requeued, said


def test_a_task_of_an_array_is_queued_again_alone(tmp_path: Path) -> None:
    """The last task's own number is that of the whole array."""
    _, said = run_script(tmp_path, "", "exit 75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert "scontrol requeue 7_3\n" in said


def test_requeues_have_a_limit(tmp_path: Path) -> None:
    for restarts, limit, can_be_requeued in (("19", "20", True), ("20", "20", False), ("0", "0", False)):
        given = {"SLURM_RESTART_COUNT": restarts, "ZEROLORA_MAX_REQUEUES": limit}
        code, said = run_script(tmp_path, "", "echo trained; exit 75", **given)
        assert code == 75 and "trained" in said
        assert ("scontrol requeue 7" in said) == can_be_requeued
        assert can_be_requeued or f"== not queued again: it was {limit} times already (--max-requeues)" in said
    # SLURM itself queued it again.
    code, said = run_script(tmp_path, "", "echo trained", SLURM_RESTART_COUNT="21")
    assert code == 1 and "trained" not in said and "(--max-requeues)" in said
