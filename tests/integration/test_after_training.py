"""After a real training run: what the model was in memory is what PEFT, merge, eval and generate find on the disk.

The training process itself writes down the logits of its model before it ends (`train_and_keep_logits`, run by the
fixture as a process of its own), so that they come from the engine's memory and from no file of the run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.tiny import make_model, write_chats
from trainer.commands import evaluate, merge, push

ROOT = Path(__file__).parent.parent.parent
CODE = "from tests.integration.test_after_training import train_and_keep_logits; train_and_keep_logits()"
TOKENS = torch.arange(3, 63).reshape(2, 30)
LOGITS = "logits-in-memory.safetensors"


def train_and_keep_logits() -> None:
    """`trainer.train` as it is, but for a look at the model whenever its weights are copied or written."""
    import trainer.checkpoint.checkpoint_manager
    import trainer.checkpoint.run_folder
    import trainer.train
    from trainer.checkpoint.weights import gather_weights, write_adapter

    seen: dict[int, torch.Tensor] = {}

    def logits_of(model: Any) -> torch.Tensor:
        was_training = model.training
        with torch.no_grad():
            logits = model.eval()(TOKENS.to(model.device), use_cache=False).logits
        model.train(was_training)
        return logits.float().cpu().contiguous()

    def copying(model: Any, **settings: Any) -> dict[str, torch.Tensor]:
        weights = gather_weights(model, **settings)
        seen[id(weights)] = logits_of(model)
        return weights

    def writing(model: Any, trained: dict[str, torch.Tensor], folder: Path, **settings: Any) -> None:
        write_adapter(model, trained, folder, **settings)
        save_file({"logits": seen.pop(id(trained))}, folder / LOGITS)

    vars(trainer.checkpoint.run_folder).update({"gather_weights": copying, "write_adapter": writing})
    vars(trainer.checkpoint.checkpoint_manager).update({"gather_weights": copying})
    sys.exit(trainer.train.main(sys.argv[1:]))


def run_process(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module", params=["lora", "qlora"])
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps on a random Llama, with checkpoints at 20 and 40."""
    folder = tmp_path_factory.mktemp(request.param)
    config = {
        "base_model": str(make_model(folder / "model")),
        "adapter": request.param,
        "output_dir": str(folder / "run"),
        "lora": {"r": 8, "alpha": 16},
        "dataset": {
            "path": str(write_chats(folder / "chats.jsonl", 120)),
            "val_split": 0.2,
            "max_length": 96,
            "cache_dir": str(folder / "cache"),
            "packing": True,
        },
        "training": {"batch_size": 2, "max_steps": 40, "learning_rate": 1e-2, "save_steps": 20, "precision": "fp32"},
        "logging": {"report_to": "none"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run_process("-c", CODE, str(folder / "config.yaml"))
    return folder / "run"


def evaluations(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["eval/loss"] for line in lines if "eval/loss" in line]


def base_of(run_dir: Path) -> Any:
    """The base that the run was trained on, through transformers alone.

    Of a 4-bit one the values that its bits stand for: bitsandbytes' product on a CPU is itself off by about 2e-3.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = json.loads((run_dir / "training_config.json").read_text())
    if settings["adapter"] == "lora":
        return AutoModelForCausalLM.from_pretrained(settings["base_model"])
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        settings["base_model"], quantization_config=four_bits, dtype=torch.float32, device_map="cpu"
    ).dequantize()


def test_peft_gives_the_logits_that_the_trained_model_had(run_dir: Path) -> None:
    from peft import PeftModel

    for folder in (run_dir, run_dir / "checkpoint-20"):
        base = base_of(run_dir)
        with torch.no_grad():
            untrained = base(TOKENS).logits
            logits = PeftModel.from_pretrained(base, folder).eval()(TOKENS).logits
        expected = load_file(folder / LOGITS)["logits"]
        assert (logits - expected).abs().max() < 1e-5
        assert (expected - untrained).abs().max() > 0.1


def test_merged_in_full_precision_it_gives_the_adapters_logits(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base_model = json.loads((run_dir / "training_config.json").read_text())["base_model"]
    for folder in (run_dir, run_dir / "checkpoint-20"):
        assert merge.main([str(folder)]) == 0
        assert f"merged model: {folder / 'merged'}; load it with AutoModel" in capsys.readouterr().out
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
        assert getattr(merged.config, "quantization_config", None) is None
        base = AutoModelForCausalLM.from_pretrained(base_model)
        with torch.no_grad():
            expected = PeftModel.from_pretrained(base, folder).eval()(TOKENS).logits
            assert (merged(TOKENS).logits - expected).abs().max() < 1e-5
        assert merge.main([str(folder)]) == 2
        assert "already exists" in capsys.readouterr().err


def test_eval_finds_the_losses_that_training_measured(run_dir: Path) -> None:
    file = run_dir.parent / "evaluation.json"
    assert evaluate.main([str(run_dir), "--json", str(file), "--batch-size", "5"]) == 0
    found = json.loads(file.read_text())
    losses = evaluations(run_dir)
    assert found["documents"] == 24
    # Training measured packs, eval measures documents: neither the packing nor the batch may show.
    assert found["base"]["loss"] == pytest.approx(losses[0], abs=1e-5)
    assert found["adapter"]["loss"] == pytest.approx(losses[-1], abs=1e-5)
    assert found["difference"]["loss_interval"][1] < 0, "training helped, beyond the spread of the documents"


def test_eval_of_a_checkpoint_is_of_its_own_weights(run_dir: Path) -> None:
    file = run_dir.parent / "early.json"
    assert evaluate.main([str(run_dir / "checkpoint-20"), "--json", str(file), "--samples", "50"]) == 0
    early, losses = json.loads(file.read_text())["adapter"]["loss"], evaluations(run_dir)
    assert early < losses[0] and early != pytest.approx(losses[-1], abs=1e-4)


def test_generate_as_a_command_says_nothing_but_answers(run_dir: Path) -> None:
    few = ("--max-new-tokens", "8")
    done = run_process(
        "-m",
        "launcher.module",
        "trainer.commands.generate",
        str(run_dir),
        "--base",
        *few,
        stdin="red cat\n\nseven birds\n",
    )
    assert done.stdout.count("base + adapter") == 2
    assert done.stderr == ""


def test_push_stages_without_a_network(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert push.main([str(run_dir), "me/tiny", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "adapter_model.safetensors" in shown and "nothing was uploaded" in shown
    card = (run_dir / "README.md").read_text()
    losses = evaluations(run_dir)
    assert f"Held-out loss **{losses[0]:.4f} → {losses[-1]:.4f}**" in card
    assert str(run_dir.parent) not in card and "| data | chats.jsonl |" in card
