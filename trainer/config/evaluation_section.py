"""The settings of evaluation beyond the held-out loss; the text under a field is its documentation."""

from typing import Annotated

from pydantic import AfterValidator, Field

from trainer.config.needs import Needs
from trainer.config.paths import PathText
from trainer.config.types import Count, PositiveInt, Section, Words, check_regex

ANSWER_METRICS = ("exact_match", "regex", "json_schema", "tool_call", "rouge_l")
LOSSES = ("loss", "bpt", "perplexity")
"""Metrics of held-out data for which lower is better."""
_TASKS, _METRICS, _WRITES = Needs(".tasks"), Needs(".metrics"), Needs("task", ("language", "preference"))


class EvaluationSection(Section):
    """Scores of the model, computed with the held-out loss: before, every `training.eval_steps`, and after training."""

    tasks: Annotated[Words, _WRITES] = ()
    """Tasks of lm-eval: names such as gsm8k, or YAML files. Needs `pip install lm_eval==0.4.13`."""
    num_fewshot: Annotated[Annotated[int, Field(ge=0, le=1000)] | None, _TASKS] = None
    """Number of few-shot examples in the prompts of `tasks`, instead of each task's own."""
    limit: Annotated[PositiveInt | None, _TASKS] = None
    """Maximum number of documents of each of `tasks`."""
    apply_chat_template: Annotated[bool, _TASKS] = False
    """Format the prompts of `tasks` with the tokenizer's chat template."""
    metrics: Annotated[Words, Needs("task", ("language",))] = ()
    """Metrics of greedy answers to held-out prompts, compared with the records' answers. `exact_match`: equal texts;
    `regex`: equal matches of `evaluation.regex`; `json_schema`: valid by `evaluation.json_schema`; `tool_call`: the
    same calls, by name and arguments; `rouge_l`: the F-measure of ROUGE-L; FILE.py:FUNCTION: your function of (prompt,
    answer, expected), which returns a number (higher is better). A prompt ends before the record's last trained
    turn."""
    samples: Annotated[PositiveInt, _METRICS] = 64
    """Maximum number of held-out records to answer, the first ones with a prompt."""
    max_new_tokens: Annotated[Count, _METRICS] = 256
    """Maximum length of an answer in tokens."""
    regex: Annotated[Annotated[str, AfterValidator(check_regex)] | None, Needs(".metrics", ("regex",))] = None
    """Regular expression of the metric `regex`. Its first group, in the last match, must be equal in both answers;
    without a group, the model's answer must have a match."""
    json_schema: Annotated[PathText | None, Needs(".metrics", ("json_schema",))] = None
    """File with the JSON schema of the metric `json_schema`."""

    @property
    def has_scores(self) -> bool:
        """Whether tasks or metrics are set."""
        return bool(self.tasks or self.metrics)
