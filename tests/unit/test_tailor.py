"""`zerolora init --gpus`: a file made for the data and the cards, each setting with its reason, valid as it is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from launcher import presets
from launcher.presets import init
from tests.model_hub import MODEL, served_model
from tests.tiny import make_model, write_chats
from trainer.commands import tailor as tailor_module
from trainer.commands.tailor import main as tailor
from trainer.commands.validate import main as validate
from trainer.config import RunConfig, UserError, load_config
from trainer.model import adapter as adapter_module

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ground = tmp_path_factory.mktemp("tailor")
    make_model(ground / "model")
    write_chats(ground / "chats.jsonl", 600)
    write_chats(ground / "few.jsonl", 8)
    texts = [json.dumps({"text": "word " * count}) for count in range(100, 700, 3)]
    (ground / "texts.jsonl").write_text("\n".join(texts))
    return ground


def made(ground: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[RunConfig, str]:
    monkeypatch.chdir(ground)
    monkeypatch.setenv("HOME", str(ground))  # the cache of tokenised data
    (ground / "mine.yaml").unlink(missing_ok=True)
    assert tailor([*words, "--output", "mine.yaml", "--output-dir", "runs/x"]) == 0
    loaded = load_config("mine.yaml")
    assert loaded.notes == ()
    return loaded.config, Path("mine.yaml").read_text()


def test_short_chats_are_packed_and_every_setting_has_a_reason(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, text = made(ground, monkeypatch, "--model", "./model", "--data", "chats.jsonl", "--gpus", "2")
    assert (config.adapter, config.lora.target_modules, config.lora.r) == ("lora", ("all-linear",), 16)
    assert config.dataset.packing and config.dataset.max_length == 256, "the model's context"
    assert config.dataset.val_split == 0.1 and config.training.best_checkpoint
    assert config.training.global_batch_size in (1, 2, 4) and config.training.batch_size == 1
    lines = text.splitlines()[3:]
    settings = [at for at, line in enumerate(lines) if line and not line.lstrip().startswith("#") and ": " in line]
    assert len(settings) > 15 and all(lines[at - 1].lstrip().startswith("# ") for at in settings)
    assert "# 600 documents, " in text and "the average document would fill" in text
    from trainer.setup.preflight import prepare

    assert prepare(config).data.stats.packed, "and it can be trained as it is"


def test_packs_of_a_model_without_a_context_limit_hold_all_but_the_longest_documents() -> None:
    tokens = np.array([100] * 9_900 + [5_000] * 100)
    profile = tailor_module.Profile(tokens, tokens, None, parameters=10**9, per_rank=10**5, widest=2048)
    settings: tailor_module.Settings = {}
    request = tailor_module.TailorRequest("./model", "texts.jsonl", 1, 80 << 30, "of 80GiB", "out")
    tailor_module._choose_data(settings, request, profile)
    assert settings["dataset.packing"][0] and settings["dataset.max_length"][0] == 5_056


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("count", [3, 12, 40, 140, 1500])
def test_a_file_of_init_causes_no_warning(
    count: int, gpus: int, ground: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chats(ground / f"chats-{count}.jsonl", count)
    words = ("--model", "./model", "--data", f"chats-{count}.jsonl", "--gpus", str(gpus))
    made(ground, monkeypatch, *words)
    capsys.readouterr()
    assert validate(["mine.yaml", "--ranks", str(gpus)]) == 0
    shown = capsys.readouterr().out
    # Of a model this tiny, real data is always more than the adapter can learn.
    assert [line for line in shown.splitlines() if line.startswith("warning: ") and "Mbit" not in line] == []
    steps = re.search(r"^steps: ([\d,]+)", shown, re.MULTILINE)
    assert steps and int(steps.group(1).replace(",", "")) >= 20


def test_init_reads_local_model_and_data(
    ground: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def become(module: str, words: list[str]) -> NoReturn:
        assert module == "trainer.commands.tailor"
        raise SystemExit(tailor(words))

    monkeypatch.chdir(ground)
    monkeypatch.setenv("HOME", str(ground))
    monkeypatch.setattr(presets, "exec_module", become)
    (ground / "models").mkdir(exist_ok=True)
    (ground / "models" / "mine").symlink_to(ground / "model")
    with pytest.raises(SystemExit) as ended:
        init(model="models/mine", data="chats.jsonl", output=Path("here.yaml"))
    assert ended.value.code == 0
    assert "# 600 documents" in Path("here.yaml").read_text()
    capsys.readouterr()
    for model, data, why in (
        ("./model", "absent.jsonl", "absent.jsonl does not exist yet"),
        (
            "org/model",
            "chats.jsonl",
            "warning: org/model could not be read, locally or on the Hub, so the file has the settings of the preset",
        ),
    ):
        init(model=model, data=data, output=Path("there.yaml"), force=True)
        assert "with the settings of the preset" in Path("there.yaml").read_text(), "nothing to examine"
        assert why in capsys.readouterr().out


def test_init_examines_a_model_on_the_hub_without_its_weights(ground: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "launcher.cli", "init", "--model", MODEL, "--data", str(ground / "chats.jsonl")]
    with served_model(ground / "model", environment, cache=tmp_path / "hub") as online:
        done = subprocess.run(command, cwd=tmp_path, env=online, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("examining the model and the data\n"), done.stderr
    assert "# 600 documents" in (tmp_path / "tiny.yaml").read_text()
    assert list(tmp_path.rglob("tokenizer.json")) and not list(tmp_path.rglob("*.safetensors"))


def test_few_documents_are_all_trained_on(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, text = made(ground, monkeypatch, "--model", "./model", "--data", "few.jsonl", "--gpus", "1")
    assert (config.dataset.val_split, config.training.evals_per_epoch, config.dataset.packing) == (0.0, None, False)
    assert (
        "fifteen" not in text and "15 times the usual rate for full fine-tuning" in text and "the run is short" in text
    )


def test_experts_share_the_rank_that_a_token_meets(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--model", "random:olmoe-1b-7b,num_hidden_layers=2", "--data", "texts.jsonl", "--gpus", "1")
    config, text = made(ground, monkeypatch, *words)
    assert (
        config.lora.experts and config.lora.expert_rank == "r/top_k" and config.lora.target_modules == ("all-linear",)
    )
    assert "# each token uses 8 experts, with a combined rank of r\n  expert_rank: r/top_k\n" in text
    hold = int(text.partition("# ")[2].partition(" adapter parameters")[0].split("# ")[-1].replace(",", ""))
    from trainer.commands.run_description import describe_run
    from trainer.setup.preflight import prepare

    assert f", {hold:,} parameters (" in describe_run(config, prepare(config), 1)[2], "as many as the adapter has"


def test_more_data_than_the_adapter_holds_is_a_warning(
    ground: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.commands.validate import main as validate

    for module in (adapter_module, tailor_module):
        monkeypatch.setattr(module, "BITS_PER_TOKEN", 1000.0)
    words = ("--model", "./model", "--data", "texts.jsonl", "--gpus", "1")
    config, text = made(ground, monkeypatch, *words)
    assert config.lora.r == 64, "the highest of the usual ones that is no wider than the layers"
    said = capsys.readouterr().out
    assert "warning: the data has about " in said and "use a higher lora.r, or adapter: none" in said
    assert "# Warning: the data has about " in text
    assert validate(["mine.yaml"]) == 0
    assert "warning: the data has about " in capsys.readouterr().out
    for module in (adapter_module, tailor_module):
        monkeypatch.setattr(module, "BITS_PER_TOKEN", 1.0)
    assert validate(["mine.yaml"]) == 0
    assert "Mbit of information" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("memory", "gpus", "expected"),
    [
        ("80GiB", 1, ("lora", 2, "none")),
        ("24GiB", 1, ("lora", 2, "non_reentrant")),
        ("12GiB", 1, ("qlora", 2, "non_reentrant")),
        ("12GiB", 2, ("lora", 3, "non_reentrant")),
    ],
)
def test_the_card_decides_how_the_base_is_kept(
    memory: str, gpus: int, expected: tuple[str, int, str], ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", "random:llama3.1-8b", "--data", "texts.jsonl", "--gpus", str(gpus), "--gpu-memory", memory)
    config, _ = made(ground, monkeypatch, *words)
    assert (config.adapter, config.zero.stage, config.training.gradient_checkpointing) == expected
    assert config.training.learning_rate in (2e-4, 3e-4)


def test_impossible_requests_are_refused(
    ground: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ground)
    monkeypatch.setenv("HOME", str(ground))
    words = ["--output", "never.yaml", "--output-dir", "x", "--gpus", "1", "--data", "texts.jsonl"]
    assert tailor([*words, "--model", "random:llama3.1-8b", "--gpu-memory", "3GiB"]) == 2
    assert "does not fit on 1 of these GPUs (" in capsys.readouterr().err
    assert tailor([*words, "--model", "./nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: base_model=./nowhere: ")
    assert not Path("never.yaml").exists()
    with pytest.raises(UserError, match="add --model and --data"):
        init(model="m", gpus=2)
