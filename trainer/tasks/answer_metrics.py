"""Metrics of the answers that a model generates to held-out prompts, compared with the answers of the records."""

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.evaluation_section import EvaluationSection
from trainer.data import Sample
from trainer.data.samples import split_documents
from trainer.model.answers import answer_prompts
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, deal_batches, gather_objects

Metric = Callable[[str, str, str], float | None]
"""Function of prompt, answer and expected answer; None if it does not apply to the record."""
PACKAGES = {"json_schema": ("jsonschema", "jsonschema"), "rouge_l": ("rouge_score", "rouge-score")}
"""Metric -> package that it imports, and its name for pip."""
_XML_CALL = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAME_BEFORE_ARGUMENTS = re.compile(r"([\w.-]+)\[ARGS\]\s*$")


@dataclass(frozen=True)
class Question:
    """A held-out record as a prompt with the expected answer."""

    prompt: list[int]
    text: str
    expected: str


class AnswerMetrics:
    """The metrics of `evaluation.metrics` on held-out records."""

    def __init__(self, settings: EvaluationSection, samples: Iterable[Sample], tokenizer: Any) -> None:
        """Choose the records and try each metric on them; raises UserError if one cannot be measured."""
        self._settings, self._tokenizer = settings, tokenizer
        self._metrics = {_short_name(name): (name, _build_metric(name, settings)) for name in settings.metrics}
        self._questions = list(_find_questions(samples, tokenizer, settings.samples))
        if not self._questions:
            problem = "no held-out record has a prompt and an answer"
            raise UserError(f"evaluation.metrics=[{', '.join(settings.metrics)}]: {problem}; remove it")
        for name, metric in self._metrics.values():
            expected = ((each.text, each.expected, each.expected) for each in self._questions)
            if all(_apply(name, metric, *texts) is None for texts in expected):
                raise UserError(f"evaluation.metrics={name}: applies to no held-out record's answer; remove it")

    def measure(self, engine: Engine, batch_size: int, ranks: Ranks) -> dict[str, float]:
        """Answer all prompts and return the mean of each metric; every rank must call it."""
        order = sorted(range(len(self._questions)), key=lambda index: -len(self._questions[index].prompt))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        own: dict[int, str] = {}
        for batch in deal_batches(batches, ranks):
            prompts = [self._questions[index].prompt for index in batch]
            texts = answer_prompts(engine, self._tokenizer, prompts, self._settings.max_new_tokens)
            own |= zip(batch, texts, strict=True)
        answers = {index: answer for part in gather_objects(own) for index, answer in part.items()}
        found, problem = self._average(answers) if ranks.is_main else ({}, None)
        found, problem = gather_objects((found, problem))[0]
        if problem is not None:
            raise UserError(problem)
        return found

    def _average(self, answers: dict[int, str]) -> tuple[dict[str, float], str | None]:
        """Return the mean of each metric, or an error message; on one rank, for functions that differ by call."""
        means = {}
        try:
            for short, (name, metric) in self._metrics.items():
                texts = ((each.text, answers[index], each.expected) for index, each in enumerate(self._questions))
                found = [value for each in texts if (value := _apply(name, metric, *each)) is not None]
                means[short] = math.fsum(found) / max(len(found), 1)
        except UserError as error:
            return {}, str(error)
        return means, None


def _short_name(metric: str) -> str:
    return metric.rpartition(":")[2]


def _find_questions(samples: Iterable[Sample], tokenizer: Any, most: int) -> Iterator[Question]:
    """Yield up to `most` records that have text before their last trained part."""
    count = 0
    for document in (part for sample in samples for part in split_documents(sample)):
        trained = [weight > 0 for weight in document.trained]
        end = len(trained) - trained[::-1].index(True) if any(trained) else 0
        start = end - next((at for at, is_trained in enumerate(trained[:end][::-1]) if not is_trained), end)
        text = tokenizer.decode(document.input_ids[:start], skip_special_tokens=True)
        if text.strip():
            expected = tokenizer.decode(document.input_ids[start:end], skip_special_tokens=True)
            yield Question(document.input_ids[:start], text, expected)
            count += 1
        if count == most:
            return


