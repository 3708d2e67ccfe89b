"""`zerolora validate` says what a configuration means without training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.families import tiny_family
from tests.tiny import make_model, write_chats
from trainer.checkpoint.run_record import write_run_record
from trainer.commands import estimate, validate
from trainer.config import LoraSection, load_config
from trainer.contract.folder_lock import FolderLock
from trainer.model.adapter import apply_adapter


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", tie_word_embeddings=True)
    write_chats(tmp_path / "chats.jsonl", 20)
    settings = {
        "base_model": "model",
        "adapter": "qlora",
        "output_dir": "run",
        "lora": {"r": 4},
        "dataset": {"path": "chats.jsonl", "max_length": 64, "val_split": 0.1, "cache_dir": "cache"},
        "training": {"epochs": 2, "batch_size": 3, "gradient_accumulation_steps": 2},
    }
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # two ranks
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_validate_describes_the_run_and_writes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([str(config), "lora_r=8", "logging.run_name=trial #3"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    model = 384 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64
    assert lines["note"] == "lora_r is read as lora.r"
    assert lines["model"] == f"model: LlamaForCausalLM, {model:,} parameters, 2 layers, context 256"
    adapter = 2 * 8 * (128 + 96 + 96 + 128 + 192 * 3)
    share = f"{adapter:,} parameters ({adapter / (model + adapter):.2%} of all): "
    assert lines["adapter"].startswith(f"r=8 on a 4-bit base, {share}")
    assert "gate_proj (2)" in lines["adapter"]
    assert lines["steps"] == ("4 (2 per epoch), 12 samples per step: batch_size 3 x accumulation 2 x 2 ranks")
    assert lines["warning"].startswith("4 optimizer steps in total, the first one with a learning rate of 0 (18 s")
    assert lines["OK"] == f"zerolora train {config} lora_r=8 'logging.run_name=trial #3'"
    assert not Path("run").exists()


def test_the_adapter_to_start_from_is_described(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = {"gate_proj": 8}
    model = apply_adapter(
        AutoModelForCausalLM.from_pretrained("model"), LoraSection(r=4, rank_pattern=pattern), torch.float32
    )
    model.save_pretrained("earlier")
    words = [str(config), "adapter=lora", "lora.r=64", "lora.adapter_path=earlier"]
    assert validate.main(words) == 0
    parameters = 2 * 4 * (128 + 96 + 96 + 128 + 192 * 4)
    assert f"adapter: r=4 on an unquantized base, {parameters:,} parameters" in capsys.readouterr().out
    needed = []
    for more in (["lora.adapter_path=earlier"], ["lora.r=4", "lora.rank_pattern={gate_proj: 8}"]):
        assert estimate.main([str(config), "adapter=lora", *more, "--json"]) == 0
        needed.append(json.loads(capsys.readouterr().out)["estimate"])
    assert needed[0] == needed[1]


def test_documents_beyond_the_model_are_a_warning_unless_its_positions_are_a_table(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = [str(config), "dataset.max_length=512"]
    assert validate.main(longer) == 0
    said = "warning: dataset.max_length=512: the model's context is 256 tokens; adapters may learn little from longer"
    assert said in capsys.readouterr().out
    assert validate.main([*longer, "model.rope_scaling={type: yarn, factor: 4}"]) == 0
    assert "the model's context is" not in capsys.readouterr().out
    tiny_family("opt").save_pretrained("table")
    limit = tiny_family("opt").config.max_position_embeddings
    words = [
        str(config),
        "base_model=table",
        "model.tokenizer=model",
        "adapter=lora",
        f"dataset.max_length={limit + 1}",
    ]
    assert validate.main(words) == 2
    assert f"the model only has positions for {limit} tokens; use {limit}" in capsys.readouterr().err


UNLIMITED = ("mpt", "recurrent_gemma", "xlstm")


@pytest.mark.parametrize(
    "kind", ["bloom", "mamba", *(pytest.param(kind, marks=pytest.mark.slow) for kind in UNLIMITED)]
)
def test_models_without_a_maximum_length_are_described(
    kind: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their configurations have no such entry, or -1 in it."""
    tiny_family(kind).save_pretrained(kind)
    assert validate.main([str(config), f"base_model={kind}", "model.tokenizer=model", "adapter=lora"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("model: "))
    assert line.endswith(" parameters, 4 layers")


@pytest.mark.parametrize("kind", ["jetmoe", pytest.param("gemma3n_text", marks=pytest.mark.slow)])
def test_a_model_without_an_estimate_is_reported(kind: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of Gemma 3n share keys, and experts of JetMoE need values of tensors: neither runs without weights."""
    tiny_family(kind).save_pretrained(kind)
    words = [str(config), f"base_model={kind}", "model.tokenizer=model", "adapter=lora"]
    capsys.readouterr()
    assert estimate.main(words) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.startswith("error: the memory of this model cannot be estimated (")
    assert validate.main(words) == 0


def test_validate_during_a_run_reports_what_training_would_need(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path("run")
    with FolderLock.acquire(run, resumes=False, log=print):
        assert validate.main([str(config)]) == 0
        shown = capsys.readouterr().out
        assert f"OK except for output_dir=run: is in use by an active run (process {os.getpid()} on " in shown
    write_run_record(run, load_config(config).config.model_dump_json(), 1, "cpu", "fp32")
    before = sorted(run.rglob("*"))
    assert validate.main([str(config)]) == 0
    assert (
        "OK except for output_dir=run: contains another run, without a complete checkpoint" in capsys.readouterr().out
    )
    assert validate.main([str(config), "output.overwrite=delete"]) == 0
    assert f"OK: zerolora train {config} output.overwrite=delete" in capsys.readouterr().out
    assert sorted(run.rglob("*")) == before
    assert validate.main([str(config), "output_dir=model", "output.overwrite=true"]) == 2
    assert capsys.readouterr().err == "error: output_dir=model: is also base_model; use a separate folder\n"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training.max_steps=7", "accumulation 2 x 2 ranks"),
        ("training.batch_size=auto", "steps: 2 epochs of 18 samples; batch_size is chosen when training starts"),
        (
            "training.global_batch_size=12",
            "steps: 4 (2 per epoch), 12 samples per step: batch_size 3 x accumulation 2 x 2 ranks",
        ),
        ("adapter=none", "adapter: none, all weights are trained"),
        ("training.learning_rate=0.1", "note: training.learning_rate=0.1: far above the usual rates of AdamW"),
        ("lora.alpha=1000", "note: lora.alpha=1000: scales the update by 250 at lora.r=4"),
        ("training.global_batch_size=18", "warning: 2 optimizer steps in total, the first one with"),
        ("lora.init=pissa", "adapter: r=4 on an unquantized base"),
    ],
)
def test_validate_explains_settings(override: str, line: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([str(config), "adapter=lora", override]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("dataset.path=chat.jsonl", "dataset.path=chat.jsonl: no such file or folder"),
        ("lora.target_modules=query", "query: matches no layer of this model"),
        ("base_model=nobody/nothing", "base_model=nobody/nothing: not a local folder"),
        ("training.lr_scheduler=cosine_with_restarts training.lr_cycles=9", "training.lr_cycles=9: a cycle needs 2"),
        (
            "training.lr_scheduler=warmup_stable_decay training.warmup_ratio=0.5 training.decay_ratio=0.9",
            "training.decay_ratio=0.9: plus training.warmup_ratio=0.5 exceeds 1",
        ),
        ("training.warmup_steps=100", "would never reach its peak in a run of 6 steps"),
    ],
)
def test_a_mistake_is_one_line(override: str, complaint: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([str(config), *override.split()]) == 2
    captured = capsys.readouterr()
    assert "OK" not in captured.out and captured.err.count("\n") == 1 and complaint in captured.err


def test_groups_of_shards_are_those_of_all_ranks(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["zero.stage=3", "zero.shard_within=2"]
    assert validate.main([str(config), "--ranks", "4", *overrides]) == 0, capsys.readouterr().err
    assert validate.main([str(config), "--ranks", "3", *overrides]) == 2
    assert "zero.shard_within=2: 3 ranks cannot be divided" in capsys.readouterr().err


def test_steps_of_a_micro_batch_that_is_still_open(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([str(config), "training.batch_size=auto", "training.max_steps=7"]) == 0
    assert "steps: 7; batch_size is chosen when training starts" in capsys.readouterr().out


NO_NETWORK = """
import sys, time
from trainer.config import ModelSection, UserError
from trainer.config.data_sections import SourceSection
from trainer.data.sources import read_source
from trainer.model.base import load_model_config, load_tokenizer
from trainer.setup.preflight import _check_adapter_on_hub
import transformers, datasets, peft
waited = []
time.sleep = waited.append
for ask in (
    lambda: load_model_config("nobody/no-such-model", ModelSection()),
    lambda: load_tokenizer(".", ModelSection(tokenizer="nobody/no-such-model")),
    lambda: _check_adapter_on_hub("nobody/no-such-model"),
    lambda: read_source(SourceSection(path="nobody/no-such-data"), "dataset"),
):
    try:
        ask()
    except UserError as error:
        print(error)
print(sum(waited))
"""


@pytest.mark.slow
def test_without_a_network_the_one_line_comes_without_waiting() -> None:
    """The hub's library would wait 23 s between six tries; here its waiting is counted, and no time passes."""
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    *said, waited = done.stdout.splitlines()
    assert float(waited) < 15.0, done.stdout
    for line, setting in zip(said, ("base_model", "model.tokenizer", "lora.adapter_path"), strict=False):
        assert line.startswith(f"{setting}=nobody/no-such-model: not a local folder, not in the Hub's cache"), line
    assert said[3].startswith("dataset.path=nobody/no-such-data: ") and "cannot be reached" in said[3]
    assert len(said) == 4
