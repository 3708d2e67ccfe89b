"""Tiers: every assertion of the table holds and breaks where it must; no GPU, unknown names, verdicts, exit codes."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.tiers import __main__ as tiers
from benchmarks.tiers import checks
from benchmarks.tiers.__main__ import TIERS, Outcome, Runner, main
from benchmarks.tiers.checks import Check, Checker, TierRun
from benchmarks.tiers.machine import Baselines, Machine, Weights, cpu_time, find_template, find_weights, this_machine
from tests.tiny import make_model
from trainer.commands.estimate import main as estimate
from trainer.config import UserError
from trainer.data.conversations import ChatEncoder
from trainer.data.records import Conversation

CPU = Machine("CPU", on_gpu=False)


def run(
    losses: Sequence[float | None], folder: Path = Path("none"), *, steps: int | None = None, seconds: float = 60.0,
    on_gpu: bool = True, real: bool = True, held_out: tuple[float, ...] = (), resumed: dict[int, float] | None = None,
    **series: list[float],
) -> TierRun:  # fmt: skip
    """A run with these training losses; `series` are other metrics, `__` standing for the slash."""
    records: list[dict[str, float | None]] = []
    for index, loss in enumerate(losses):
        values = {name.replace("__", "/"): value[index] for name, value in series.items()}
        records.append({"step": index + 1, "train/loss": loss, "train/grad_norm": 1.0, **values})
    records += [{"step": 0, "eval/loss": loss} for loss in held_out]
    again: list[dict[str, float | None]] = [
        {"step": float(step), "train/loss": loss} for step, loss in (resumed or {}).items()
    ]
    total = len(losses) if steps is None else steps
    return TierRun(folder, records, total, seconds, on_gpu=on_gpu, real_weights=real, resumed=again)


FLAT = [1.0] * 500
FALLING = [4.0 - 0.005 * step + (-1) ** step for step in range(500)]
ONE_RISES = [*FALLING[:100], *[value + 0.6 for value in FALLING[100:150]], *FALLING[150:]]
CASES: list[tuple[str, Checker, TierRun, bool | None, str]] = [
    ("in time", checks.finished_within(120), run(FLAT, seconds=119.6), True, "120 s, under 120 s"),
    ("too slow", checks.finished_within(120), run(FLAT, seconds=120.0), False, "120 s"),
    ("time of a CPU", checks.finished_within(120), run(FLAT, on_gpu=False), None, "the limit is for a GPU"),
    ("finite", checks.finite, run([1.0, 2.0]), True, "2 of 2 steps, 0 losses"),
    ("not finite", checks.finite, run([1.0, None]), False, "1 losses or gradient norms not finite"),
    ("a step missing", checks.finite, run([1.0], steps=2), False, "1 of 2 steps"),
    ("peak", checks.peak_memory(0.5), run([1.0, 1.0], memory__peak_gib=[0.1, 0.5]), True, "512 MiB, at most 512 MiB"),
    ("peak too high", checks.peak_memory(0.5), run([1.0, 1.0], memory__peak_gib=[0.51, 0.1]), False, "522 MiB"),
    ("peak unknown", checks.peak_memory(0.5), run([1.0]), False, "nan"),
    ("peak of a CPU", checks.peak_memory(0.5), run([1.0], on_gpu=False, memory__peak_gib=[9.0]), None, "on the CPU"),
    ("flat", checks.memory_is_flat, run(FLAT, memory__peak_gib=[1.0] * 20 + [2.0] * 480), True, "by 0.00%"),
    ("grows", checks.memory_is_flat, run(FLAT, memory__peak_gib=[2.0] * 30 + [2.02] * 470), False, "by 1.00%"),
    ("too short to tell", checks.memory_is_flat, run([1.0], memory__peak_gib=[1.0]), False, "nan"),
    (
        "holds",
        checks.throughput_holds,
        run(FLAT, perf__tokens_per_second=[1.0] * 20 + [100.0] * 380 + [95.5] * 100),
        True,
        "100 tokens/s at first, 96 at last (-4.5%)",
    ),
    (
        "slows down",
        checks.throughput_holds,
        run(FLAT, perf__tokens_per_second=[100.0] * 400 + [94.0] * 100),
        False,
        "(-6.0%)",
    ),
    ("smoothed falls", checks.smoothed_loss_falls, run(FALLING), True, "3.877"),
    ("smoothed rises", checks.smoothed_loss_falls, run(FALLING[::-1]), False, "means of 50 steps"),
    ("one window rises", checks.smoothed_loss_falls, run(ONE_RISES), False, "1 of 10 do not fall"),
    ("smoothed stays", checks.smoothed_loss_falls, run(FLAT), False, "1.000"),
    ("fell", checks.loss_fell(0.30), run([2.0] * 10 + [9.0] * 5 + [1.4] * 10), True, "2.000 -> 1.400 (-30.0%)"),
    ("fell too little", checks.loss_fell(0.30), run([2.0] * 10 + [1.41] * 10), False, "(-29.5%)"),
    ("fell, random", checks.loss_fell(0.30), run([2.0] * 10 + [0.1] * 10, real=False), None, "random weights"),
    ("held out fell", checks.held_out_loss_fell, run([1.0], held_out=(2.0, 1.9)), True, "2.000 -> 1.900"),
    ("held out rose", checks.held_out_loss_fell, run([1.0], held_out=(2.0, 2.1)), False, "2.000 -> 2.100"),
    ("not held out", checks.held_out_loss_fell, run([1.0], held_out=(2.0,)), False, "2.000"),
    ("resumes", checks.resumes, run([1.0, 2.0, 3.0], resumed={2: 2.01, 3: 3.0}), True, "steps 2 to 3 again"),
    ("resumes elsewhere", checks.resumes, run([1.0, 2.0, 3.0], resumed={2: 2.1, 3: 3.0}), False, "within 5.00%"),
    ("resumes and stops", checks.resumes, run([1.0, 2.0, 3.0], resumed={2: 2.0}), False, "steps 2 to 2"),
    ("never resumed", checks.resumes, run([1.0, 2.0, 3.0]), False, "no step again"),
]


@pytest.mark.parametrize(
    ("checker", "finished", "passed", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_an_assertion_holds_breaks_or_cannot_be_made(
    checker: Checker, finished: TierRun, passed: bool | None, words: str
) -> None:
    check = checker(finished)
    assert check.passed is passed and words in check.text, check.text


@pytest.mark.parametrize(
    ("values", "passed"), [((1.0, -1.0), True), ((1.0, 0.0), False), ((1.0, math.nan), False), ((), False)]
)
def test_every_adapter_must_have_moved(values: tuple[float, ...], passed: bool, tmp_path: Path) -> None:
    tensors = {f"layer{index}.lora_B.weight": torch.full((2, 2), value) for index, value in enumerate(values)}
    save_file(tensors | {"layer0.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    assert checks.adapters_moved(run([1.0], tmp_path)).passed is passed


def checkpoints(folder: Path, *steps: int, result: float = 1.0) -> None:
    save_file({"w": torch.tensor([result])}, folder / "adapter_model.safetensors")
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "COMPLETE").touch()
        save_file({"w": torch.tensor([1.0])}, folder / f"checkpoint-{step}" / "adapter_model.safetensors")


def test_whole_checkpoints_hold(tmp_path: Path) -> None:
    checkpoints(tmp_path, 5, 10)
    check = checks.checkpoints_are_whole(5, 10)(run([1.0], tmp_path))
    assert check == Check("checkpoints", True, "checkpoint-5, checkpoint-10 read back")


@pytest.mark.parametrize(("case", "words"), [
    ("missing", "none at step 15"), ("unfinished", "none at step 10"),
    ("not finite", "checkpoint-5/adapter_model.safetensors is not finite"),
    ("another adapter", "the adapter of checkpoint-10 is not the result"),
])  # fmt: skip
def test_checkpoints_that_are_not_whole_are_named(case: str, words: str, tmp_path: Path) -> None:
    checkpoints(tmp_path, 5, 10, result=2.0 if case == "another adapter" else 1.0)
    if case == "unfinished":
        (tmp_path / "checkpoint-10" / "COMPLETE").unlink()
    if case == "not finite":
        save_file({"w": torch.tensor([math.inf])}, tmp_path / "checkpoint-5" / "adapter_model.safetensors")
    steps = (5, 10, 15) if case == "missing" else (5, 10)
    check = checks.checkpoints_are_whole(*steps)(run([1.0], tmp_path))
    assert check.passed is False and words in check.text


def test_the_table_of_the_tiers_is_complete() -> None:
    """Model, steps, batch and assertions of docs/guide/tiers.md."""
    expected = {
        "quick": ("SmolLM2-135M", 10, ["time", "finite", "adapters", "peak memory"]),
        "convergence": ("SmolLM2-135M", 100, ["training loss", "held-out loss"]),
        "convergence_qlora": ("SmolLM2-135M", 100, ["training loss", "held-out loss", "peak memory"]),
        "memory": ("TinyLlama-1.1B", 50, ["peak memory"]),
        "extended": ("TinyLlama-1.1B", 500, ["peak memory", "memory is flat", "throughput", "smoothed loss falls"]),
        "full": ("Llama-2-7b", 1000, ["peak memory", "checkpoints", "resumes", "training loss"]),
    }
    assert list(expected) == list(TIERS)
    for name, (model, steps, asserted) in expected.items():
        config = TIERS[name].config
        assert model in config.base_model and config.training.max_steps == steps
        # A run that measured nothing breaks or cannot answer every check, and none of them falls over.
        empty = run([], Path("none"), steps=steps, seconds=999.0)
        names = [check(empty).name for check in TIERS[name].checks if check is not checks.adapters_moved]
        assert set(asserted) - {"adapters"} <= set(names)
    full = TIERS["full"].config
    assert (full.lora.r, full.lora.target_modules) == (8, ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert TIERS["memory"].config.training.batch_size == 1
    assert full.training.max_steps is not None and full.training.max_steps - full.training.max_steps // 2 > 0


@pytest.mark.parametrize(("name", "limit_gib"), [("quick", 0.25), ("convergence_qlora", 0.25), ("extended", 2.0)])
def test_a_tier_that_promises_little_memory_is_estimated_to_need_less(
    name: str, limit_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = TIERS[name]
    assert tier.config.tier.peak_memory_gib == limit_gib
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert estimate([str(tier.path), f"base_model=random:{tier.shape}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["peak_bytes"] <= limit_gib * 2**30


def test_settings_of_the_command_line_change_what_is_asserted() -> None:
    [tier] = tiers._chosen(tiers._parse(["quick", "tier.seconds=5", "--cpu"]))
    assert tier.checks[0](run([1.0], seconds=5.5)).text == "6 s, under 5 s"


def test_a_file_of_the_user_asserts_the_limits_that_it_sets(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "base_model: random:tiny\noutput_dir: out\ndataset: {path: x.jsonl, val_split: 0.1}\n"
        "tier: {seconds: 60, loss_fall: 0.2}\n"
    )
    [tier] = tiers._chosen(tiers._parse([str(file), "--cpu"]))
    names = [check(run([1.0])).name for check in tier.checks if check is not checks.adapters_moved]
    assert names == ["finite", "time", "training loss", "held-out loss"]
    assert checks.adapters_moved in tier.checks and tier.path == file


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["quik", "--cpu"],
            "quik: no such tier; choose from quick, convergence, convergence_qlora, memory, extended, full, all",
        ),
        (["all", "--cpu", "--base-model", "x"], "every tier has its own model; choose one tier"),
        (["quick", "--cpu", "--models", "nowhere"], "--models nowhere: no such folder"),
        (["quick", "--cpu", "--base-model", "random:bert"], "unknown shape"),
        (["quick", "--cpu", "tier.seconds=never"], "tier.seconds=never"),
        (["nowhere.yaml", "--cpu"], "nowhere.yaml: no such file"),
        (["quick", "--cpu", "--base-model", "random:tiny", "--output", "/dev/null/x"], "--output /dev/null/x: cannot"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and complaint in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_runs_only_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quick"]) == 2
    assert "no NVIDIA GPU here; use --cpu to run on the CPU" in capsys.readouterr().err
    assert not this_machine(cpu=True).on_gpu


def test_weights_are_real_where_they_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    config = TIERS["memory"].path
    (tmp_path / "models" / "TinyLlama-1.1B-Chat-v1.0").mkdir(parents=True)
    reported = find_weights(config, "tinyllama-1.1b", None, tmp_path / "models")
    assert reported.real and reported.model == str(tmp_path / "models" / "TinyLlama-1.1B-Chat-v1.0")
    random = find_weights(config, "tinyllama-1.1b", None, None)
    assert (random.model, random.real) == ("random:tinyllama-1.1b", False)
    assert "`hf download TinyLlama/TinyLlama-1.1B-Chat-v1.0` gets it" in random.text
    assert find_weights(config, "tinyllama-1.1b", "random:tiny", None).real is False


def test_looking_for_model_and_data_does_not_send_the_run_to_the_cpu(tmp_path: Path) -> None:
    """The runs inherit this process's environment, where the demonstration must not have chosen a device."""
    program = (
        "import os\nfrom benchmarks.tiers.__main__ import TIERS\n"
        "from benchmarks.tiers.machine import find_data, find_weights\n"
        "config = TIERS['quick'].path; find_data(config)\n"
        "print(find_weights(config, 'smollm2-135m', None, None).real, os.environ.get('DS_ACCELERATOR'))"
    )
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    environment = os.environ | nothing | {"ZEROLORA_CACHE": str(tmp_path / "cache")}
    environment.pop("DS_ACCELERATOR", None)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tiers.ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["False None"]


