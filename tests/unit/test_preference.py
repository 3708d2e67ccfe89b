"""Training on pairs of answers agrees with plain PEFT and the papers' formulas; mistakes in pairs have one line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributions import Categorical, kl_divergence
from torch.nn.functional import cross_entropy

from ops.head import BASE_LOSS, COLLISION, DIVERGENCE, ENTROPY, LOSS, TrainedRows, measure_tokens
from tests.plain_peft import train_steps
from tests.preferences import (
    FORMULAS,
    LN_2,
    answer_logits,
    log_p,
    make_pairs_ground,
    plain_preference_losses,
    read_metric,
    write_answers,
)
from tests.runs_in_process import train
from trainer.commands import evaluate
from trainer.config import UserError, load_config
from trainer.data.samples import Sample, Samples, split_documents
from trainer.model.base import load_base_model
from trainer.setup.preflight import prepare

PAIR: dict[str, Any] = {"prompt": "red cat", "chosen": "cat red", "rejected": "blue dog"}
ASK = {"role": "user", "content": "red cat"}
FAST = ("dpo", "ipo", "orpo", "wpo")
SETTINGS: dict[str, Any] = {"task": "preference", "dataset__packing": True, "dataset__max_length": 192}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs_ground(tmp_path_factory.mktemp("preference"), 30, 6)


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        pytest.param(name, packing, marks=[] if name in FAST else [pytest.mark.slow])
        for index, name in enumerate([*FORMULAS, "wpo"])
        for packing in ([True, False] if name == "dpo" else [index % 2 == 0])
    ],
)
def test_every_loss_agrees_with_plain_peft(ground: Path, name: str, *, packing: bool) -> None:
    """Losses of five steps, and every factor after them."""
    beta = {"ipo": 0.5, "sppo_hard": 0.5, "simpo": 2.0}.get(name, 0.1)
    changes = SETTINGS | {
        "preference__loss": name.replace("wpo", "dpo"), "preference__beta": beta, "dataset__packing": packing,
        "training__max_steps": 5, "training__batch_size": 2, "training__gradient_accumulation_steps": 2,
        "training__learning_rate": 3e-3,
        "output_dir": str(ground / f"{name}-{packing}"), "preference__weighting": "wpo" if name == "wpo" else "none",
    }  # fmt: skip
    train(ground, **changes)
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    config = load_config(ground / "base.yaml", [*given, "output.overwrite=true"]).config
    expected, factors = plain_preference_losses(config, name)
    folder = ground / f"{name}-{packing}"
    assert read_metric(folder, "train/loss") == pytest.approx(expected, rel=1e-5)
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == len(factors)
    for key, value in factors.items():
        torch.testing.assert_close(saved[key.replace(".default", "")], value, atol=1e-5, rtol=1e-5)


def test_packed_pairs_start_at_ln_2(ground: Path) -> None:
    console = train(
        ground, **SETTINGS, output_dir=str(ground / "start"), training__max_steps=1, training__eval_steps=1,
        dataset__evaluation={"path": str(ground / "held_out.jsonl")},
    )  # fmt: skip
    assert "30 pairs in" in console
    assert read_metric(ground / "start", "train/loss") == pytest.approx([LN_2], abs=1e-6)
    assert read_metric(ground / "start", "eval/loss")[0] == pytest.approx(LN_2, abs=1e-6)
    assert read_metric(ground / "start", "eval/rewards/margins")[0] == pytest.approx(0.0, abs=1e-6)
    assert read_metric(ground / "start", "train/logps/chosen")[0] < -5.0


@pytest.mark.parametrize("reference", ["step", "cached"])
def test_entropy_and_divergence_agree_with_plain_peft(ground: Path, reference: str) -> None:
    """Of held-out answers, before and after training; a cached reference has no states to compare with."""
    folder, held_out = ground / f"entropy-{reference}", {"path": str(ground / "held_out.jsonl")}
    changes: dict[str, Any] = SETTINGS | {
        "preference__reference": reference, "training__max_steps": 4, "training__learning_rate": 1e-2,
        "training__batch_size": 2, "output_dir": str(folder),
    }  # fmt: skip
    train(ground, **changes, dataset__evaluation=held_out, training__eval_steps=4)
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    given += [f"dataset.path={held_out['path']}", "output.overwrite=true"]
    config = load_config(ground / "base.yaml", given).config
    samples = prepare(config).data.train
    assert isinstance(samples, Samples)
    base = load_base_model(
        config.base_model, config.model, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
    )
    model = PeftModel.from_pretrained(base, folder)
    answers = [document for sample in samples for document in split_documents(sample)]
    with torch.no_grad():
        p = Categorical(logits=torch.cat([answer_logits(model, answer)[0] for answer in answers]))
        with model.disable_adapter():
            q = Categorical(logits=torch.cat([answer_logits(model, answer)[0] for answer in answers]))
    entropies, bits = read_metric(folder, "eval/entropy"), read_metric(folder, "eval/kl_bits")
    assert [entropies[0], entropies[-1]] == pytest.approx([p.entropy().mean().item() for p in (q, p)], abs=1e-5)
    assert read_metric(folder, "train/entropy")[0] == pytest.approx(entropies[0], abs=0.1)
    if reference == "cached":
        assert not bits and not read_metric(folder, "train/kl_bits")
        return
    assert bits[0] == read_metric(folder, "train/kl_bits")[0] == 0.0
    expected = kl_divergence(p, q).mean().item() / LN_2
    assert expected > 1e-3 and bits[-1] == pytest.approx(expected, abs=1e-5)


def test_an_adapter_is_both_start_and_reference(ground: Path) -> None:
    """Losses and factors agree with plain PEFT and a reference from before the first step; also resumed."""
    first, folder = ground / "first-adapter", ground / "from-adapter"
    train(ground, **SETTINGS, output_dir=str(first), training__max_steps=3, training__learning_rate=1e-2)
    changes: dict[str, Any] = SETTINGS | {
        "lora__adapter_path": str(first), "preference__reference": "cached", "training__max_steps": 4,
        "training__batch_size": 2, "training__learning_rate": 3e-3, "output_dir": str(folder),
    }  # fmt: skip
    train(ground, **changes)
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    config = load_config(ground / "base.yaml", [*given, "output.overwrite=true"]).config
    cpu = torch.device("cpu")
    base = load_base_model(config.base_model, config.model, dtype=torch.float32, device=cpu, attention="sdpa")
    model = PeftModel.from_pretrained(base, first, is_trainable=True)
    frozen = {key: value.detach().clone() for key, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = []
    for samples in train_steps(trained, config, prepare(config)):
        documents = [document for sample in samples for document in split_documents(sample)]
        with torch.no_grad():
            before = [functional_log_p(model, frozen, document) for document in documents]
        ratios = torch.stack([log_p(model, one)[0] - known for one, known in zip(documents, before, strict=True)])
        loss = -torch.nn.functional.logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(LN_2, abs=1e-6) and losses[-1] < LN_2 - 1e-3
    assert read_metric(folder, "train/loss") == pytest.approx(losses, abs=1e-5)
    saved = load_file(folder / "adapter_model.safetensors")
    for key, value in model.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(saved[key.replace(".default", "")], value.detach(), atol=1e-5, rtol=1e-5)
    again = changes | {
        "output_dir": str(ground / "from-adapter-again"),
        "training__resume_from_checkpoint": str(folder / "checkpoint-2"),
    }
    train(ground, **again)
    assert read_metric(ground / "from-adapter-again", "train/loss") == read_metric(folder, "train/loss")[2:]


STEPS: dict[str, Any] = SETTINGS | {
    "training__max_steps": 4,
    "training__batch_size": 2,
    "training__learning_rate": 3e-3,
}
EVALUATED: dict[str, dict[str, Any]] = {
    "dpo": {},
    "cached": {"preference__reference": "cached"},
    "simpo": {"preference__loss": "simpo", "preference__beta": 2.0},
    "weighted": {"preference__weighting": "wpo", "preference__length_weight": 0.5},
}


@pytest.mark.parametrize("name", EVALUATED)
def test_eval_measures_pairs(ground: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The held-out values of training; the base is its own reference."""
    folder, result = ground / f"evaluated-{name}", ground / f"evaluated-{name}.json"
    given = {"dataset__evaluation": {"path": str(ground / "held_out.jsonl")}, "training__eval_steps": 2}
    train(ground, **STEPS | EVALUATED[name] | given, output_dir=str(folder))
    assert evaluate.main([str(folder), "--json", str(result), "--batch-size", "2"]) == 0
    shown, found = capsys.readouterr().out, json.loads(result.read_text())
    assert f"{found['pairs']} pairs" in shown
    for column, metric in (("loss", "loss"), ("accuracy", "rewards/accuracies"), ("margin", "rewards/margins")):
        assert found["adapter"][column] == pytest.approx(read_metric(folder, f"eval/{metric}")[-1], abs=1e-5)
    if name in ("dpo", "cached"):
        assert found["base"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert (found["base"]["accuracy"], found["base"]["margin"]) == (0.5, 0.0)


def test_eval_measures_labeled_answers(ground: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The held-out loss of training, and margins from the baseline of a batch, with the sign of the label."""
    folder, result = ground / "labeled", ground / "labeled.json"
    write_answers(ground / "answers.jsonl", 12)
    train(
        ground, **STEPS, preference__loss="kto", output_dir=str(folder), training__eval_batch_size=4,
        dataset__path=str(ground / "answers.jsonl"), dataset__val_split=0.34, training__eval_steps=4,
    )  # fmt: skip
    assert evaluate.main([str(folder), "--json", str(result)]) == 0
    shown, found = capsys.readouterr().out, json.loads(result.read_text())
    assert f"{found['answers']} answers" in shown and "distance from baseline" in shown
    last = {name: read_metric(folder, f"eval/{name}")[-1] for name in ("loss", "kl")}
    assert found["adapter"]["loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert found["base"] | {"loss": 0.5, "accuracy": 0.5, "margin": 0.0} == found["base"]
    assert found["adapter"]["loss"] == pytest.approx(0.5 - found["adapter"]["margin"] / 4, abs=1e-4)  # sigmoid at 0
    pairs = str(ground / "train.jsonl")
    assert evaluate.main([str(folder), "--data", pairs]) == 2
    assert f"error: --data={pairs}, read as in training: preference.loss=kto: " in capsys.readouterr().err
    assert evaluate.main([str(folder), "--base-model", pairs]) == 2
    assert f"error: --base-model={pairs}: is a file; pass a model folder" in capsys.readouterr().err


def functional_log_p(model: Any, weights: dict[str, torch.Tensor], document: Sample) -> torch.Tensor:
    """`log_p` of the model with other weights."""
    now = {key: value.detach().clone() for key, value in model.state_dict().items()}
    model.load_state_dict(weights)
    found = log_p(model, document)[0]
    model.load_state_dict(now)
    return found


def test_losses_of_tokens_have_the_gradient_of_their_weights() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16, dtype=torch.double).float(), torch.randn(50, 16)
    targets, weights = torch.randint(0, 50, (37,)), torch.randn(37)
    rows = TrainedRows(torch.tensor([3, 7]), torch.randn(2, 16, requires_grad=True))
    hidden.requires_grad_()
    base = hidden.detach() + 0.3 * torch.randn(37, 16)
    measures = measure_tokens(hidden, weight, targets, factor=0.5, rows=rows, base_hidden=base)
    found = measures[LOSS]
    ours = torch.autograd.grad((found * weights).sum(), [hidden, rows.values])
    whole = weight.index_copy(0, rows.indices, rows.values)
    expected = cross_entropy(0.5 * hidden @ whole.t(), targets, reduction="none")
    torch.testing.assert_close(found, expected)
    p, q = Categorical(logits=0.5 * hidden @ whole.t()), Categorical(logits=0.5 * base @ weight.t())
    for row, value in (
        (ENTROPY, p.entropy()), (COLLISION, p.probs.square().sum(1).log()), (BASE_LOSS, -q.log_prob(targets)),
        (DIVERGENCE, kl_divergence(p, q)),
    ):  # fmt: skip
        torch.testing.assert_close(measures[row], value)
    assert not measure_tokens(hidden, weight, targets)[BASE_LOSS:].any()
    for one, other in zip(ours, torch.autograd.grad((expected * weights).sum(), [hidden, rows.values]), strict=True):
        torch.testing.assert_close(one, other)


def pairs_of(ground: Path, *records: dict[str, Any], **changes: Any) -> tuple[list[Sample], list[str], Any]:
    """The documents of these records, the console's lines on them, and the tokenizer."""
    (ground / "these.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"task": "preference", "dataset__path": str(ground / "these.jsonl"), "output_dir": str(ground / "x")}
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in (settings | changes).items()]
    prepared = prepare(load_config(ground / "base.yaml", given).config)
    assert isinstance(prepared.data.train, Samples)
    documents = [document for sample in prepared.data.train for document in split_documents(sample)]
    return documents, prepared.data.stats.format_summary(), prepared.tokenizer


def trained_text(document: Sample, tokenizer: Any) -> tuple[str, str]:
    """The prompt and the trained part."""
    at, end = document.loss_weights.index(True), len(document.loss_weights) - document.loss_weights[::-1].index(True)
    assert all(document.loss_weights[at:end])
    return tokenizer.decode(document.input_ids[:at]), tokenizer.decode(document.input_ids[at:end])


CHAT = ("<|im_start|>user\nred cat<|im_end|>\n<|im_start|>assistant\n", "cat red<|im_end|>", "blue dog<|im_end|>")
TEXT = ("red cat", "cat red<|im_end|>", "blue dog<|im_end|>")
FORMS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "text": (PAIR, TEXT),
    "other names": ({"question": "red cat", "accepted": "cat red", "rejected_response": "blue dog"}, TEXT),
    "texts with the prompt": (
        {"chosen": "red cat cat red", "rejected": "red cat blue dog"}, (TEXT[0], f" {TEXT[1]}", f" {TEXT[2]}"),
    ),
    "conversations": (
        {"chosen": [ASK, said("assistant", "cat red")], "rejected": [ASK, said("assistant", "blue dog")]}, CHAT,
    ),
    "conversations next to their prompt": (
        {
            "prompt": "red cat", "chosen": [ASK, said("assistant", "cat red")],
            "rejected": [ASK, said("assistant", "blue dog")], "score_chosen": 8.0,
        },
        CHAT,
    ),
    "turns after a prompt": (
        {"prompt": [ASK], "chosen": [said("assistant", "cat red")], "rejected": [said("assistant", "blue dog")]}, CHAT,
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "red cat"}],
            "chosen": {"from": "gpt", "value": "cat red"}, "rejected": {"from": "gpt", "value": "blue dog"},
        },
        CHAT,
    ),
    "alpaca": ({"instruction": "red", "input": "cat", "chosen": "cat red", "rejected": "blue dog"}, (
        "<|im_start|>user\nred\n\ncat<|im_end|>\n<|im_start|>assistant\n", *CHAT[1:])),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_pairs_is_read(ground: Path, form: str) -> None:
    record, (prompt, chosen, rejected) = FORMS[form]
    documents, _, tokenizer = pairs_of(ground, record)
    assert [trained_text(document, tokenizer) for document in documents] == [(prompt, chosen), (prompt, rejected)]


