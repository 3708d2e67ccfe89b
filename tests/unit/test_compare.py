"""`zerolora compare`: which trials there are, which are done, how they are run, and what is said of them."""

import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.compare import __main__ as compare
from benchmarks.compare import measured_run as compare_run
from benchmarks.compare import trials as compare_trials
from benchmarks.compare.measured_run import DOCUMENTS_FILE
from benchmarks.compare.plots import draw_comparison
from benchmarks.compare.report import result_tables, statements, write_results
from benchmarks.compare.results import Comparison, Result, compute_t_interval, compute_t_quantile, read_results
from benchmarks.compare.trials import Setting, Trial
from trainer.config import UserError, load_config
from trainer.contract.folder_lock import FolderLostError

CONFIG = """
base_model: some/model
output_dir: runs/x
seed: 5
dataset: {path: data.jsonl, evaluation: {path: eval.jsonl}}
training: {max_steps: 10, eval_steps: 5, best_checkpoint: true, save_steps: 5}
scu: {enabled: true, target: 0.2, sigma: 0.3, deadband: 0.002, lambda_min: 0.001, lambda_max: 2.0}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return path


def planned(config: Path, *arguments: str) -> list[Trial]:
    options = compare.parse([str(config), *arguments])
    options.output = config.parent / "out"
    return compare_trials.plan(config, options.overrides, load_config(config, options.overrides).config, options)


def test_every_setting_and_seed_is_one_trial(config: Path) -> None:
    trials = planned(config, "--seeds", "2", "--lambdas", "0.1,5,0.01", "--ramps", "1")
    names = [trial.folder.name for trial in trials]
    settings = ["none", "delta-fixed-0.01", "delta-fixed-0.1", "delta-fixed-5"]
    settings += ["delta-linear-1", "delta-cosine-1", "delta-pi"]
    assert names == [f"{setting}-seed{seed}" for seed in (5, 6) for setting in settings]
    by_name = {trial.folder.name: trial.config for trial in trials}
    for name, trial_config in by_name.items():
        assert trial_config.output_dir == str(config.parent / "out" / name)
        assert not trial_config.training.best_checkpoint and trial_config.training.save_steps == 0
        assert trial_config.logging.report_to == ()
        assert trial_config.scu.enabled and trial_config.scu.sigma == 0.3
    assert by_name["none-seed6"].seed == 6
    assert by_name["none-seed6"].scu.controller == "none"
    assert by_name["delta-fixed-5-seed5"].scu.lambda_start == 5.0
    assert by_name["delta-linear-1-seed5"].scu.lambda_start == 0.01
    assert by_name["delta-linear-1-seed5"].scu.lambda_max == 1.0
    pi = by_name["delta-pi-seed5"].scu
    assert (pi.target, pi.lambda_start, pi.lambda_min, pi.lambda_max) == (0.2, pytest.approx(0.6), 0.001, 2.0)


def test_pi_runs_at_each_target(config: Path) -> None:
    trials = planned(config, "--seeds", "1", "--controllers", "pi,none", "--targets", "0.005,0.01,0.02")
    names = [trial.folder.name for trial in trials]
    assert names == ["none-seed5", *(f"delta-pi-{target}-seed5" for target in ("0.005", "0.01", "0.02"))]
    assert [trial.config.scu.target for trial in trials[1:]] == [0.005, 0.01, 0.02]


def test_two_measures_share_the_run_without_a_regulariser(config: Path) -> None:
    trials = planned(
        config, "--seeds", "1", "--measures", "delta,factors", "--targets", "0.1,0.4", "--controllers", "pi,none"
    )
    assert [trial.folder.name for trial in trials] == ["none-seed5", "delta-pi-seed5", "factors-pi-seed5"]
    assert [(trial.config.scu.measure, trial.config.scu.target) for trial in trials[1:]] == [
        ("delta", 0.1),
        ("factors", 0.4),
    ]


def test_what_the_user_reports_to_is_kept(config: Path) -> None:
    trial = planned(config, "logging.report_to=tensorboard", "--seeds", "1", "--controllers", "pi")[0]
    assert trial.config.logging.report_to == ("tensorboard",)


def finish(trial: Trial) -> None:
    trial.folder.mkdir(parents=True)
    (trial.folder / "training_config.json").write_text(trial.config.model_dump_json())
    (trial.folder / DOCUMENTS_FILE).write_text("{}")


def test_a_finished_trial_is_known_by_its_settings(config: Path) -> None:
    for trial in planned(config, "--seeds", "1"):
        assert not trial.is_finished()
        finish(trial)
    assert all(trial.is_finished() for trial in planned(config, "--seeds", "1", "logging.progress=off"))
    # What steers PI alone makes no other run of the others.
    fixed, pi = planned(config, "--seeds", "1", "--controllers", "fixed,pi", "--lambdas", "0.1", "scu.ki=0.05")
    assert fixed.is_finished()
    with pytest.raises(UserError, match=r"scu\.ki was 0\.025 and is 0\.05"):
        pi.is_finished()
    trial = planned(config, "--seeds", "1", "--controllers", "none", "training.learning_rate=1e-3")[0]
    with pytest.raises(UserError, match=r"training\.learning_rate was 0\.0002 and is 0\.001"):
        trial.is_finished()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["dataset.evaluation=null", "training.eval_steps=0", "training.best_checkpoint=false"],
            "dataset.evaluation: missing, but the comparison needs held-out data",
        ),
        (["dataset.evaluation=null", "dataset.val_split=0.1"], "each of 3 seeds would hold out different documents"),
        (["dataset.packing=true"], "dataset.packing=true"),
        (["training.eval_steps=0", "training.best_checkpoint=false"], "training.eval_steps=0"),
        (["--targets", "0.1", "--measures", "delta,factors"], "--targets: 1 for 2 measures"),
        (["--measures", "delta,kl"], "--measures: lambda of kl"),
        (["training.weight_decay=0.1"], "training.weight_decay=0.1: scu.enabled already regularizes the weights"),
        (["scu.target=auto", "scu.law=published"], "scu.target=auto"),
        (["scu.sigmma=1"], "did you mean scu.sigma"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert compare.main([str(config), *arguments]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown and shown.count("\n") == 1
    assert not (config.parent / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--lambdas", "0"], ["--lambdas", "x"], ["--seeds", "0"], ["--controllers", "pid"], ["--measures", ","]],
)
def test_bad_options_are_usage_errors(config: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.parse([str(config), *arguments])
    assert ended.value.code == 2


CHILD = """
import os, sys, time
from pathlib import Path
folder = Path(next(a for a in sys.argv if a.startswith("output_dir=")).partition("=")[2])
started = time.time()
(folder / "begun").touch()
while len(list(folder.parent.glob("*/begun"))) < 2 and time.time() < started + 300:
    time.sleep(0.01)  # the first waits for the second, which comes meanwhile or not at all