def test_the_time_on_a_cpu_grows_with_the_model() -> None:
    small, large = (cpu_time(TIERS["quick"].config, f"random:{shape}") for shape in ("tiny", "smollm2-135m"))
    assert 30 < small < large < 3600


def runner(tmp_path: Path, machine: Machine, *options: str) -> Runner:
    from rich.console import Console

    return Runner(tiers._parse(["quick", "--output", str(tmp_path), *options]), machine, Console(quiet=True))


def test_a_card_without_room_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "find_weights", lambda *arguments: Weights("random:tiny", False, "drawn"))
    full = Machine("a card", on_gpu=True, free_gib=2.6, context_gib=1.0)
    outcome = runner(tmp_path, full, "--check-vram").run(TIERS["memory"])
    assert not outcome.passed and outcome.problem == "not run: needs 3.0 GiB free on the card, which has 2.6"


def test_the_run_that_failed_is_the_one_whose_logs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "find_weights", lambda *arguments: Weights("random:tiny", False, "drawn"))
    monkeypatch.setattr(tiers, "find_data", lambda config: [])
    monkeypatch.setattr(tiers, "find_template", lambda model: [])
    monkeypatch.setattr(Runner, "_train", lambda self, tier, folder, overrides: int(folder.name == "full-resumed"))
    outcome = runner(tmp_path, Machine("a card", on_gpu=True)).run(TIERS["full"])
    assert outcome.problem == f"zerolora train ended with exit code 1; see {tmp_path / 'full-resumed' / 'logs'}"


