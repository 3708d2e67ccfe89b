"""Define the settings for evaluation beyond the held-out loss.

The docstring below a field is its user documentation. Task names are looked up in the text of lm-eval's
files, because building lm-eval's index takes 15 seconds.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from trainer.config.errors import UserError
from trainer.config.needs import Needs
from trainer.config.paths import PathText
from trainer.config.types import Count, PositiveInt, Section, StringList, check_regex

ANSWER_METRICS = ("exact_match", "regex", "json_schema", "tool_call", "rouge_l")
LOSS_METRICS = ("loss", "bpt", "perplexity")
"""Metrics on held-out data for which lower is better."""
_DECLARED = re.compile(rb"^(?:task|group|tag): *['\"]?([\w.+-]+)", re.MULTILINE)
_TASKS, _METRICS, _WRITES = Needs(".tasks"), Needs(".metrics"), Needs("task", ("language", "preference"))


class EvaluationSection(Section):
    """Scores computed with each held-out loss: before and after training, and every `training.eval_steps` steps."""

    tasks: Annotated[StringList, _WRITES] = ()
    """lm-eval tasks: names such as gsm8k, or YAML files. Needs `pip install lm_eval==0.4.13`."""
    num_fewshot: Annotated[Annotated[int, Field(ge=0, le=1000)] | None, _TASKS] = None
    """Number of few-shot examples in the prompts of `tasks`, instead of each task's default."""
    limit: Annotated[PositiveInt | None, _TASKS] = None
    """Maximum number of documents per task."""
    apply_chat_template: Annotated[bool, _TASKS] = False
    """Format the prompts of `tasks` with the tokenizer's chat template."""
    metrics: Annotated[StringList, Needs("task", ("language",))] = ()
    """Metrics that compare greedy answers to held-out prompts with the records' answers. `exact_match`: equal texts;
    `regex`: equal matches of `evaluation.regex`; `json_schema`: valid against `evaluation.json_schema`; `tool_call`:
    the same calls, by name and arguments; `rouge_l`: the F-measure of ROUGE-L; FILE.py:FUNCTION: your function of
    (prompt, answer, expected), which returns a number (higher is better). A prompt ends before the record's last
    trained turn."""
    samples: Annotated[PositiveInt, _METRICS] = 64
    """Maximum number of held-out records to answer; the first ones with a prompt are used."""
    max_new_tokens: Annotated[Count, _METRICS] = 256
    """Maximum length of an answer in tokens."""
    regex: Annotated[Annotated[str, AfterValidator(check_regex)] | None, Needs(".metrics", ("regex",))] = None
    """Regular expression for the metric `regex`. The first group of the last match must be equal in both answers;
    without a group, the model's answer must contain a match."""
    json_schema: Annotated[PathText | None, Needs(".metrics", ("json_schema",))] = None
    """File with the JSON schema for the metric `json_schema`."""

    @property
    def has_scores(self) -> bool:
        return bool(self.tasks or self.metrics)


def check_task_names(names: Sequence[str], setting: str = "evaluation.tasks") -> None:
    """Raise a UserError that names `setting` if lm-eval is not installed or a task or its file does not exist."""
    spec = find_spec("lm_eval") if names else None
    if names and spec is None:
        raise UserError(f"{setting}={names[0]}: lm-eval is not installed; pip install lm_eval==0.4.13")
    for name in names:
        if name.endswith(".yaml") and not Path(name).is_file():
            raise UserError(f"{setting}={name}: no such file; use an existing YAML file or the name of a task")
    unknown = [name for name in names if not name.endswith(".yaml") and not set(name) & set("*?[")]
    if spec is None or not unknown:
        return
    folder = Path(*spec.submodule_search_locations or (), "tasks")
    text = b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.suffix != ".py" and path.is_file())
    for name in unknown:
        if name.encode() not in text:
            near = get_close_matches(name, {declared.decode() for declared in _DECLARED.findall(text)}, n=1)
            fix = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists them"
            raise UserError(f"{setting}={name}: not a task of lm-eval; {fix}")