print("gpu", os.environ["CUDA_VISIBLE_DEVICES"])
(folder / "times").write_text(f"{started} {time.time()}")
sys.exit(7 if "none" in folder.name else 0)
"""


def test_trials_run_side_by_side_and_a_failure_stops_no_other(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "compare_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(config.parent))
    monkeypatch.setattr(compare_trials, "CHILD", "compare_child")
    trials = planned(config, "--seeds", "2", "--controllers", "none,fixed", "--lambdas", "0.1,1")
    failed = compare_trials.run_trials(trials, config, ["0", "GPU-1"], Console(width=300))
    assert [trial.folder.name for trial in failed] == ["none-seed5", "none-seed6"]
    spans = [tuple(map(float, (trial.folder / "times").read_text().split())) for trial in trials]
    moments = [moment for span in spans for moment in span]
    assert max(sum(start <= moment < end for start, end in spans) for moment in moments) == 2
    logs = "".join((trial.folder / "logs" / "console.log").read_text() for trial in trials)
    assert logs.count("gpu 0\n") == logs.count("gpu GPU-1\n") == 3
    shown = capsys.readouterr().out
    assert shown.count("FAILED with exit code 7: none-seed") == 2 and shown.count("/6  delta-fixed-") == 4


def test_a_stop_leaves_no_process_behind(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config.parent / "compare_child.py").write_text("import time; time.sleep(300)")
    monkeypatch.setenv("PYTHONPATH", str(config.parent))
    monkeypatch.setattr(compare_trials, "CHILD", "compare_child")
    started: list[compare_trials.Process] = []
    start = compare_trials._start

    def remembered(*arguments: object) -> compare_trials.Process:
        started.append(start(*arguments))  # type: ignore[arg-type]
        return started[-1]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_trials, "_start", remembered)
    monkeypatch.setattr(time, "sleep", interrupted)
    trials = planned(config, "--seeds", "1", "--controllers", "fixed", "--lambdas", "0.1,1")
    with pytest.raises(KeyboardInterrupt):
        compare_trials.run_trials(trials, config, ["0", "0"], Console())
    ends = [process.poll() for process in started]
    assert len(ends) == 2 and set(ends) <= {-signal.SIGTERM, -signal.SIGKILL}


def result(trial: Trial, losses_ED: np.ndarray, tokens_D: np.ndarray, errors: list[float]) -> Result:
    records = [
        {"step": step, "data_bpt": 1.0, "param_bpt": 0.5, "reg_loss": 0.1, "s_smoothed": 0.2 + error, "error": error}
        | {"lambda": 0.3}
        for step, error in enumerate(errors, start=1)
    ]
    return Result(trial, [0, 5, 10], losses_ED, tokens_D, records)


@pytest.fixture
def comparison(config: Path) -> Comparison:
    """Three seeds of none, two fixed lambdas and PI over 200 documents; PI is 0.05 nats below none."""
    generator = np.random.default_rng(3)
    tokens_D = generator.integers(5, 60, size=200).astype(float)
    hardness_D = 2.0 + generator.normal(size=200) * 0.5
    level = {"none": 0.0, "delta-fixed-0.1": -0.05, "delta-fixed-1": 0.2, "delta-pi": -0.05}
    results = []
    for trial in planned(config, "--controllers", "none,fixed,pi", "--lambdas", "0.1,1"):
        final_D = hardness_D + level[trial.setting.label] + generator.normal(size=200) * 0.05
        losses_ED = np.stack([hardness_D + 1, final_D - 0.1, final_D]) * tokens_D
        results.append(result(trial, losses_ED, tokens_D, [-0.1, 0.001, 0.01, 0.0015, -0.001]))
    return Comparison(results, draws=1000)


def test_bits_per_token_are_weighted_by_tokens_and_their_interval_is_that_of_documents(comparison: Comparison) -> None:
    setting = comparison.find("none")[0]
    runs, tokens_D = comparison.by_setting[setting], comparison.tokens_D
    mean_D = np.mean([run.losses_ED[-1] for run in runs], axis=0)
    interval = comparison.bpt(setting, "final")
    assert interval.value == pytest.approx(mean_D.sum() / tokens_D.sum() / math.log(2), rel=1e-12)
    # The delta method's standard error of a ratio of sums.
    residual_D = mean_D - mean_D.sum() / tokens_D.sum() * tokens_D
    error = math.sqrt((residual_D**2).sum()) / tokens_D.sum() / math.log(2)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert interval.low < interval.value < interval.high
    best = comparison.bpt(setting, "best")
    assert best.value == pytest.approx(interval.value - 0.1 / math.log(2), rel=1e-9)


def test_differences_are_paired(comparison: Comparison) -> None:
    nothing, pi = comparison.find("none")[0], comparison.find("pi")[0]
    difference = comparison.difference(pi, nothing, "final")
    alone = comparison.bpt(pi, "final")
    assert difference is not None
    assert difference.low < -0.05 / math.log(2) < difference.high < 0.0
    assert difference.high - difference.low < 0.3 * (alone.high - alone.low)
    itself = comparison.difference(pi, pi, "final")
    assert itself is not None and itself.low == itself.value == itself.high == 0.0


def test_an_interval_of_a_difference_covers_the_seeds_too(config: Path) -> None:
    """Seeds that differ by more than the documents: an interval over documents alone would be far too narrow."""
    tokens_D = np.full(50, 10.0)
    results = []
    for trial in planned(config, "--controllers", "none,pi"):
        shift = {5: -0.3, 6: 0.0, 7: 0.3}[trial.seed] if trial.setting.controller == "pi" else 0.0
        losses_ED = np.stack([(2.0 + shift) * tokens_D] * 3)
        results.append(result(trial, losses_ED, tokens_D, [0.0]))
    many = Comparison(results, draws=1000)
    difference = many.difference(many.find("pi")[0], many.find("none")[0], "final")
    assert difference is not None and difference.low < -0.19 / math.log(2) and difference.high > 0.19 / math.log(2)


def test_what_is_said_has_its_interval(comparison: Comparison) -> None:
    assert comparison.best_fixed("delta", "final") == Setting("delta", "fixed", 0.1, 0.2)
    lines = statements(comparison)
    assert any(line.startswith("final BPT, delta-pi - none: -0.0") and "delta-pi is lower" in line for line in lines)
    assert any("delta-pi - delta-fixed-0.1" in line and line.endswith("no difference shown") for line in lines)
    assert not any("fixed-1:" in line for line in lines)
    assert "3 of 3 runs, at step 2, 2, 2, and was inside it for 75%, 75%, 75%" in lines[-1]
    edge = "the best fixed lambda, 0.1, is the smallest of the sweep: the optimum may lie beyond it"
    assert [line for line in lines[:-1] if "[" not in line] == [f"{edge}; pass more with --lambdas"]
    assert all("over seeds [" in line for line in lines if " BPT, " in line)
    assert any(line.startswith("final BPT, delta-pi - none stopped: ") for line in lines)


def test_no_edge_is_spoken_of_where_the_best_lies_inside(config: Path) -> None:
    tokens_D, results = np.full(20, 10.0), []
    for trial in planned(config, "--controllers", "fixed", "--lambdas", "0.1,1,10"):
        losses_ED = np.stack([(2.0 + abs(math.log10(trial.setting.lambda_ or 1.0))) * tokens_D] * 3)
        results.append(result(trial, losses_ED, tokens_D, [0.0]))
    inside = Comparison(results, draws=100)
    assert inside.edge("delta", "final") is None
    largest = Comparison([one for one in results if one.trial.setting.lambda_ != 10.0], draws=100)
    found = largest.edge("delta", "final")
    assert found is not None and found[0].lambda_ == 1.0 and found[1] == "largest"


def test_a_difference_of_three_seeds_is_said_only_where_the_seeds_agree(config: Path) -> None:
    """Documents and drawn seeds may agree on "lower" where Student's interval has zero in it."""
    generator, tokens_D, results = np.random.default_rng(1), np.full(200, 10.0), []
    for trial in planned(config, "--controllers", "none,pi"):
        shift = {5: -0.02, 6: -0.05, 7: -0.08}[trial.seed] if trial.setting.controller == "pi" else 0.0
        losses_ED = np.stack([(2.0 + shift + 0.01 * generator.normal(size=200)) * tokens_D] * 3)
        results.append(result(trial, losses_ED, tokens_D, [0.0]))
    three = Comparison(results, draws=1000)
    difference = three.difference(three.find("pi")[0], three.find("none")[0], "final")
    assert difference is not None and difference.over_seeds is not None
    assert difference.high < 0 < difference.over_seeds[1] and difference.sign == 0