def outcomes(monkeypatch: pytest.MonkeyPatch, verdicts: dict[str, bool]) -> list[str]:
    """Runs that end as the test says; returns the names of those that were made."""
    made: list[str] = []

    def end(self: Runner, tier: tiers.Tier) -> Outcome:
        made.append(tier.name)
        asserted = (Check("finite", verdicts[tier.name], "3 of 3"), Check("time", None, "on the CPU"))
        return self._conclude(Outcome(tier.name, "random:tiny", verdicts[tier.name], 1.0, asserted))

    monkeypatch.setattr(Runner, "run", end)
    return made


def test_a_failure_is_gone_on_from_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = outcomes(monkeypatch, dict.fromkeys(TIERS, True) | {"memory": False})
    assert main(["all", "--cpu", "--json"]) == 1
    assert made == list(TIERS)
    captured = capsys.readouterr()
    document: dict[str, Any] = json.loads(captured.out)
    assert document["passed"] is False and [tier["passed"] for tier in document["tiers"]] == [
        name != "memory" for name in TIERS
    ]
    assert document["tiers"][0]["checks"][1] == {"name": "time", "passed": None, "text": "on the CPU"}
    assert "5 of 6 tiers passed, 6 assertions could not be made in 6 s: failed memory" in captured.err
    assert "BROKEN" in captured.err and "not made" in captured.err


