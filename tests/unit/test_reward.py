"""Reward models agree with plain PEFT, resume to the bit, and load through PEFT; mistakes have one line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.families import FAMILIES, save_family
from tests.plain_peft import train_steps
from tests.preferences import make_pairs_ground, read_metric, write_answers
from tests.runs_in_process import train
from tests.tiny import write_chats
from trainer.checkpoint.finished_run import find_run
from trainer.commands import chat, evaluate, generate, merge, push
from trainer.commands.export import __main__ as export
from trainer.config import RunConfig, UserError, load_config
from trainer.data.batches import PairBatch, collate_samples
from trainer.data.samples import Sample, Samples, split_documents
from trainer.model.random_weights import init_score_head
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare
from trainer.tasks.reward import find_last_tokens

REWARD: dict[str, Any] = {"task": "reward", "dataset__max_length": 192, "dataset__packing": True}
STEPS: dict[str, Any] = REWARD | {
    "training__max_steps": 5, "training__batch_size": 2, "training__gradient_accumulation_steps": 2,
    "training__learning_rate": 3e-3, "reward__center": 0.1,
}  # fmt: skip
MARGINS = (0.0, 0.5, 1, -0.25)
"""Of every fourth record; those of the first have no such field."""
NAMES = ("train/loss", "train/rewards/chosen", "train/rewards/rejected", "train/rewards/margins")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_pairs_ground(tmp_path_factory.mktemp("reward"), 16, 5)
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record |= {"margin": MARGINS[number % 4]} if number % 4 else {}
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def finished(ground: Path) -> Path:
    """A run of five steps with held-out pairs."""
    folder = ground / "finished"
    held_out = {"path": str(ground / "held_out.jsonl")}
    train(ground, **STEPS, output_dir=str(folder), dataset__evaluation=held_out, training__eval_steps=5)
    return folder


def configure(ground: Path, **changes: Any) -> RunConfig:
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    return load_config(ground / "base.yaml", [*given, "output.overwrite=true"]).config


def plain_model(base: str) -> Any:
    """What the guide says; a new score head is random."""
    return AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)


def reward(model: Any, document: Sample) -> torch.Tensor:
    ids = torch.tensor([document.input_ids])
    scored: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return scored[0, 0]


def plain_losses(config: RunConfig, *, new_head: bool) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Metrics of each step and the trained tensors: one answer at a time, plain torch, PEFT and transformers."""
    prepared = prepare(config)
    model = plain_model(config.base_model)
    if new_head:
        model.score.weight.data = init_score_head(model.config)
    set_seed(config.seed)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = config.lora
    model = get_peft_model(
        model, LoraConfig(task_type="SEQ_CLS", r=lora.r, lora_alpha=lora.alpha, target_modules=projections)
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for samples in train_steps(trained, config, prepared):
        documents = [document for sample in samples for document in split_documents(sample)]
        margins = torch.tensor([margin for sample in samples for margin in sample.margins])
        scores = torch.stack([reward(model, document) for document in documents]).view(-1, 2)
        chosen, rejected = scores.unbind(1)
        losses = -logsigmoid(chosen - rejected - margins) + config.reward.center * (chosen + rejected) ** 2
        losses.mean().backward()
        for name, values in zip(NAMES, (losses, chosen, rejected, chosen - rejected), strict=True):
            found[name].append(values.mean().item())
    return found, {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize(
    ("packing", "stored_head", "stage"),
    [(True, False, 0), (False, False, 1), (True, True, 2), pytest.param(True, False, 3)],
)
def test_losses_and_adapters_agree_with_plain_peft(
    ground: Path, *, packing: bool, stored_head: bool, stage: int
) -> None:
    """Five steps with a new score head, and with that of a base which is a reward model."""
    base = ground / "model"
    if stored_head:
        base = ground / "reward-model"
        torch.manual_seed(3)
        plain_model(str(ground / "model")).save_pretrained(base)
        AutoTokenizer.from_pretrained(ground / "model").save_pretrained(base)
    folder = ground / f"plain-{packing}-{stored_head}-{stage}"
    changes = STEPS | {
        "base_model": str(base), "dataset__packing": packing, "zero__stage": stage, "output_dir": str(folder),
    }  # fmt: skip
    train(ground, **changes)
    expected, tensors = plain_losses(configure(ground, **changes), new_head=not stored_head)
    for name, values in expected.items():
        assert read_metric(folder, name) == pytest.approx(values, abs=1e-5), name
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == len(tensors)
    for key, value in tensors.items():
        name = key.replace("modules_to_save.default.", "").replace(".default", "")
        torch.testing.assert_close(saved[name], value, atol=1e-5, rtol=1e-5)
    before = (
        load_file(base / "model.safetensors")["score.weight"]
        if stored_head
        else init_score_head(plain_model(str(base)).config)
    )
    assert (saved["base_model.model.score.weight"] - before).abs().max() > 1e-3


def test_margins_are_read_from_the_records(ground: Path, tmp_path: Path) -> None:
    """Under `margin` or a configured name; `task: preference` warns that it ignores them."""
    path = tmp_path / "renamed.jsonl"
    path.write_text((ground / "train.jsonl").read_text().replace('"margin"', '"gap"'))
    named = {
        "dataset__path": str(path),
        "dataset__fields": {"margin": "gap", "chosen": "chosen", "rejected": "rejected"},
    }
    path = tmp_path / "text.jsonl"  # as in CSV
    path.write_text(re.sub(r'"margin": ([-0-9.]+)', r'"margin": "\1"', (ground / "train.jsonl").read_text()))
    for changes in ({}, named, {"dataset__path": str(path)}):
        for packing in (False, True):
            samples = prepare(configure(ground, **(REWARD | changes | {"dataset__packing": packing}))).data.train
            assert isinstance(samples, Samples)
            assert sorted(margin for sample in samples for margin in sample.margins) == sorted(MARGINS * 4)
            batch = collate_samples(list(samples), 0, packed=packing, flat=packing, pairs=True)
            assert isinstance(batch, PairBatch) and batch.margins is not None
            assert batch.margins.tolist() == [margin for sample in samples for margin in sample.margins]
            assert packing or batch.margins.tolist() == list(MARGINS * 4)
    prepared = prepare(configure(ground, task="preference", dataset__max_length=192))
    assert any("margins are ignored (12 pairs)" in note and "task: reward" in note for note in prepared.notes)


def test_eval_measures_rewards(ground: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The held-out values of training, and those of the base before it."""
    assert evaluate.main([str(finished), "--json", str(ground / "eval.json"), "--batch-size", "2"]) == 0
    shown, found = capsys.readouterr().out, json.loads((ground / "eval.json").read_text())
    assert "5 pairs" in shown and "loss (nats/pair)" in shown
    assert found["pairs"] == 5
    for name, metric in (("loss", "loss"), ("accuracy", "rewards/accuracies"), ("margin", "rewards/margins")):
        before, *_, after = read_metric(finished, f"eval/{metric}")
        assert found["base"][name] == pytest.approx(before, abs=1e-5)
        assert found["adapter"][name] == pytest.approx(after, abs=1e-5)
        assert found["difference"][name] == pytest.approx(after - before, abs=2e-5)
        low, high = found["adapter"][f"{name}_interval"]
        assert low <= found["adapter"][name] <= high
    assert (
        evaluate.main([str(finished), "--data", str(ground / "train.jsonl"), "--json", str(ground / "other.json")]) == 0
    )
    assert json.loads((ground / "other.json").read_text())["pairs"] == 16
    write_chats(ground / "chats.jsonl", 4)
    assert evaluate.main([str(finished), "--data", str(ground / "chats.jsonl")]) == 2
    assert "task=reward: dataset has records that are not pairs" in capsys.readouterr().err
    assert "nats per pair" in (finished / "README.md").read_text()
    assert "nats per token" not in (finished / "report.html").read_text()


KINDS: dict[str, dict[str, Any]] = {
    "dora": {"lora__dora": True},
    "dropout": {"lora__dropout": 0.2},
    "bf16": {"training__precision": "bf16"},
    "by tokens": {"dataset__batching": "tokens", "dataset__packing": False},
    "recomputed": {"training__gradient_checkpointing": "non_reentrant"},
    "qwen2": {},
    "gemma3_text": {},
    "mistral": {},
    "mixtral": {},
    "fp8": {"adapter": "qlora", "quantization__quant_type": "fp8"},
    "int8": {"adapter": "qlora", "quantization__quant_type": "int8"},
}


@pytest.mark.parametrize("name", KINDS)
def test_plain_peft_gives_the_rewards_of_every_kind(ground: Path, name: str) -> None:
    """On held-out pairs after training, up to the rounding of bf16 and of 8-bit products."""
    base, folder = ground / "model", ground / f"kind-{name}"
    if name in FAMILIES:
        base = save_family(ground / name, name)
    changes = STEPS | KINDS[name] | {"base_model": str(base)}
    held_out = {"dataset__evaluation": {"path": str(ground / "held_out.jsonl")}, "training__eval_steps": 5}
    train(ground, **changes, **held_out, output_dir=str(folder))
    losses = read_metric(folder, "eval/loss")
    assert losses[-1] < losses[0] - 1e-3
    alone = {"dataset__path": str(ground / "held_out.jsonl"), "dataset__packing": False, "dataset__batching": "samples"}
    samples = prepare(configure(ground, **(changes | alone))).data.train
    assert isinstance(samples, Samples)
    model = PeftModel.from_pretrained(plain_model(str(base)), folder).eval()
    with torch.no_grad():
        scores = torch.stack([reward(model, one) for sample in samples for one in split_documents(sample)]).view(-1, 2)
    rounding = 3e-2 if name in ("bf16", "fp8", "int8") else 1e-5
    for side, values in zip(("chosen", "rejected"), scores.unbind(1), strict=True):
        assert read_metric(folder, f"eval/rewards/{side}")[-1] == pytest.approx(values.mean().item(), abs=rounding)


def test_plain_peft_gives_the_same_rewards(ground: Path, finished: Path, tmp_path: Path) -> None:
    """The adapter with a score head at random, and the merged model, in a padded batch."""
    config = configure(ground, **(STEPS | {"dataset__path": str(ground / "held_out.jsonl"), "dataset__packing": False}))
    samples = prepare(config).data.train
    assert isinstance(samples, Samples)
    documents = [document for sample in samples for document in split_documents(sample)]
    assert merge.main([str(finished), "--output", str(tmp_path / "merged")]) == 0
    adapted = PeftModel.from_pretrained(plain_model(config.base_model), finished)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    adapted.config.pad_token_id = tokenizer.pad_token_id
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.num_labels == 1
    padded = tokenizer.pad({"input_ids": [document.input_ids for document in documents]}, return_tensors="pt")
    for model in (adapted, merged):
        with torch.no_grad():
            scores = model.eval()(**padded).logits.view(-1, 2)
        for name, values in (("chosen", scores[:, 0]), ("rejected", scores[:, 1])):
            assert read_metric(finished, f"eval/rewards/{name}")[-1] == pytest.approx(values.mean().item(), abs=1e-5)
        accuracy = (scores[:, 0] > scores[:, 1]).float().mean().item()
        assert read_metric(finished, "eval/rewards/accuracies")[-1] == pytest.approx(accuracy, abs=1e-6)


def test_a_resumed_run_continues_to_the_bit(ground: Path, finished: Path) -> None:
    folder = ground / "resumed"
    train(ground, **STEPS, output_dir=str(ground / "whole"))
    shutil.copytree(ground / "whole" / "checkpoint-2", folder / "checkpoint-2")
    train(
        ground, **STEPS, output_dir=str(ground / "whole-again"),
        training__resume_from_checkpoint=str(ground / "whole" / "checkpoint-2"),
    )  # fmt: skip
    whole, again = (load_file(ground / name / "adapter_model.safetensors") for name in ("whole", "whole-again"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert read_metric(ground / "whole-again", "train/loss") == read_metric(ground / "whole", "train/loss")[2:]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_base_in_4_bits_keeps_its_score_head(ground: Path, stage: int) -> None:
    folder = ground / f"nf4-{stage}"
    train(ground, **STEPS, output_dir=str(folder), adapter="qlora", zero__stage=stage, ops__backend="reference")
    saved = load_file(folder / "adapter_model.safetensors")
    assert saved["base_model.model.score.weight"].shape == (1, 64)
    losses = read_metric(folder, "train/loss")
    assert losses[-1] < losses[0]
    if stage:
        assert losses == pytest.approx(read_metric(ground / "nf4-0", "train/loss"), abs=1e-5)


def test_the_score_is_that_of_the_last_token_but_padding() -> None:
    """As transformers finds it, also where texts end in the padding token."""
    pairs = [Sample([5, 6, 0, 7, 0, 8, 9], [False, True] + [True] * 5, [5, 2]), Sample([4, 3, 4], [True] * 3, [1, 2])]
    flat = collate_samples(pairs, 0, packed=True, flat=True, pairs=True)
    assert find_last_tokens(flat, 0).tolist() == [3, 6, 7, 9]
    rows = collate_samples(pairs, 0, packed=True, flat=False, pairs=True)
    assert find_last_tokens(rows, 0).tolist() == [3, 6, 7, 9]
    apart = collate_samples(pairs, 0, packed=False, flat=False, pairs=True)
    assert find_last_tokens(apart, 0).tolist() == [3, 6, 10, 16]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "all weights": ({"adapter": "none"}, "adapter=none: reward models are trained as adapters; use lora or qlora"),
    "controller": ({"scu__enabled": True}, "scu.enabled=true: not supported for reward models; remove it"),
    "samples": ({"logging__sample_prompts": ["red"]}, "logging.sample_prompts=[red]: not supported for reward models"),
    "preference loss": ({"preference__beta": 0.3}, "preference.beta=0.3"),
    "center without rewards": (
        {"task": "preference", "reward__center": 0.1},
        "reward.center=0.1: has no effect, because task",
    ),
    "center": ({"reward__center": -1}, "reward.center=-1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_have_one_line(ground: Path, name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(UserError) as error:
        configure(ground, **(REWARD | changes))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_wrong_data_has_one_line(ground: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 4)
    write_answers(tmp_path / "answers.jsonl", 4)
    records = [json.loads(line) for line in (ground / "train.jsonl").read_text().splitlines()]
    for name, margin in (("margins", "high"), ("huge", 1e300)):
        lines = [json.dumps(each | {"margin": margin}) + "\n" for each in records]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    for file, message in {
        "chats": "task=reward: dataset has records that are not pairs of a chosen and a rejected answer; "
        "fix or remove them, set dataset.format: preference, or use task: language",
        "answers": "task=reward: dataset has labeled answers, not pairs",
        "margins": "record 1: margin=high: must be a number of at most 1,000,000; fix it",
        "huge": "record 1: margin=1e+300: must be a number of at most 1,000,000; fix it, or remove the field",
    }.items():
        with pytest.raises(UserError) as error:
            prepare(configure(ground, **(REWARD | {"dataset__path": str(tmp_path / f"{file}.jsonl")})))
        assert message in str(error.value)


def test_models_without_a_score_head_are_refused(ground: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"architectures": ["LlamaForSequenceClassification"]}, "its head has 2 classes, but a reward is one number"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "no score head for causal language models of"),
    ):
        folder = tmp_path / changes["architectures"][0]
        shutil.copytree(ground / "model", folder)
        settings = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=message):
            prepare(configure(ground, **(REWARD | {"base_model": str(folder)})))


def test_commands_that_write_text_refuse(
    ground: Path, finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commands: list[tuple[Any, list[str]]] = [
        (chat.main, []), (generate.main, ["red"]), (evaluate.main, ["--tasks", "gsm8k"]),
        (export.main, ["--format", "gguf", "--output", str(tmp_path / "x.gguf")]),
        (export.main, ["--format", "vllm", "--output", str(tmp_path / "x")]),
        (merge.main, ["--scale", "0.5", "--output", str(tmp_path / "x")]),
    ]  # fmt: skip
    for main, arguments in commands:
        assert main([str(finished), *arguments]) == 2
        shown = capsys.readouterr().err.strip()
        assert str(finished) in shown and " is an adapter of a reward model; " in shown
        assert len(shown.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert export.main([str(finished), "--format", "peft", "--output", str(tmp_path / "peft")]) == 0
    (tmp_path / "hub").mkdir()
    pushed = [path.name for path in push.stage_files(find_run(finished), "me/scores", tmp_path / "hub")]
    assert {"adapter_model.safetensors", "tokenizer.json", "README.md"} <= {*pushed}
    assert "pipeline_tag: text-classification" in (tmp_path / "hub" / "README.md").read_text()
    card = (finished / "README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained" in card and "num_labels=1" in card