def test_student() -> None:
    assert [round(compute_t_quantile(freedom), 3) for freedom in (1, 2, 10, 11, 30)] == [
        12.706,
        4.303,
        2.228,
        2.201,
        2.042,
    ]
    assert compute_t_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert compute_t_interval(np.array([1.0])) is None


def test_a_choice_is_measured_on_the_other_half_of_the_documents(config: Path) -> None:
    """Two evaluations, each perfect on one half of the documents: a choice that saw its own half would find 0."""
    trial = planned(config, "--controllers", "none")[0]
    even = np.arange(10) % 2 == 0
    losses_ED = np.stack([np.full(10, 9.0), np.where(even, 0.0, 4.0), np.where(even, 5.0, 0.0)])
    run = result(trial, losses_ED, np.full(10, 2.0), [0.0])
    stopped = run.losses("stopped")
    assert stopped is not None and stopped.tolist() == np.where(even, 5.0, 4.0).tolist()
    assert run.losses("scaled") is None and run.numbers()["scaled_bpt"] is None


def test_files_hold_every_run(comparison: Comparison, tmp_path: Path) -> None:
    markdown, table, figures = write_results(comparison, tmp_path)
    assert len(table.read_text().splitlines()) == 1 + 12
    assert [line.split(" | ")[0] for line in markdown.read_text().splitlines()[2:6]] == [
        "| none",
        "| delta-fixed-0.1",
        "| delta-fixed-1",
        "| delta-pi",
    ]
    record = json.loads(figures.read_text())
    assert record["settings"][3]["fraction_in_deadband"] == 0.75 and record["documents"] == 200
    assert len(record["runs"][0]["heldout_bpt"]) == 3
    console = Console(width=132, record=True, file=open("/dev/null", "w"))
    for shown in result_tables(comparison):
        console.print(shown)
    assert "…" not in console.export_text()