def test_stop_on_failure_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    made = outcomes(monkeypatch, dict.fromkeys(TIERS, True) | {"convergence": False})
    assert main(["all", "--cpu", "--stop-on-failure"]) == 1
    assert made == ["quick", "convergence"]


def test_all_held_is_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, dict.fromkeys(TIERS, True))
    assert main(["all", "--cpu"]) == 0


def test_a_folder_that_is_no_folder_of_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; pass the folder that contains the models"):
        find_weights(TIERS["quick"].path, "smollm2-135m", None, tmp_path / "none")


def test_throughput_is_kept_for_a_card_and_compared_with(tmp_path: Path) -> None:
    baselines = Baselines(tmp_path / "kept", "NVIDIA H200 (MIG 1g.18gb)")
    assert baselines.read("memory") is None
    baselines.keep("memory", 100.0)
    baselines.keep("full", 7.0)
    again = Baselines(tmp_path / "kept", "NVIDIA H200 (MIG 1g.18gb)")
    assert (again.read("memory"), again.read("full")) == (100.0, 7.0)
    assert Baselines(tmp_path / "kept", "NVIDIA L4").read("memory") is None
    for rate, passed in ((95.0, True), (90.0, True), (89.0, False)):
        finished = run(FLAT, perf__tokens_per_second=[1.0] * 20 + [rate] * 480)
        assert checks.against_baseline(finished, again.read("memory")).passed is passed
    assert checks.against_baseline(finished, None).passed is None
    assert checks.tokens_per_second(run(FLAT, on_gpu=False, perf__tokens_per_second=FLAT)) is None
    again.path.write_text("[]")
    with pytest.raises(UserError, match="delete it"):
        again.read("memory")


