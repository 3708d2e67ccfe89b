"""The settings of the text that is learnt and held out; the text under a field is its documentation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer.config.needs import HUB, Needs
from trainer.config.paths import PathText, TemplateText
from trainer.config.types import Positive, PositiveInt, Section, Words

_LANGUAGE, _UNMIXED, _FROM_HUB = Needs("task", ("language",)), Needs(".mix", ((),)), Needs(".path", (HUB,))
_TEXT = (_UNMIXED, _LANGUAGE)


def _fraction_or_count(value: Any) -> Any:
    """Accept a fraction of the records up to 0.5, or a whole number of records."""
    if isinstance(value, (int, float)) and value > 0.5 and (value < 1 or value % 1 != 0):
        raise ValueError("must be 0.5 or less, a fraction of the records, or a whole number of them")
    return value


def _names(value: Any) -> Any:
    """Point out `{prompt:ticket}`, which YAML reads as one key without a value."""
    for name in value if isinstance(value, dict) else ():
        ours, colon, theirs = str(name).partition(":")
        if colon and value[name] is None:
            raise ValueError(f"needs a space after the colon; write {{{ours}: {theirs}}}")
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
    fields: Annotated[dict[str, str], BeforeValidator(_names), _UNMIXED] = Field(default_factory=dict)
    """Your names for a format's fields, such as {prompt: question, completion: answer}."""
    roles: Annotated[dict[str, Words], BeforeValidator(_names), Needs(".format", ("messages", "sharegpt")), *_TEXT] = (
        Field(default_factory=dict)
    )
    """Your names of the roles user, assistant, system and tool, such as {assistant: [agent, helper]}."""
    template: Annotated[str | None, Needs(".format", ("custom",)), *_TEXT] = None
    """For `custom`: a prompt with {field} in it; the completion is the field `fields.completion` names."""
    template_without_input: Annotated[str | None, Needs(".template"), *_TEXT] = None
    """For `custom`: the prompt of records whose field `input` (or what `fields.input` names) is empty."""
    text_mode: Annotated[Literal["line", "paragraph", "file"], *_TEXT] = "line"
    """What becomes a record in a .txt or .md file: each line, each paragraph (blank lines separate them), or the file.
    Blank lines are not records."""
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
    val_split: Annotated[float, Field(ge=0.0, le=1e9), BeforeValidator(_fraction_or_count)] = 0.0
    """Records held out for evaluation: a fraction up to 0.5 of them, or their number (1 or more)."""
    on_bad_record: Annotated[Literal["stop", "skip"], _LANGUAGE] = "stop"
    """What to do with a record that cannot be read or does not fit its format. `stop` ends the run with exit code 2; a
    run that is training saves a checkpoint first. `skip` leaves such records out and counts them."""
    max_length: Annotated[int, Field(ge=1, le=2**24), _LANGUAGE] = 2048
    """Longest sequence in tokens; longer ones are cut at the end and counted. With packing, the length of a pack. The
    default is the model's context where that is shorter."""
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
    """System prompt of records that have none of their own: a turn of conversations, the first lines of prompts that
    are text. A system turn in a record's list of turns takes precedence over its `system` field."""
    chat_template: Annotated[TemplateText | None, _LANGUAGE] = None
    """A Jinja chat template, or the path of a file with one, instead of the tokenizer's own."""
    chat_template_kwargs: Annotated[dict[str, Any], _LANGUAGE] = Field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false}, in training and in generation."""
    streaming: Annotated[bool, _LANGUAGE] = False
    """Read and tokenise on the fly, for sets larger than memory; needs training.max_steps."""
    shuffle: bool = True
    """A new order every epoch, drawn from `seed`."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that tokenise before training."""
    cache_dir: PathText = Field("~/.cache/zerolora/datasets", validate_default=True)
    """Folder for tokenised data, found again by content."""
