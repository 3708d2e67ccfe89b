"""Metrics of generated answers: values by hand, one-line errors, and a run that selects its checkpoint by one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_architectures import SMALL
from tests.lm_eval_tasks import write_tasks
from tests.mixtures import EXPERTS, FUSED
from tests.runs_in_process import make_ground, train
from trainer.config import UserError, load_config
from trainer.config.evaluation_section import EvaluationSection
from trainer.data.samples import Sample
from trainer.monitor.metrics import read_metrics
from trainer.setup.preflight import prepare
from trainer.tasks.answer_metrics import AnswerMetrics, _find_questions, build_metric, find_tool_calls


def score(name: str, answer: str, expected: str, **settings: Any) -> float | None:
    return build_metric(name, EvaluationSection(metrics=(name,), **settings))("a prompt", answer, expected)


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"days": 2, "city": "Oslo"}}'
OPENAI = (
    '[{"type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\", \\"days\\": 2}"}}]'
)
MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}'
XML = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("name", "answer", "expected", "value", "settings"),
    [
        ("exact_match", " four\n", "four", 1.0, {}),
        ("exact_match", "Four", "four", 0.0, {}),
        ("regex", "6 * 7 = 41, no, 42", "#### 42", 1.0, {"regex": r"(\d+)"}),  # the last match
        ("regex", "#### 41", "#### 42", 0.0, {"regex": r"#### (\d+)"}),
        ("regex", "#### 42", "no number", None, {"regex": r"#### (\d+)"}),
        ("regex", "say 42", "anything", 1.0, {"regex": r"\d+"}),  # without a group the answer must match
        ("regex", "say no", "anything", 0.0, {"regex": r"\d+"}),
        ("json_schema", '{"age": 7}', "", 1.0, {}),
        ("json_schema", '{"age": "seven"}', "", 0.0, {}),
        ("json_schema", '{"age": 7', "", 0.0, {}),
        ("tool_call", f"I ask. {LLAMA}", HERMES, 1.0, {}),
        ("tool_call", OPENAI, HERMES, 1.0, {}),
        ("tool_call", MISTRAL, HERMES, 1.0, {}),
        ("tool_call", HERMES.replace("2", "3"), HERMES, 0.0, {}),
        ("tool_call", HERMES.replace("weather", "news"), HERMES, 0.0, {}),
        ("tool_call", f"{HERMES}{HERMES}", HERMES, 0.0, {}),
        ("tool_call", "no call", HERMES, 0.0, {}),
        ("tool_call", HERMES, "no call", None, {}),
        ("rouge_l", "the cat sat", "the cat sat", 1.0, {}),
        ("rouge_l", "the dog sat", "the cat sat on it", 2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5), {}),
    ],
)
def test_metrics_equal_values_by_hand(
    name: str, answer: str, expected: str, value: float | None, settings: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    more = {"json_schema": str(tmp_path / "schema.json")} if name == "json_schema" else settings
    found = score(name, answer, expected, **more)
    assert found == (value if value is None else pytest.approx(value))


def test_tool_calls_are_found_in_every_form() -> None:
    expected = find_tool_calls(HERMES)
    assert expected == ['["weather", {"city": "Oslo", "days": 2}]']
    assert [find_tool_calls(text) for text in (LLAMA, OPENAI, MISTRAL)] == [expected] * 3
    assert find_tool_calls(XML) == ['["weather", {"city": "Oslo", "days": "2"}]']
    assert find_tool_calls(f"{LLAMA} {{broken {HERMES}") == expected * 2
    assert find_tool_calls('{"name": "Ada"}') == []


class Letters:
    """A tokenizer of one character per token; `<` is special."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, ids)).replace("<", "")