def test_all_can_leave_a_tier_out_and_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = tiers._chosen(tiers._parse(["all", "--without", "full", "--without", "memory"]))
    assert [tier.name for tier in chosen] == ["quick", "convergence", "convergence_qlora", "extended"]
    for words in (["all", "--without", "half"], ["quick", "--without", "full"]):
        with pytest.raises(UserError, match="--without"):
            tiers._chosen(tiers._parse(words))
    with pytest.raises(SystemExit):
        tiers._parse(["--help"])
    assert "zerolora tier all --without full" in capsys.readouterr().out


def test_a_base_model_without_a_template_is_given_alpacas(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = make_model(tmp_path / "model")
    assert find_template(str(model)) == []
    (model / "chat_template.jinja").unlink()
    [override] = find_template(str(model))
    template = override.removeprefix("dataset.chat_template=")
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}]
    shown = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    assert shown == f"### Instruction:\nSay it.\n\n### Response:\nIt.{tokenizer.eos_token}"
    encoder = ChatEncoder(tokenizer, template, ["assistant"], None)
    [document] = encoder.encode([Conversation(turns)], ["here"])
    learnt = [token for token, trained in zip(document.input_ids, document.loss_weights, strict=True) if trained]
    assert tokenizer.decode(learnt) == f"It.{tokenizer.eos_token}"


def test_the_workflow_runs_the_tier_full_once_a_week() -> None:
    """`on` is a boolean of YAML 1.1."""
    workflow = yaml.safe_load((Path(__file__).parents[2] / ".github/workflows/gpu-nightly.yml").read_text())
    times = [each["cron"] for each in workflow[True]["schedule"]]
    job = workflow["jobs"]["full"]
    [weekly] = [time for time in times if repr(time) in job["if"]]
    assert weekly.split()[-1] != "*" and any("tier full" in step.get("run", "") for step in job["steps"])
