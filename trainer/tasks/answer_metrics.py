"""Metrics that compare the answers generated for held-out prompts with the records' answers."""

import json
import math
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import UserError
from trainer.config.evaluation_section import EvaluationSection
from trainer.config.files import UnreadableFileError, read_json
from trainer.data.samples import Sample, split_documents
from trainer.model.answers import generate_greedy_answers
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, assign_batches, gather_objects, run_on_main

Metric = Callable[[str, str, str], float | None]
"""Function of prompt, answer and expected answer; returns None if the metric does not apply to the record."""
PACKAGES = {"json_schema": "jsonschema", "rouge_l": "rouge_score"}
_XML_CALL = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAME_BEFORE_ARGUMENTS = re.compile(r"([\w.-]+)\[ARGS\]\s*$")


class Question(NamedTuple):
    ids: list[int]
    prompt: str
    expected: str


class AnswerMetrics:
    def __init__(self, settings: EvaluationSection, samples: Iterable[Sample], tokenizer: Any) -> None:
        """Choose the records and try each metric on them. Raises UserError if a metric applies to none of them."""
        self._settings, self._tokenizer = settings, tokenizer
        self._metrics = {name: build_metric(name, settings) for name in settings.metrics}
        self._questions = list(islice(_find_questions(samples, tokenizer), settings.samples))
        for name, metric in self._metrics.items():
            if all(_apply_metric(name, metric, question, question.expected) is None for question in self._questions):
                raise UserError(f"evaluation.metrics={name}: applies to no held-out record; remove the metric")

    def measure(self, engine: Engine, batch_size: int, ranks: Ranks) -> dict[str, float]:
        """Generate answers to all prompts and return the mean of each metric; a collective call."""
        order = sorted(range(len(self._questions)), key=lambda index: -len(self._questions[index].ids))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        local: dict[int, str] = {}
        for batch in assign_batches(batches, ranks):
            prompts = [self._questions[index].ids for index in batch]
            texts = generate_greedy_answers(engine, self._tokenizer, prompts, self._settings.max_new_tokens)
            local |= zip(batch, texts, strict=True)
        answers = {index: text for part in gather_objects(local) for index, text in part.items()}
        # On one rank, since a user's function may not be deterministic.
        return run_on_main(ranks, lambda: self._average([answers[index] for index in sorted(answers)]))

    def _average(self, answers: list[str]) -> dict[str, float]:
        means = {}
        for name, metric in self._metrics.items():
            values = [_apply_metric(name, metric, *pair) for pair in zip(self._questions, answers, strict=True)]
            applicable = [value for value in values if value is not None]
            means[name.rpartition(":")[2]] = math.fsum(applicable) / max(len(applicable), 1)
        return means


def _find_questions(samples: Iterable[Sample], tokenizer: Any) -> Iterator[Question]:
    """Yield a question for each document with text before its last trained part."""
    for document in (part for sample in samples for part in split_documents(sample)):
        runs = list(re.finditer("1+", "".join("01"[weight > 0] for weight in document.loss_weights)))
        start, end = runs[-1].span() if runs else (0, 0)
        prompt, expected = (
            tokenizer.decode(document.input_ids[part], skip_special_tokens=True)
            for part in (slice(start), slice(start, end))
        )
        if prompt.strip():
            yield Question(document.input_ids[:start], prompt, expected)


def _apply_metric(name: str, metric: Metric, question: Question, answer: str) -> float | None:
    try:
        value = metric(question.prompt, answer, question.expected)
        return None if value is None else float(value)
    except (Exception, SystemExit) as error:  # raised by the user's function
        problem = f"{type(error).__name__}: {error}, for the expected answer {question.expected[:80]!r}"
        fix = "the function must take (prompt, answer, expected) and return a number or None"
        raise UserError(f"evaluation.metrics={name}: {problem}; {fix}") from None


def build_metric(name: str, settings: EvaluationSection) -> Metric:
    """Build a metric named in `evaluation.metrics`. Raises UserError if it cannot be loaded."""
    if (package := PACKAGES.get(name)) and find_spec(package) is None:
        raise UserError(f"evaluation.metrics={name}: needs {package}, which is not installed; pip install {package}")
    if name == "exact_match":
        return lambda prompt, answer, expected: answer.strip() == expected.strip()
    if name == "regex":
        return _build_regex_metric(re.compile(settings.regex or ""))
    if name == "json_schema":
        return _build_json_schema_metric(Path(settings.json_schema or ""))
    if name == "tool_call":
        return _match_calls
    if name == "rouge_l":
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeL"])
        return lambda prompt, answer, expected: scorer.score(expected, answer)["rougeL"].fmeasure
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise UserError(f"evaluation.metrics={name}: no such file {file}; use FILE.py:FUNCTION")
    try:
        defined = runpy.run_path(file)
    except (Exception, SystemExit) as error:  # raised by the user's file
        raise UserError(f"evaluation.metrics={name}: {type(error).__name__}: {error}; fix {file}") from None
    metric: Metric | None = defined.get(function)
    if not callable(metric):
        raise UserError(f"evaluation.metrics={name}: {file} does not define the function {function}; fix the name")
    return metric


def _build_regex_metric(pattern: re.Pattern[str]) -> Metric:
    def find(text: str) -> str | None:
        *_, last = [None, *pattern.finditer(text)]
        return last and last[min(1, pattern.groups)]

    def compare(prompt: str, answer: str, expected: str) -> float | None:
        if not pattern.groups:
            return find(answer) is not None
        group = find(expected)
        return None if group is None else find(answer) == group

    return compare


def _build_json_schema_metric(path: Path) -> Metric:
    import jsonschema

    try:
        schema = read_json(path, dict[str, Any] | bool)
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
    except (FileNotFoundError, UnreadableFileError, jsonschema.SchemaError) as error:
        problem = getattr(error, "problem", "no such file")
        if isinstance(error, jsonschema.SchemaError):
            problem = f"{error.json_path[2:]}={error.instance!r}: not valid in a JSON schema"
        raise UserError(f"evaluation.json_schema={path}: {problem}; use a file with a JSON schema") from None

    def is_valid(prompt: str, answer: str, expected: str) -> float:
        try:
            return bool(kind(schema).is_valid(json.loads(answer)))
        except ValueError:
            return 0.0

    return is_valid


def _match_calls(prompt: str, answer: str, expected: str) -> float | None:
    calls = find_tool_calls(expected)
    return find_tool_calls(answer) == calls if calls else None


def find_tool_calls(text: str) -> list[str]:
    """Return the tool calls in an answer, as sorted JSON of name and arguments.

    Supported formats: JSON objects with a name and arguments or parameters, possibly nested (most chat templates);
    NAME[ARGS]{...} (Mistral); <function=NAME><parameter=...> (Qwen3-Coder).
    """
    calls = [(name, dict(_XML_ARGUMENT.findall(body))) for name, body in _XML_CALL.findall(text)]
    decoder, at = json.JSONDecoder(), 0
    while (start := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            at = start + 1
            continue
        name = _NAME_BEFORE_ARGUMENTS.search(text[:start])
        calls += [(name[1], value)] if name else _iterate_json_calls(value)
    return sorted(json.dumps(call, sort_keys=True) for call in calls)


def _iterate_json_calls(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and "name" in value and {"arguments", "parameters"} & set(value):
        arguments = value.get("arguments", value.get("parameters"))
        try:
            yield value["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            yield value["name"], arguments
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _iterate_json_calls(part)
