"""`zerolora train` as a user runs it: two CPU ranks on a tiny model, everything it leaves, and what a signal does."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import OPTConfig, OPTForCausalLM

from tests.distributed.conftest import environment
from tests.tiny import make_model, make_tokenizer, write_chats
from trainer.checkpoint.checkpoint_files import list_checkpoints

pytestmark = pytest.mark.distributed

COMMAND = [sys.executable, "-m", "launcher.cli", "train"]
SECRET = "hf_" + "x" * 20 + "Q7"
TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    model = make_model(folder / "model")
    # A second chat template is a file in a folder, in what the run saves too.
    (model / TEMPLATE).parent.mkdir()
    (model / TEMPLATE).write_text("{{ messages[0]['content'] }}")
    write_chats(folder / "train.jsonl", 200)
    settings: dict[str, Any] = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / "run"),
        "lora_r": 8,
        "dataset": {"path": str(folder / "train.jsonl"), "val_split": 0.1, "max_length": 96},
        "training": {"batch_size": 4, "max_steps": 12, "learning_rate": 1e-2, "save_steps": 6},
        "logging": {"sample_prompts": ["red cat"], "sample_tokens": 4},
    }
    settings["dataset"]["cache_dir"] = str(folder / "cache")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="module")
def finished(workplace: Path) -> subprocess.CompletedProcess[str]:
    command, env = [*COMMAND, str(workplace / "config.yaml"), "training.max_steps=13"], environment()
    env["HF_TOKEN"] = SECRET
    return subprocess.run(command, env=env, cwd=workplace, capture_output=True, text=True, timeout=500)


def test_it_ends_well_and_prints_where_its_files_are(
    finished: subprocess.CompletedProcess[str], workplace: Path
) -> None:
    out = finished.stdout
    assert finished.returncode == 0, finished.stderr + out
    for expected in (
        "trains ",
        "2 x cpu",
        "held-out loss",
        "after training",
        "  before: ",
        "tok/s",
        "left",
        f"adapter      {workplace / 'run'}",
        "report.html",
        "tensorboard --logdir",
    ):
        assert expected in out, out
    held_out = [line for line in out.splitlines() if line.startswith("held-out loss")]
    assert "-> " in held_out[0] and "(-" in held_out[0]
    log = (workplace / "run" / "logs" / "rank-0.log").read_text()
    for detail in ("note: lora_r is read as lora.r", "q_proj", "before training"):
        assert detail in log and detail not in out, out
    before_first_step = out.partition("step  1/13")[0].splitlines()
    assert len(before_first_step) <= 10, before_first_step


def test_the_console_is_calm(finished: subprocess.CompletedProcess[str], workplace: Path) -> None:
    """Libraries talk into the logs, not to the user."""
    shown = finished.stdout + finished.stderr
    for chatter in ("[INFO]", "[WARNING]", "FutureWarning", "launch.py", "Loading weights", "Setting ds_accelerator"):
        assert chatter not in shown, shown
    assert "zerolora 0.1.0: " in finished.stdout.splitlines()[0] and finished.stderr == ""
    assert (workplace / "run" / "logs" / "rank-1.log").stat().st_size > 0


def test_the_run_is_complete(finished: subprocess.CompletedProcess[str], workplace: Path) -> None:
    run = workplace / "run"
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-6", "checkpoint-12", "checkpoint-13"]
    saved = "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", TEMPLATE
    for name in (*saved, "report.html", "run.json"):
        assert (run / name).exists(), name
    assert list((run / "tensorboard").rglob("events.out.tfevents.*"))
    assert "<svg" in (run / "report.html").read_text()
    record = json.loads((run / "run.json").read_text())
    assert record["world_size"] == 2 and record["packages"]["deepspeed"]
    assert record["command"] == ["cli.py", "train", str(workplace / "config.yaml"), "training.max_steps=13"], "as typed"
    assert record["working_directory"] == str(workplace)
    losses = [json.loads(line).get("train/loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([loss for loss in losses if loss is not None]) == 13


def test_no_secret_is_shown_or_saved(workplace: Path, finished: subprocess.CompletedProcess[str]) -> None:
    """What the environment holds is in no file of a run and on no console; here with a token that is set."""
    assert SECRET not in finished.stdout + finished.stderr
    files = [path for path in (workplace / "run").rglob("*") if path.is_file()]
    assert len(files) > 20 and [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_another_run_is_not_overwritten(finished: subprocess.CompletedProcess[str], workplace: Path) -> None:
    before = (workplace / "run" / "adapter_model.safetensors").read_bytes()
    done = subprocess.run(
        [*COMMAND, str(workplace / "config.yaml")], env=environment(), cwd=workplace, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "contains another run" in done.stderr
    assert (workplace / "run" / "adapter_model.safetensors").read_bytes() == before


def test_a_model_that_mixes_packed_documents_is_refused(workplace: Path) -> None:
    """OPT takes its positions from an attention mask that packs do not have."""
    model = workplace / "opt"
    config = OPTConfig(
        vocab_size=384, hidden_size=64, ffn_dim=128, word_embed_proj_dim=64, num_hidden_layers=2, num_attention_heads=4
    )
    OPTForCausalLM(config).save_pretrained(model)
    make_tokenizer(model)
    changes = [f"base_model={model}", f"output_dir={workplace / 'mixed'}", "dataset.packing=true"]
    done = subprocess.run(
        [*COMMAND, str(workplace / "config.yaml"), *changes], env=environment(), cwd=workplace, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    line = (
        "dataset.packing=true: in OPTForCausalLM documents of a pack attend to each other; set dataset.packing: false"
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr == f"error: {line}\n" and "error" not in done.stdout, done.stdout
    assert [path.name for path in (workplace / "mixed").iterdir()] == ["logs"]


def test_sigterm_saves_and_the_run_resumes_to_the_same_end(workplace: Path) -> None:
    """Interrupted at any step and resumed, the adapter has the bits of the uninterrupted run."""
    config, env = str(workplace / "config.yaml"), environment()
    steps = "training.max_steps=80"
    whole = workplace / "whole"
    command = [*COMMAND, config, steps, f"output_dir={whole}"]
    assert subprocess.run(command, env=env, cwd=workplace, capture_output=True, timeout=500).returncode == 0
    cut = workplace / "cut"
    command = [*COMMAND, config, steps, f"output_dir={cut}"]
    with subprocess.Popen(command, env=env, cwd=workplace, stdout=subprocess.PIPE, text=True) as process:
        _wait_for_step(cut / "metrics.jsonl", process)
        _a_second_run_is_refused(command, workplace, cut)
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=500)
    assert process.returncode == 143, out
    assert "stopped and saved at step" in out
    stopped_at = int(list_checkpoints(cut)[-1].name.split("-")[1])
    assert 0 < stopped_at < 80
    typed = shlex.split(out.rpartition("resume with: ")[2])
    assert typed == ["zerolora", *command[3:], "training.resume_from_checkpoint=latest"]
    resumed = subprocess.run(
        [*command[:3], *typed[1:]], env=env, cwd=workplace, capture_output=True, text=True, timeout=500
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"at step {stopped_at}" in resumed.stdout
    assert not (cut / "logs" / "lock.json").exists()
    expected = load_file(whole / "adapter_model.safetensors")
    for name, value in load_file(cut / "adapter_model.safetensors").items():
        assert torch.equal(value, expected[name]), name


def _a_second_run_is_refused(command: list[str], workplace: Path, run: Path) -> None:
    log = (run / "logs" / "launcher.log").read_bytes()
    second = subprocess.run(
        [*command, "output.overwrite=true"], env=environment(), cwd=workplace, capture_output=True, text=True
    )
    assert second.returncode == 2 and second.stdout == ""
    assert second.stderr.startswith(f"error: output_dir={run}: in use by another run (process ")
    assert second.stderr.count("\n") == 1
    assert (run / "logs" / "launcher.log").read_bytes() == log


def test_two_ranks_skip_a_damaged_checkpoint_together(
    finished: subprocess.CompletedProcess[str], workplace: Path
) -> None:
    """To the bits of the run that was not damaged. Named, it is refused, and so is another run; nothing is written."""
    run = workplace / "damaged"
    shutil.copytree(workplace / "run", run)
    file = run / "checkpoint-13" / "training_state-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    common = [*COMMAND, str(workplace / "config.yaml"), "training.max_steps=13", f"output_dir={run}"]
    refused = [*common, f"training.resume_from_checkpoint={run / 'checkpoint-13'}"]
    other = [*common, "training.resume_from_checkpoint=latest", "seed=7", "training.batch_size=2"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    said = []
    for command in (refused, other):
        done = subprocess.run(command, env=environment(), cwd=workplace, capture_output=True, text=True, timeout=500)
        assert done.returncode == 2 and "starting" not in done.stdout, done.stderr + done.stdout
        said += done.stderr.splitlines()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert len(said) == 3, said
    assert "checkpoint-13: training_state-00001.safetensors is damaged" in said[0] and "or latest" in said[0]
    assert said[1].startswith("error: seed=7: checkpoint-12 was trained with 42; restore it, or allow the change")
    assert said[2].startswith(
        "error: training.batch_size=2 x gradient_accumulation_steps=1 x 2 ranks = 4 samples per step: "
    )
    command = [*common, "training.resume_from_checkpoint=latest"]
    done = subprocess.run(command, env=environment(), cwd=workplace, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr + done.stdout
    first, _, repeated = done.stdout.partition("1 warning in this run:\n")
    skipped = "warning: skipped checkpoint-13 (training_state-00001.safetensors is damaged: "
    assert first.count(skipped) == repeated.count(skipped) == 1 and repeated.startswith(skipped), done.stdout
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-6", "checkpoint-12", "checkpoint-13"]
    expected = load_file(workplace / "run" / "adapter_model.safetensors")
    for name, value in load_file(run / "adapter_model.safetensors").items():
        assert torch.equal(value, expected[name]), name


def _wait_for_step(metrics: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and "train/loss" in metrics.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("no step was made")


def test_torchrun_does_the_same(finished: subprocess.CompletedProcess[str], workplace: Path) -> None:
    """The losses of two ranks under torchrun are those of ranks that the command started."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainer.train"]
    folder = workplace / "torchrun"
    command = [*launcher, str(workplace / "config.yaml"), "training.max_steps=13", f"output_dir={folder}"]
    done = subprocess.run(command, env=environment(), cwd=workplace, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, ours = (
        [json.loads(line).get("train/loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, workplace / "run")
    )
    assert theirs == ours and len(theirs) > 13
