"""Training on labeled answers (KTO) agrees with plain PEFT and the paper's formula; mistakes have one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.plain_peft import with_adapter
from tests.preferences import log_p, read_metric, write_answers, write_pairs
from tests.runs_in_process import make_ground, train
from trainer.config import RunConfig, UserError, load_config
from trainer.data.samples import Samples, split_documents
from trainer.model.base import load_base_model
from trainer.monitor.report.recorded import read_examples
from trainer.parallel.engine.optimizer import build_schedule
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare

GOOD: dict[str, Any] = {"prompt": "red cat", "completion": "cat red", "label": True}
BAD: dict[str, Any] = {"prompt": "red dog", "completion": "blue the", "label": False}
ASK, ANSWER = {"role": "user", "content": "red cat"}, {"role": "assistant", "content": "cat red"}
KTO: dict[str, Any] = {
    "task": "preference", "preference__loss": "kto", "dataset__max_length": 192, "dataset__packing": False,
}  # fmt: skip
COUNT = 8


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_ground(tmp_path_factory.mktemp("kto"))
    write_answers(folder / "train.jsonl", COUNT)
    return folder


def write(folder: Path, *records: dict[str, Any]) -> str:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def configure(ground: Path, **changes: Any) -> RunConfig:
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in (KTO | changes).items()]
    return load_config(ground / "base.yaml", [*given, "output.overwrite=true"]).config


def plain_losses(config: RunConfig) -> tuple[list[float], dict[str, Any], list[float]]:
    """Losses and baselines of steps over all answers, and the trained factors."""
    settings, training, prepared = config.preference, config.training, prepare(config)
    assert isinstance(prepared.data.train, Samples) and training.max_steps is not None
    model = load_base_model(
        config.base_model, config.model, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
    )
    set_seed(config.seed)
    model = with_adapter(model, config, None, [])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=training.learning_rate, weight_decay=training.weight_decay)
    schedule = build_schedule(optimizer, training, training.max_steps)
    rows = [list(split_documents(sample)) for sample in prepared.data.train]
    losses, baselines = [], []
    for _ in range(training.max_steps):
        with torch.no_grad():
            moved = [log_p(model, other)[0] for _, other in rows]
            with model.disable_adapter():
                base = [[log_p(model, document)[0] for document in row] for row in rows]
        z = max(0.0, sum((m - b[1]).item() for m, b in zip(moved, base, strict=True)) / COUNT)
        total = 0.0
        for number, ((own, _), (reference, _)) in enumerate(zip(rows, base, strict=True)):
            reward = settings.beta * (log_p(model, own)[0] - reference)
            good, bad = 1 - torch.sigmoid(reward - settings.beta * z), 1 - torch.sigmoid(settings.beta * z - reward)
            loss = settings.desirable_weight * good if number % 3 == 0 else settings.undesirable_weight * bad
            (loss / COUNT).backward()
            total += loss.item() / COUNT
        losses.append(total)
        baselines.append(z)
        torch.nn.utils.clip_grad_norm_(trained, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses, {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}, baselines


@pytest.mark.parametrize("reference", ["step", "cached"])
def test_losses_and_adapters_agree_with_plain_peft(ground: Path, reference: str) -> None:
    """Five steps over all answers, packed with the cached reference and apart without."""
    changes: dict[str, Any] = KTO | {
        "dataset__packing": reference == "cached", "preference__reference": reference, "training__max_steps": 5,
        "preference__desirable_weight": 1.3, "preference__undesirable_weight": 0.7, "preference__beta": 0.4,
        "training__batch_size": COUNT, "training__gradient_accumulation_steps": 1, "training__learning_rate": 2e-2,
        "output_dir": str(ground / reference), "dataset__path": str(ground / "train.jsonl"),
    }  # fmt: skip
    train(ground, **changes)
    expected, factors, baselines = plain_losses(configure(ground, **(changes | {"dataset__packing": False})))
    assert read_metric(ground / reference, "train/loss") == pytest.approx(expected, rel=1e-5)
    assert read_metric(ground / reference, "train/kl") == pytest.approx(baselines, abs=1e-5)
    assert max(baselines) > 1e-3
    assert expected[0] == pytest.approx((3 * 1.3 + 5 * 0.7) / 8 / 2, abs=1e-6)
    examples = dict(read_examples(ground / reference))
    records = map(json.loads, (ground / "train.jsonl").read_text().splitlines())
    answers = {"good answer" if record["label"] else "bad answer": record["completion"] for record in [*records][1::-1]}
    assert examples.keys() == answers.keys()
    for label, [_, (weight, text)] in examples.items():
        assert weight == 1.0 and text.removesuffix(END).endswith(answers[label]), "the weight is not the label"
    saved = load_file(ground / reference / "adapter_model.safetensors")
    for key, value in factors.items():
        torch.testing.assert_close(saved[key.replace(".default", "")], value, atol=1e-5, rtol=1e-5)


def rows_of(ground: Path, *records: dict[str, Any], **changes: Any) -> list[tuple[str, str, bool]]:
    """The answer, the mismatched answer, and whether the answer is desirable, of each row."""
    prepared = prepare(configure(ground, dataset__path=write(ground, *records), **changes))
    assert isinstance(prepared.data.train, Samples)
    found = []
    for sample in prepared.data.train:
        documents = list(split_documents(sample))
        texts = [
            prepared.tokenizer.decode([i for i, w in zip(one.input_ids, one.loss_weights, strict=True) if w])
            for one in documents
        ]
        found.append((texts[0], texts[1], max(documents[0].loss_weights) == 1.0))
        assert len({tuple(one.input_ids[: one.loss_weights.index(max(one.loss_weights))]) for one in documents}) == 1
    return found


END = "<|im_end|>"
FORMS: dict[str, dict[str, Any]] = {
    "text": GOOD,
    "turns": {"prompt": [ASK], "completion": [ANSWER], "label": True},
    "messages": {"messages": [ASK, ANSWER], "label": True},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "red cat"}, {"from": "gpt", "value": "cat red"}], "label": True,
    },
    "alpaca": {"instruction": "red", "input": "cat", "output": "cat red", "label": True},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_labeled_answers_is_read(ground: Path, form: str) -> None:
    """Each answer also stands after the prompt of the next record."""
    record = FORMS[form]
    text = json.dumps(record).replace("cat red", "blue dog").replace("true", "false")
    assert rows_of(ground, record, json.loads(text)) == [
        ("cat red" + END, "blue dog" + END, True),
        ("blue dog" + END, "cat red" + END, False),
    ]


@pytest.mark.parametrize(("good", "bad"), [(1, 0), ("True", "FALSE"), (" 1", "0"), ("true", "false")])
def test_labels_may_be_numbers_or_text(ground: Path, good: object, bad: object) -> None:
    rows = rows_of(ground, GOOD | {"label": good}, BAD | {"label": bad}, dataset__format="unpaired")
    assert [is_good for _, _, is_good in rows] == [True, False]
    if str(good).isalpha():  # 1 and 0 may be classes
        assert rows_of(ground, GOOD | {"label": good}, BAD | {"label": bad}) == rows


def test_pairs_give_two_labeled_answers(ground: Path) -> None:
    pairs = [json.loads(line) for line in write_pairs(ground / "pairs.jsonl", 3).read_text().splitlines()]
    rows = rows_of(ground, *pairs, dataset__format="unpaired")
    assert [(text, good) for text, _, good in rows] == [
        (pair[side][1]["content"] + END, side == "chosen") for pair in pairs for side in ("chosen", "rejected")
    ]


def test_skipped_records_keep_answers_mismatched(ground: Path) -> None:
    rows = rows_of(ground, GOOD, GOOD | {"label": None}, BAD, dataset__on_bad_record="skip")
    assert [row[:2] for row in rows] == [("cat red" + END, "blue the" + END), ("blue the" + END, "cat red" + END)]


def test_labeled_answers_are_no_language_data(ground: Path) -> None:
    config = load_config(ground / "base.yaml", [f"dataset.path={write(ground, GOOD, BAD)}"]).config
    with pytest.raises(UserError, match=r"task=auto: the answers in dataset are labeled .*kto \(init: --preset kto\)"):
        prepare(config)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no label": (GOOD | {"label": None}, "record 2: label is missing"),
    "another label": (GOOD | {"label": "good"}, "record 2: label=good: must be true or false, or 1 or 0; set it"),
    "a number": (GOOD | {"label": 2}, "record 2: label=2: must be true or false"),
    "no answer": (GOOD | {"completion": " "}, "record 2: completion is empty"),
    "no prompt": (GOOD | {"prompt": ""}, "record 2: the prompt is empty"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_answer_is_named(ground: Path, name: str) -> None:
    record, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        rows_of(ground, BAD, record)


def test_bad_turns_are_named(ground: Path) -> None:
    good = {"messages": [ASK, ANSWER], "label": True}
    with pytest.raises(UserError, match="record 2: messages ends with a user turn"):
        rows_of(ground, good, good | {"messages": [ANSWER, ASK]})
    with pytest.raises(UserError, match="record 2: messages is empty"):
        rows_of(ground, good, good | {"messages": [ASK, ANSWER | {"content": " "}]})
    with pytest.raises(UserError, match=r"record 2, messages turn 1: weight=0\.5: the answers of pairs"):
        rows_of(ground, good, good | {"messages": [ASK, ANSWER | {"weight": 0.5}]})


@pytest.mark.parametrize(
    ("records", "settings", "message"),
    [
        ((GOOD, GOOD), {}, "preference.loss=kto: all 2 labels of dataset are true"),
        ((BAD,), {}, "preference.loss=kto: all 1 labels of dataset are false"),
        ((GOOD, BAD), {"dataset__val_split": 0.5}, "dataset.val_split=0.5: holds out all answers labeled "),
        ((GOOD,) * 2, {"dataset__val_split": 0.5}, "preference.loss=kto: all 1 labels of dataset are true"),
        ((GOOD, BAD), {"preference__loss": "dpo"}, "preference.loss=dpo: dataset has labeled answers, not pairs"),
        (({"prompt": "a", "chosen": "b", "rejected": "c"},), {}, "set dataset.format: unpaired"),
        ((GOOD, BAD), {"preference__beta": 0}, "preference.beta=0: all answers would have the same reward"),
        ((GOOD, BAD), {"preference__reference": "none"}, "preference.reference=none: kto needs a reference"),
        ((GOOD, BAD), {"preference__length_weight": 0.5}, "preference.length_weight=0.5: only applies to pairs"),
        ((GOOD, BAD), {"preference__weighting": "wpo"}, "preference.weighting=wpo: only applies to pairs"),
        ((GOOD, BAD), {"dataset__streaming": True}, "dataset.streaming=true: labeled answers cannot be streamed"),
        ((GOOD, BAD), {"preference__loss": {"kto": 1, "dpo": 1}}, "kto needs labeled answers"),
        (
            (GOOD,), {"preference__loss": "dpo", "preference__desirable_weight": 2},
            "preference.desirable_weight=2: has no effect, because preference.loss is {dpo: 1.0}",
        ),
        (
            (GOOD,), {"preference__loss": "dpo", "dataset__streaming": True},
            "dataset.streaming=true: labeled answers cannot be streamed",
        ),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(
    ground: Path, records: tuple[dict[str, Any], ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        rows_of(ground, *records, **settings)
    assert message in str(refused.value)