def test_scaled_and_unscaled_seeds_are_drawn_together(config: Path, tmp_path: Path) -> None:
    """The scaled adapter is evaluated once more at the last step."""
    losses_ED, tokens_D = np.outer([60.0, 40.0, 45.0], np.ones(4)), np.full(4, 20.0)
    results = [
        replace(result(trial, losses_ED, tokens_D, [0.1, 0.01]), texts=texts_of(3))
        for trial in planned(
            config, "--measures", "kl", "--controllers", "none,pi", "scu.measure=kl", "scu.reference=x.jsonl"
        )
    ]
    once_more = np.concatenate([losses_ED, losses_ED[-1:]])
    results[-1] = replace(results[-1], steps=[0, 5, 10, 10], losses_ED=once_more, texts=texts_of(4))
    assert {run.trial.setting.measure for run in results} == {"kl"} and [run.trained for run in results] == [3] * 6
    drawn = draw_comparison(Comparison(results, draws=10), tmp_path)
    assert "compare_forgetting.png" in [path.name for path in drawn]


def texts_of(evaluations: int) -> dict[str, Any]:
    return {"tokens": 10.0, "kl": np.ones((evaluations, 2)), "losses": np.ones((evaluations, 2))}


def test_results_of_other_data_are_refused(config: Path) -> None:
    trials = planned(config, "--seeds", "1", "--controllers", "none,pi")
    for trial in trials:
        trial.folder.mkdir(parents=True)
        written = {"data": trial.folder.name, "target_tokens": [3], "evaluations": [{"step": 0, "loss_sums": [1.0]}]}
        (trial.folder / DOCUMENTS_FILE).write_text(json.dumps(written))
        (trial.folder / "scu_metrics.json").write_text("[]")
    with pytest.raises(UserError, match="trained on other data"):
        read_results(trials)
    assert len(read_results(trials[:1])) == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("lora.r=0: too small"), 2, "error: lora.r=0: too small"),
        (FolderLostError("output_dir=x: taken over"), 1, "error: output_dir=x: taken over"),
        (RuntimeError("a shape"), 1, "error: RuntimeError: a shape"),
    ],
)
def test_a_trial_ends_with_the_code_of_its_error(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Failing(SimpleNamespace):
        def train(self) -> None:
            raise error

    failing = Failing(close=lambda: None, log=print, measure=lambda *_: None)
    monkeypatch.setattr(compare_run, "MeasuredRun", lambda *_: failing)
    monkeypatch.setattr(compare_run, "HeldOutDocuments", lambda *_: SimpleNamespace(evaluate=None, measure_scales=None))
    monkeypatch.setattr(compare_run, "open_console", lambda *_: None)
    loaded: Any = SimpleNamespace(config=SimpleNamespace(output_dir="unused", training=None))
    nothing: Any = None
    assert compare_run._train(loaded, nothing, nothing, []) == code
    out, err = capfd.readouterr()
    assert out.strip() == said and ("Traceback" in err) == (not isinstance(error, UserError))