def _apply(name: str, metric: Metric, prompt: str, answer: str, expected: str) -> float | None:
    try:
        value = metric(prompt, answer, expected)
        return None if value is None else float(value)
    except Exception as error:  # of the user's function
        problem = f"{type(error).__name__}: {error}, for the expected answer {expected[:80]!r}"
        raise UserError(f"evaluation.metrics={name}: {problem}; return a number") from None


def _build_metric(name: str, settings: EvaluationSection) -> Metric:
    package, pip_name = PACKAGES.get(name, ("json", ""))
    if importlib.util.find_spec(package) is None:
        raise UserError(f"evaluation.metrics={name}: needs {pip_name}, which is not installed; pip install {pip_name}")
    if name == "exact_match":
        return lambda prompt, answer, expected: answer.strip() == expected.strip()
    if name == "regex":
        return _build_regex(re.compile(settings.regex or ""))
    if name == "json_schema":
        return _build_schema(Path(settings.json_schema or ""))
    if name == "tool_call":
        return _match_calls
    if name == "rouge_l":
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeL"])
        return lambda prompt, answer, expected: scorer.score(expected, answer)["rougeL"].fmeasure
    return _load_function(name)


def _build_regex(pattern: re.Pattern[str]) -> Metric:
    def find(text: str) -> str | None:
        *_, last = [None, *pattern.finditer(text)]
        return last and last[min(1, pattern.groups)]

    def compare(prompt: str, answer: str, expected: str) -> float | None:
        if not pattern.groups:
            return find(answer) is not None
        wanted = find(expected)
        return None if wanted is None else find(answer) == wanted

    return compare


def _build_schema(path: Path) -> Metric:
    import jsonschema

    try:
        schema = json.loads(path.read_bytes())
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        problem = f"{type(error).__name__}: {getattr(error, 'message', error)}"
        raise UserError(f"evaluation.json_schema={path}: {problem}; use the file of a JSON schema") from None
    validator = kind(schema)

    def is_valid(prompt: str, answer: str, expected: str) -> float:
        try:
            return bool(validator.is_valid(json.loads(answer)))
        except ValueError:
            return 0.0

    return is_valid


def _match_calls(prompt: str, answer: str, expected: str) -> float | None:
    wanted = find_tool_calls(expected)
    return find_tool_calls(answer) == wanted if wanted else None


def find_tool_calls(text: str) -> list[str]:
    """Return the tool calls in a text as sorted JSON of name and arguments.

    Reads JSON objects with a name and arguments (or parameters), also within others, as most chat templates write them,
    NAME[ARGS]{...} (Mistral) and <function=NAME><parameter=...> (Qwen3-Coder).
    """
    calls = [(name, dict(_XML_ARGUMENT.findall(body))) for name, body in _XML_CALL.findall(text)]
    decoder, at = json.JSONDecoder(), 0
    while (start := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            at = start + 1
            continue
        if name := _NAME_BEFORE_ARGUMENTS.search(text[:start]):
            calls.append((name[1], value))
        else:
            calls += _named_calls(value)
    return sorted(json.dumps(call, sort_keys=True) for call in calls)


def _named_calls(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and "name" in value and {"arguments", "parameters"} & set(value):
        arguments = value.get("arguments", value.get("parameters"))
        try:
            yield value["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            yield value["name"], arguments
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _named_calls(part)


def _load_function(name: str) -> Metric:
    """Load a user's function from FILE.py:FUNCTION."""
    file, _, function = name.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location("zerolora_metric", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found: Metric = getattr(module, function)
    except Exception as error:  # of the user's file
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        raise UserError(f"evaluation.metrics={name}: {problem}; use FILE.py:FUNCTION") from None
    return found