def test_the_prompt_ends_before_the_last_trained_part() -> None:
    def sample(text: str, trained: str) -> Sample:
        return Sample([*map(ord, text)], [float(mark) for mark in trained], [len(text)])

    turns = sample("<ask.yes<more.no<.", "000011110000011100"[:18])
    raw, empty = sample("<all text", "011111111"), sample("nothing", "0000000")
    pack = Sample([*map(ord, "ab1cd2")], [0, 0, 1, 0, 0, 0.5], [3, 3])
    questions = list(_find_questions([turns, raw, empty, pack], Letters()))
    assert [(question.prompt, question.expected) for question in questions] == [
        ("ask.yesmore", ".no"),
        ("ab", "1"),
        ("cd", "2"),
    ]
    assert questions[0].ids == [*map(ord, "<ask.yes<more")]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"evaluation__metrics": ["bleu"]}, "evaluation.metrics=bleu: unknown metric; use exact_match, regex, "),
    "no pattern": ({"evaluation__metrics": ["regex"]}, "evaluation.metrics=[regex]: needs evaluation.regex; set it"),
    "bad pattern": (
        {"evaluation__metrics": ["regex"], "evaluation__regex": "("},
        "evaluation.regex=(: ( is not a valid regular expression",
    ),
    "nothing held out": (
        {"evaluation__metrics": ["exact_match"], "dataset__evaluation": None},
        "evaluation.metrics=[exact_match]: no data is held out for evaluation; set dataset.val_split",
    ),
    "no calls": (
        {"evaluation__metrics": ["tool_call"]},
        "evaluation.metrics=tool_call: applies to no held-out record; remove the metric",
    ),
    "no schema": (
        {"evaluation__metrics": ["json_schema"], "evaluation__json_schema": "gone.json"},
        "evaluation.json_schema=gone.json: no such file; use a file with a JSON schema",
    ),
    "looping schema": (
        {"evaluation__metrics": ["json_schema"], "evaluation__json_schema": "loop.json"},
        "evaluation.json_schema=loop.json: loop.json is a symlink to loop.json, which leads back to it; use a file",
    ),
    "no kind of schema": (
        {"evaluation__metrics": ["json_schema"], "evaluation__json_schema": "type.json"},
        "evaluation.json_schema=type.json: type='objects': not valid in a JSON schema",
    ),
    "no function": (
        {"evaluation__metrics": ["mine.py:gone"]},
        "evaluation.metrics=mine.py:gone: mine.py does not define the function gone",
    ),
    "no file": ({"evaluation__metrics": ["gone.py:f"]}, "evaluation.metrics=gone.py:f: no such file gone.py; use FILE"),
    "exits": (
        {"evaluation__metrics": ["exits.py:f"]},
        "evaluation.metrics=exits.py:f: SystemExit: 3; fix exits.py",
    ),
    "no number": (
        {"evaluation__metrics": ["mine.py:words"]},
        "evaluation.metrics=mine.py:words: ValueError: could not convert string to float: 'no number', for the ",
    ),
    "no metric": (
        {"training__best_checkpoint": True, "training__best_metric": "acc", "training__eval_steps": 1},
        "training.best_metric=acc: not a metric of this run; use loss, bpt, perplexity",
    ),
    "unused": ({"training__best_metric": "bpt"}, "training.best_metric=bpt: has no effect, because training.best_"),
}
FUNCTIONS = """
def words(prompt, answer, expected):
    return "no number"

def length(prompt, answer, expected):
    assert prompt.strip() and isinstance(answer, str) and expected.strip()
    return -len(answer)
"""

RECORD = """
import json

def record(prompt, answer, expected):
    with open("answers.jsonl", "a") as file:
        file.write(json.dumps([prompt, answer]) + "\\n")
    return len(answer)
"""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_ground(tmp_path_factory.mktemp("answers"))
    (folder / "mine.py").write_text(FUNCTIONS)
    (folder / "exits.py").write_text("raise SystemExit(3)")
    (folder / "type.json").write_text('{"type": "objects"}')
    (folder / "loop.json").symlink_to("loop.json")
    return folder


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_reported_before_anything_is_written(
    name: str, ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    overrides, line = BAD[name]
    given = {"dataset__evaluation": {"path": "held_out.jsonl"}} | overrides
    words = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in given.items()]
    with pytest.raises(UserError) as refused:
        prepare(load_config(ground / "base.yaml", [*words, f"output_dir={ground / 'bad'}"]).config)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value), refused.value
    assert not (ground / "bad").exists()