def test_turns_with_names_of_their_own(ground: Path) -> None:
    ask, answer = {"who": "human", "says": "red cat"}, {"who": "bard", "says": "cat red"}
    record = {"chosen": [ask, answer], "rejected": [ask, answer | {"says": "blue dog"}]}
    names = {"chosen": "chosen", "rejected": "rejected", "role": "who", "content": "says"}
    documents, lines, tokenizer = pairs_of(
        ground, record, dataset__format="preference", dataset__fields=names, dataset__roles={"assistant": ["bard"]}
    )
    assert [trained_text(document, tokenizer)[1] for document in documents] == list(CHAT[1:])
    assert not any("not used" in line for line in lines)


def test_messages_next_to_conversations_may_be_one_of_them(ground: Path) -> None:
    record, expected = FORMS["conversations next to their prompt"]
    documents, _, tokenizer = pairs_of(ground, record | {"messages": record["chosen"]}, dataset__format="preference")
    assert [trained_text(document, tokenizer)[1] for document in documents] == list(expected[1:])


def test_unread_fields_are_listed(ground: Path) -> None:
    _, lines, _ = pairs_of(ground, FORMS["conversations next to their prompt"][0])
    assert any("unused fields" in line and "score_chosen" in line for line in lines)


def test_long_prompts_are_cut_and_answers_never(ground: Path) -> None:
    long = {"prompt": "the " * 60, "chosen": "cat red", "rejected": "blue dog"}
    documents, lines, tokenizer = pairs_of(ground, long, PAIR, dataset__max_length=48)
    assert sum(len(document.input_ids) for document in documents[:2]) <= 48
    assert [trained_text(document, tokenizer)[1].strip() for document in documents[:2]] == list(TEXT[1:])
    assert any(
        "are truncated to fit dataset.max_length=48 by removing the beginning of their prompts" in line
        for line in lines
    )
    endless = {"prompt": "red", "chosen": "cat " * 60, "rejected": "blue dog"}
    documents, lines, _ = pairs_of(ground, endless, PAIR, dataset__max_length=48)
    assert len(documents) == 2
    assert any("are dropped because they exceed dataset.max_length=48" in line for line in lines)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "equal": (PAIR | {"rejected": "cat red"}, "record 2: chosen and rejected are identical"),
    "empty": (PAIR | {"rejected": " "}, "record 2: rejected is empty"),
    "missing": ({"prompt": "red", "chosen": "cat"}, "record 2: rejected is missing"),
    "other prompts": (
        {"chosen": [ASK, said("assistant", "a")], "rejected": [said("user", "dog"), said("assistant", "b")]},
        "record 2: chosen and rejected begin with different turns",
    ),
    "another prompt": (
        {"prompt": "dog", "chosen": [ASK, said("assistant", "a")], "rejected": [ASK, said("assistant", "b")]},
        "record 2: prompt differs from the prompt in chosen and rejected",
    ),
    "a prompt that ends with an answer": (
        {"prompt": [ASK, said("assistant", "a")], "chosen": "b", "rejected": "c"},
        "record 2: the prompt ends with an answer, which chosen and rejected would follow; remove its last turn",
    ),
    "another prompt in turns": (
        {"prompt": [said("user", "dog")], "chosen": [ASK, said("assistant", "a")],
         "rejected": [ASK, said("assistant", "b")]},
        "record 2: prompt differs from the prompt in chosen and rejected",
    ),
    "other words": (
        {"chosen": "red cat", "rejected": "blue dog"}, "record 2: chosen and rejected have no common prompt",
    ),
    "empty turn": (
        {"chosen": [ASK, said("assistant", "a")], "rejected": [ASK, said("assistant", " ")]},
        "record 2: rejected is empty",
    ),
    "last turn": (
        {"chosen": [ASK, said("assistant", "a")], "rejected": [ASK, said("assistant", "b"), ASK]},
        "record 2: rejected ends with a user turn",
    ),
    "a weight": (
        {"prompt": [ASK], "chosen": [said("assistant", "a") | {"weight": 0}], "rejected": [said("assistant", "b")]},
        "record 2, chosen turn 1: weight=0: the answers of pairs",
    ),
    "a mask": (
        {"chosen": [ASK | {"mask": 1}, said("assistant", "a") | {"train": True, "mask": False}],
         "rejected": [ASK | {"mask": 1}, said("assistant", "b") | {"masked": True}]},
        "record 2, rejected turn 1: masked=true: the answers of pairs",
    ),
    "two forms": (
        {"chosen": [ASK, said("assistant", "a")], "rejected": "b"}, "record 2: one of chosen and rejected is a string",
    ),
    "two forms after a prompt": (
        PAIR | {"rejected": [said("assistant", "b")]}, "record 2: one of chosen and rejected is a string",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_pair_is_named(ground: Path, name: str) -> None:
    record, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        pairs_of(ground, PAIR, record)
    documents, lines, _ = pairs_of(ground, PAIR, record, dataset__on_bad_record="skip")
    assert len(documents) == 2
    assert any("1 of 2 records are skipped" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "language"}, "task=language: dataset has pairs of a chosen and a rejected answer"),
        ({"task": "auto", "preference__beta": 0.2}, "preference.beta=0.2: has no effect, because task is auto"),
        (
            {"preference__loss": "simpo", "preference__beta": 0},
            "preference.beta=0: all answers would have the same reward",
        ),
        ({"preference__beta": 0}, "preference.beta=0: all answers would have the same reward"),
        (
            {"preference__loss": "exo_pair"},
            "preference.loss={exo_pair: 1.0}: exo_pair needs preference.label_smoothing",
        ),
        (
            {"dataset__train_on": "all"},
            "dataset.train_on=[all]: preference training only trains on the answers",
        ),
        ({"adapter": "none"}, "adapter=none: the loss needs a reference, which is the model without its adapter"),
        ({"lora__init": "pissa"}, "lora.init=pissa: changes the base model, which is the reference"),
        (
            {"lora__adapter_path": "/nowhere"},
            "lora.adapter_path=/nowhere: is also the reference, which must be computed before",
        ),
        ({"scu__enabled": True}, "scu.measure=delta: needs a loss per token, but preferences have a loss per pair"),
        ({"preference__loss": "sigmoid"}, "sigmoid is not a loss; write dpo"),
    ],
)
def test_settings_that_cannot_work_are_refused(ground: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        pairs_of(ground, PAIR, **settings)
    assert message in str(refused.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("task", "order", "message"),
    [
        (
            "language",
            ("texts", "pairs"),
            "dataset.mix.1 has pairs of a chosen and a rejected answer; .*dataset.mix.1",
        ),
        (
            "preference",
            ("pairs", "texts"),
            "dataset.mix.1 has records that are not pairs .* set dataset.mix.1.format",
        ),
    ],
)
def test_the_source_of_a_mix_that_is_for_another_task_is_named(
    ground: Path, tmp_path: Path, task: str, order: tuple[str, str], message: str, streaming: bool
) -> None:
    for name, record in (("pairs", PAIR), ("texts", {"prompt": "red", "completion": "cat"})):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 4)
    mix = [{"path": str(tmp_path / f"{name}.jsonl")} for name in order]
    with pytest.raises(UserError, match=f"^task={task}: {message}"):
        pairs_of(ground, PAIR, task=task, dataset__path=None, dataset__mix=mix, dataset__streaming=streaming)


def test_texts_are_no_pairs(ground: Path) -> None:
    with pytest.raises(UserError, match="task=preference: dataset has records that are not pairs"):
        pairs_of(ground, {"prompt": "red", "completion": "cat"})
