"""What becomes of a run of which a rank is killed, cannot start again, fails on its data, or is slow."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.distributed.conftest import environment
from tests.ends import MISCHIEF, TRAIN
from tests.tiny import make_model, write_chats
from trainer.contract.restart_record import read_restarts
from trainer.ranks.stragglers import REPEATS, WINDOW

pytestmark = pytest.mark.distributed
STEPS = 12


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarts")
    make_model(folder / "model")
    write_chats(folder / "train.jsonl", 40)
    settings = {
        "base_model": str(folder / "model"),
        "output_dir": "unset",
        "lora": {"r": 4, "dropout": 0.1},
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
        "training": {"batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-3, "save_steps": 4},
        "logging": {"report_to": "none", "progress": "off"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def train(workplace: Path, name: str, mischief: str = "", *settings: str, once: bool = True) -> tuple[int, str]:
    """Exit code, and what the user saw."""
    env = environment()
    if mischief:
        env |= {"ZEROLORA_MISCHIEF": mischief, "PYTHONPATH": os.pathsep.join([str(MISCHIEF), env["PYTHONPATH"]])}
        env |= {"ZEROLORA_MISCHIEF_ONCE": str(workplace / f"{name}-happened") if once else ""}
    command = [*TRAIN, str(workplace / "config.yaml"), f"output_dir={workplace / name}", *settings]
    done = subprocess.run(command, env=env, cwd=workplace, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr


def adapter(run: Path) -> bytes:
    stored = load_file(run / "adapter_model.safetensors")
    return b"".join(value.numpy().tobytes() for _, value in sorted(stored.items()))


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def test_a_killed_rank_costs_steps_and_nothing_else(workplace: Path) -> None:
    """SIGKILL in steps 6 and 10, with a checkpoint every 4: to the bit the adapter and the records of a run without."""
    assert train(workplace, "calm")[0] == 0
    code, seen = train(workplace, "killed", "1:kill:11", once=False)
    assert code == 0, seen
    assert "was killed by signal 9 (SIGKILL) (step 6" in seen, seen
    assert "restart 2 of 3: going on from checkpoint-8" in seen
    assert adapter(workplace / "killed") == adapter(workplace / "calm")
    assert losses(workplace / "killed") == losses(workplace / "calm")
    restarts = [(restart.step, restart.checkpoint, restart.ranks) for restart in read_restarts(workplace / "killed")]
    assert restarts == [(6, "checkpoint-4", 2), (10, "checkpoint-8", 2)]
    assert "went on from checkpoint-8" in (workplace / "killed" / "report.html").read_text()


@pytest.mark.slow
def test_a_rank_that_cannot_start_again_is_left_out_and_comes_back_when_asked(workplace: Path) -> None:
    """As one whose card is gone: the other takes its part of the global batch, until both are there again."""
    same = ["lora.dropout=0", "training.precision=fp32", "training.lr_scheduler=constant"]  # ranks draw masks
    assert train(workplace, "both", "", *same)[0] == 0
    code, seen = train(workplace, "one", "1:lose:15", *same, "training.elastic=true", "training.max_steps=10")
    assert code == 0, seen
    assert "the place of rank 1 is left out: it failed again before a step was made" in seen, seen
    assert "going on with 1 of 2 ranks; to come back to all 2, stop the run and start it with" in seen
    assert [restart.ranks for restart in read_restarts(workplace / "one")] == [2, 2]
    assert json.loads((workplace / "one" / "run.json").read_text())["world_size"] == 1
    code, seen = train(workplace, "one", "", *same, "training.elastic=true", "training.resume_from_checkpoint=auto")
    assert code == 0 and "resumed from" in seen, seen
    assert json.loads((workplace / "one" / "run.json").read_text())["world_size"] == 2
    assert losses(workplace / "one") == pytest.approx(losses(workplace / "both"), abs=1e-5)


@pytest.mark.slow
def test_data_that_kill_a_step_are_shown(workplace: Path) -> None:
    """The same step fails again: the same call after the start, which is in the same step without a checkpoint."""
    code, seen = train(workplace, "same", "1:raise:9", "training.save_steps=0", once=False)
    assert code == 1, seen
    assert seen.count("ValueError: the middle of the model is missing") == 2
    assert "step 5 has failed twice in the same way" in seen
    assert len([line for line in seen.splitlines() if line.startswith("sample ")]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["layer", "module"])
def test_a_slow_rank_is_named_under_zero_3(workplace: Path, gather: str) -> None:
    """The others wait for it within their forward passes, which then last as long as its own."""
    if gather == "layer":  # a layer ahead, so that in a shallow model they would hardly wait
        zero = [f"base_model={make_model(workplace / 'deep', layers=12)}"]
    else:  # only the embedding and the head are gathered, and not ahead; by default all of a small model stays whole
        zero = ["zero.persistence_threshold=20000", "zero.prefetch_bucket_size=0"]
    settings = ["zero.stage=3", f"zero.gather={gather}", *zero, f"training.max_steps={WINDOW * REPEATS}"]
    code, seen = train(workplace, f"slow-{gather}", "1:slow layer:1", *settings, "training.save_steps=0", once=False)
    assert code == 0, seen
    told = [line for line in seen.splitlines() if " is slow: its own work" in line]
    assert len(told) == 1 and f"step {WINDOW * REPEATS}: rank 1 on " in told[0], seen
