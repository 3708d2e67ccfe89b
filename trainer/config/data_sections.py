"""The settings of the text that is learnt and held out; the text under a field is its documentation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer.config.needs import HUB, Needs
from trainer.config.paths import PathText, TemplateText
from trainer.config.types import Positive, PositiveInt, Section, Words

_LANGUAGE, _UNMIXED, _FROM_HUB = Needs("task", ("language",)), Needs(".mix", ((),)), Needs(".path", (HUB,))
_TEXT = (_UNMIXED, _LANGUAGE)


def _fraction(value: Any) -> Any:
    """Other trainers take a number of records as well."""
    if isinstance(value, (int, float)) and value >= 1:
        raise ValueError("a number of records; write a fraction of the records, such as 0.05, and 0.5 at most")
    return value


class SourceSection(Section):
    """One source of examples."""

    path: PathText | None = None
    """A .jsonl, .json, .parquet, .csv, .txt file, a folder of them, or the name of a data set on the hub."""
    name: Annotated[str | None, _FROM_HUB, _UNMIXED] = None
    """Configuration (subset) of a hub data set."""
    revision: Annotated[str | None, _FROM_HUB, _UNMIXED] = None
    """Branch, tag or commit of a hub data set."""
    data_files: Annotated[Words, _UNMIXED] = ()
    """Which files of a folder or hub data set to read, instead of all: names or patterns such as part-*.jsonl."""
    split: Annotated[str, _UNMIXED] = "train"
    """Split of a hub data set or of a folder that has splits."""
    format: Annotated[
        Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "completion", "custom"], *_TEXT
    ] = "auto"
    """Shape of a record; `auto` reads it off the field names and says what it found."""
    fields: Annotated[dict[str, str], _UNMIXED] = Field(default_factory=dict)
    """Your names for a format's fields, such as {prompt: question, completion: answer}."""
    roles: Annotated[dict[str, Words], Needs(".format", ("messages", "sharegpt")), *_TEXT] = Field(default_factory=dict)
    """Your names of the roles user, assistant, system and tool, such as {assistant: [agent, helper]}."""
    template: Annotated[str | None, Needs(".format", ("custom",)), *_TEXT] = None
    """For `custom`: a prompt with {field} in it; the completion is the field `fields.completion` names."""
    template_without_input: Annotated[str | None, Needs(".template"), *_TEXT] = None
    """For `custom`: the prompt of records whose field `input` (or what `fields.input` names) is empty."""
    weight: Positive = 1.0
    """Weight of this source in a mix: 2.0 draws twice as many of its examples per example as 1.0."""
    max_samples: Annotated[PositiveInt | None, _UNMIXED] = None
    """Use no more than this many records of the source."""


class DatasetSection(SourceSection):
    """The text to learn, and the text held out to measure with."""

    mix: Annotated[tuple[SourceSection, ...], Field(max_length=1000)] = ()
    """Several sources instead of `path`, each with its weight."""
    evaluation: SourceSection | None = None
    """A held-out source of its own, instead of `val_split`."""
    val_split: Annotated[float, Field(ge=0.0, le=0.5), BeforeValidator(_fraction)] = 0.0
    """Fraction of the records held out for evaluation."""
    max_length: Annotated[int, Field(ge=1, le=2**24), _LANGUAGE] = 2048
    """Longest sequence in tokens; longer ones are cut at the end and counted. With packing, the length of a pack."""
    too_long: Annotated[Literal["cut", "drop", "split"], _LANGUAGE] = "cut"
    """What becomes of a document longer than max_length: cut at its end, left out, or `split` into several. `split` is
    for texts without a prompt, every token learnt once; all else is then cut."""
    packing: Annotated[bool, _LANGUAGE] = False
    """Put several documents into one sequence, each blind to the others, positions restarting."""
    batching: Annotated[Literal["samples", "tokens"], _LANGUAGE] = "samples"
    """How sequences that are not packed come to micro-batches. `samples`: batch_size at a time, in the shuffled order.
    `tokens`: sequences of like length together, each micro-batch of a step about as many tokens; the global batch stays
    the same, and little is padded."""
    train_on: Annotated[Words, _LANGUAGE] = ("assistant",)
    """Roles whose turns carry loss: assistant, user, system, tool, or `all`."""
    system_prompt: Annotated[str | None, _LANGUAGE] = None
    """System turn put before conversations that have none."""
    chat_template: Annotated[TemplateText | None, _LANGUAGE] = None
    """A Jinja chat template, or the path of a file with one, instead of the tokenizer's own."""
    streaming: Annotated[bool, _LANGUAGE] = False
    """Read and tokenise on the fly, for sets larger than memory; needs training.max_steps."""
    shuffle: bool = True
    """A new order every epoch, drawn from `seed`."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that tokenise before training."""
    cache_dir: PathText = Field("~/.cache/zerolora/datasets", validate_default=True)
    """Folder for tokenised data, found again by content."""