@pytest.mark.parametrize(("metric", "package"), [("rouge_l", "rouge_score"), ("json_schema", "jsonschema")])
def test_a_missing_package_is_named_with_its_command(
    metric: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.tasks.answer_metrics.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"evaluation.metrics={metric}: needs {package}.*; pip install {package}"):
        AnswerMetrics(EvaluationSection(metrics=(metric,)), [], None)


def test_a_run_keeps_the_weights_that_a_users_function_prefers(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("rouge_score") is not None
    monkeypatch.chdir(ground)
    shown = train(
        ground,
        output_dir=str(ground / "kept"),
        dataset__evaluation={"path": "held_out.jsonl"},
        evaluation__metrics=["exact_match", "rouge_l", "mine.py:length"],
        evaluation__max_new_tokens=6,
        training__learning_rate=0.05,
        training__lr_scheduler="constant",
        training__max_steps=6,
        training__eval_steps=1,
        training__save_steps=1,
        training__best_checkpoint=True,
        training__best_metric="length",
    )
    records: list[dict[str, Any]] = [record for record in read_metrics(ground / "kept") if "eval/length" in record]
    assert [record["step"] for record in records[:7]] == [0, 1, 2, 3, 4, 5, 6]
    assert records[0]["base/rouge_l"] == records[0]["eval/rouge_l"]
    best = max(records[1:7], key=lambda record: record["eval/length"])
    assert records[-1]["eval/length"] == best["eval/length"] != records[1]["eval/length"]
    assert records[-1]["eval/loss"] == best["eval/loss"]
    assert best["step"] == 6 or f"keeping the weights of step {best['step']}, which have the best length" in shown
    report = (ground / "kept" / "report.html").read_text()
    assert f"before {records[0]['eval/length']:.4f}, after {best['eval/length']:.4f}" in report


def test_resuming_with_another_metric_restarts_the_search_for_the_best(ground: Path) -> None:
    held_out = {"path": str(ground / "held_out.jsonl")}
    settings = {
        "output_dir": str(ground / "again"),
        "dataset__evaluation": held_out,
        "evaluation__metrics": ["rouge_l"],
        "evaluation__max_new_tokens": 4,
        "training__eval_steps": 1,
        "training__save_steps": 1,
        "training__best_checkpoint": True,
    }
    train(ground, **settings, training__max_steps=2)
    more = {"training__max_steps": 3, "training__resume_from_checkpoint": "latest"}
    shown = train(ground, **settings, **more, training__best_metric="rouge_l")
    assert "note: training.best_metric is now rouge_l; the search for the best checkpoint starts over" in shown
    state = json.loads((ground / "again" / "checkpoint-3" / "state.json").read_text())
    assert state["best_metric"] == "rouge_l" and state["best_loss"] <= 0.0


def test_the_attention_of_packs_does_not_read_the_padding_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss has our attention also on a CPU; its scores do not depend on the rows of a batch."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_ground(tmp_path)
    settings = SMALL | EXPERTS | FUSED["gpt_oss"] | {"num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **settings)).save_pretrained(tmp_path / "model")
    (tmp_path / "answers.py").write_text(RECORD)
    monkeypatch.chdir(tmp_path)
    for size in (1, 4):
        train(
            tmp_path,
            output_dir=str(tmp_path / str(size)),
            dataset__evaluation={"path": "held_out.jsonl"},
            dataset__packing=True,
            evaluation__metrics=["answers.py:record"],
            evaluation__tasks=write_tasks(tmp_path)[1:2],
            evaluation__max_new_tokens=6,
            training__max_steps=1,
            training__eval_batch_size=size,
        )
    texts = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(set(map(tuple, texts))) > 6 and texts[: len(texts) // 2] == texts[len(texts) // 2 :]
    scores = [[r["eval/write/chrf"] for r in read_metrics(tmp_path / size) if "eval/write/chrf" in r] for size in "14"]
    assert scores[0] == scores[1] and scores[0]
