"""Arrays of SLURM jobs: sweeps, seeds of a comparison, and a chain of jobs that continue one run."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import STEPS, ZEROLORA, end_of, log_of, losses, wait_for
from tests.cluster.slurm_cluster import SlurmCluster
from tests.tiny import write_chats
from trainer.checkpoint.checkpoint_files import list_checkpoints

pytestmark = pytest.mark.slow
ONE_RANK = ["--gpus-per-node=1", "--cpus-per-task=1", "--time=30"]


def learning_rate_and_rank(run: Path) -> tuple[float, int]:
    """What a run was trained with, by its own record."""
    record = json.loads((run / "training_config.json").read_text())
    return record["training"]["learning_rate"], record["lora"]["r"]


def test_a_sweep_of_two_settings_is_an_array_with_a_folder_for_each_run(slurm: SlurmCluster, workplace: Path) -> None:
    """Of its four tasks the first and the last run: all four of such an array do below."""
    run = workplace / "sweep"
    arguments = [str(workplace / "config.yaml"), f"output_dir={run}", "training.max_steps=2"]
    sweep = ["--sweep", "training.learning_rate=1e-4,2e-4", "--sweep", "lora.r=8,16", "--nodes", "1"]
    sweep.append("--sbatch=--array=0,3")
    job = slurm.run(*ZEROLORA, "submit", *arguments, *sweep, *ONE_RANK).split()[0]
    for task in (0, 3):
        assert end_of(slurm, f"{job}_{task}") == "COMPLETED", log_of(workplace, "sweep")
        assert (run / "logs" / f"slurm-{job}_{task}.log").stat().st_size > 0
    for rate, word, rank in ((1e-4, "1e-4", 8), (2e-4, "2e-4", 16)):
        assert learning_rate_and_rank(run / f"learning_rate={word},r={rank}") == (rate, rank)
        assert len(losses(run / f"learning_rate={word},r={rank}")) == 2
    shown = slurm.run(*ZEROLORA, "status", job)
    assert shown.count(f"job      {job}_") == 2 and shown.count("COMPLETED") == 2, shown


@pytest.mark.nightly
def test_the_sweep_command_is_an_array_and_its_table_is_best_first(slurm: SlurmCluster, workplace: Path) -> None:
    run = workplace / "tried"
    settings = [str(workplace / "config.yaml"), f"output_dir={run}", "training.max_steps=3", "dataset.val_split=0.1"]
    axes = ["training.learning_rate=1e-6,1e-2", "lora.r=4,8"]
    said = slurm.run(*ZEROLORA, "sweep", *settings, *axes, "--slurm", "--nodes", "1", *ONE_RANK)
    job = next(word for word in said.split() if word.isdigit())
    show = [*ZEROLORA, "sweep", *settings, "--table"]
    assert "not finished" in slurm.run(*show, check=False)
    for task in range(4):
        assert end_of(slurm, f"{job}_{task}") == "COMPLETED", log_of(workplace, "tried")
    rows = [line.split() for line in slurm.run(*show).splitlines() if "learning_rate=" in line]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"] and {row[-1] for row in rows} == {"done"}
    assert all("learning_rate=1e-2" in row[1] for row in rows[:2]), (
        "a rate of a millionth learns nothing in three steps"
    )
    assert [float(row[2]) for row in rows] == sorted(float(row[2]) for row in rows)
    assert (run / "sweep.html").stat().st_size > 1000
    of_job = ["--slurm", "--nodes", "1", *ONE_RANK]
    again = slurm.run(*ZEROLORA, "sweep", *settings, *axes, *of_job)
    assert again.count(" done") == 4, f"the table at once, and no job: {again}"
    more = ["training.learning_rate=1e-6,1e-2,1e-3", axes[1]]
    assert slurm.run(*ZEROLORA, "sweep", *settings, *more, *of_job, "--dry-run").split()[-2:] == ["--array", "4,5"]


@pytest.mark.nightly
def test_a_file_of_settings_is_an_array_by_hand(slurm: SlurmCluster, workplace: Path, tmp_path: Path) -> None:
    """`%2`: both nodes are free for all three tasks, and the third waits for one of the others all the same."""
    rates = ("0.001", "0.002", "0.003")
    lines = [f"training.learning_rate={rate} 'output_dir={workplace}/line of {rate}'\n" for rate in rates]
    (tmp_path / "sweep.txt").write_text("".join(lines))
    options = ["--array=0-2%2", "--nodes=1", "--ntasks-per-node=1", f"--output={workplace}/by-hand.log", *ONE_RANK]
    arguments = [str(workplace / "config.yaml"), f"@{tmp_path / 'sweep.txt'}", "training.max_steps=2"]
    job = slurm.run("sbatch", "--parsable", *options, "slurm/train.sbatch", *arguments).strip()
    for task, rate in enumerate(rates):
        assert end_of(slurm, f"{job}_{task}") == "COMPLETED", log_of(workplace, "by-hand")
        assert learning_rate_and_rank(workplace / f"line of {rate}") == (float(rate), 4)
    third = slurm.field(f"{job}_2", "StartTime")
    assert third >= min(slurm.field(f"{job}_{task}", "EndTime") for task in (0, 1))


def test_a_task_without_a_line_is_a_usage_error(slurm: SlurmCluster, workplace: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("training.learning_rate=0.001\n")
    options = ["--array=1", "--nodes=1", "--ntasks-per-node=1", f"--output={workplace}/no-line.log", *ONE_RANK]
    arguments = [str(workplace / "config.yaml"), f"@{tmp_path / 'sweep.txt'}"]
    job = slurm.run("sbatch", "--parsable", *options, "slurm/train.sbatch", *arguments).strip()
    assert end_of(slurm, f"{job}_1") == "FAILED"
    assert slurm.field(f"{job}_1", "ExitCode") == "2:0"
    assert "sweep.txt: no line for task 1" in (workplace / "no-line.log").read_text()


@pytest.mark.nightly
def test_jobs_of_a_chain_continue_one_run(slurm: SlurmCluster, workplace: Path, reference: list[float]) -> None:
    """The first is stopped and may not be requeued, the second ends the run, the third finds it done."""
    run = workplace / "chain"
    arguments = [str(workplace / "config.yaml"), f"output_dir={run}", "--nodes", "2", *ONE_RANK]
    chain = ["--array", "0-2%1", "--sbatch=--no-requeue"]
    job = slurm.run(*ZEROLORA, "submit", *arguments, *chain).split()[0]
    wait_for(lambda: losses(run), lambda: log_of(workplace, "chain"))
    # Of a task of an array scancel (22.05) sends the signal, and ends with 229 all the same.
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_0", check=False)
    assert end_of(slurm, f"{job}_0") == "FAILED"
    assert slurm.field(f"{job}_0", "ExitCode") == "75:0", log_of(workplace, "chain")
    stopped_at = int(list_checkpoints(run)[-1].name.rpartition("-")[2])
    assert 0 < stopped_at < STEPS
    for task in (1, 2):
        assert end_of(slurm, f"{job}_{task}") == "COMPLETED", log_of(workplace, "chain")
    logs = [(run / "logs" / f"slurm-{job}_{task}.log").read_text() for task in range(3)]
    assert f"at step {stopped_at}" in logs[1] and f"at step {STEPS}" in logs[2], logs
    assert losses(run) == pytest.approx(reference, rel=1e-4)


@pytest.fixture(scope="module")
def comparison(workplace: Path) -> Path:
    """A configuration for `zerolora compare`."""
    settings = yaml.safe_load((workplace / "config.yaml").read_text())
    write_chats(workplace / "eval.jsonl", 5, seed=9)
    settings["output_dir"] = str(workplace / "compare")
    settings["dataset"]["evaluation"] = {"path": str(workplace / "eval.jsonl")}
    settings["training"] |= {"max_steps": 2, "eval_steps": 1, "save_steps": 0, "learning_rate": 1e-2}
    settings["scu"] = {"sigma": 0.1, "target": 0.005}
    (workplace / "compare.yaml").write_text(yaml.safe_dump(settings))
    return workplace / "compare.yaml"


@pytest.mark.nightly
def test_seeds_of_a_comparison_are_an_array_and_the_login_node_makes_the_tables(
    slurm: SlurmCluster, workplace: Path, comparison: Path
) -> None:
    output = workplace / "compare"
    controllers = ["--controllers", "none,pi"]
    (workplace / "seeds.txt").write_text("seed=42\nseed=43\n")
    options = ["--array=0-1", "--nodes=1", "--ntasks-per-node=1", f"--output={workplace}/compare.log", *ONE_RANK]
    arguments = [str(comparison), "--output", str(output), "--seeds", "1", *controllers, f"@{workplace}/seeds.txt"]
    job = slurm.run("sbatch", "--parsable", *options, "slurm/train.sbatch", "compare", *arguments).strip()
    for task in (0, 1):
        assert end_of(slurm, f"{job}_{task}") == "COMPLETED", log_of(workplace, "compare")
    trials = {f"{setting}-seed{seed}" for setting in ("none", "delta-pi") for seed in (42, 43)}
    trained = {path.parent.name: path.stat().st_mtime_ns for path in output.glob("*/metrics.jsonl")}
    assert set(trained) == trials
    for path in output.glob("compare*.*"):
        path.unlink()
    shown = slurm.run(*ZEROLORA, "compare", str(comparison), "--output", str(output), "--seeds", "2", *controllers)
    assert "4 trials, 4 already finished" in shown and "final BPT, delta-pi - none" in shown
    assert {path.parent.name: path.stat().st_mtime_ns for path in output.glob("*/metrics.jsonl")} == trained
    figures = json.loads((output / "compare.json").read_text())
    assert [row["setting"] for row in figures["settings"]] == ["none", "delta-pi"]
    assert {path.name for path in output.glob("compare*.png")} == {
        f"compare_{name}.png" for name in ("bpt", "curves", "scu")
    }
