"""Define the settings for training and held-out data. A field's docstring is its user documentation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer.config.needs import HUB, LANGUAGE, Needs
from trainer.config.paths import LocalText, PathText, TemplateText
from trainer.config.types import Positive, PositiveInt, Section, StringList

_UNMIXED, _FROM_HUB = Needs(".mix", ((),)), Needs(".path", (HUB,))
_TEXT = (_UNMIXED, LANGUAGE)


def _check_fraction_or_count(value: Any) -> Any:
    """Raise ValueError unless the value is a fraction of at most 0.5 or a whole number."""
    if isinstance(value, (int, float)) and value > 0.5 and (value < 1 or value % 1 != 0):
        raise ValueError("must be a fraction of the records up to 0.5, or a whole number of records")
    return value


def _check_names(value: Any) -> Any:
    """Raise ValueError for `{prompt:ticket}`, which YAML parses as one key without a value."""
    for name in value if isinstance(value, dict) else ():
        key, colon, field = str(name).partition(":")
        if colon and value[name] is None:
            raise ValueError(f"needs a space after the colon; write {{{key}: {field}}}")
    return value


class SourceSection(Section):
    """A source of examples."""

    path: PathText | None = None
    """A .jsonl, .json, .parquet, .csv or .txt file, a folder of such files, the URL of either on an object store, such
    as s3://bucket/data, or the Hub ID of a dataset."""
    name: Annotated[str | None, _FROM_HUB, _UNMIXED] = None
    """Configuration (subset) of a Hub dataset."""
    revision: Annotated[str | None, _FROM_HUB, _UNMIXED] = None
    """Branch, tag or commit of a Hub dataset."""
    data_files: Annotated[StringList, _UNMIXED] = ()
    """Names or patterns (part-*.jsonl) of the files to read from a folder or Hub dataset; default: all files."""
    split: Annotated[str, _UNMIXED] = "train"
    """Split of a Hub dataset or of a folder that has splits."""
    format: Annotated[Literal[
        "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "completion", "custom", "preference", "unpaired",
    ], *_TEXT] = "auto"  # fmt: skip
    """Format of the records; `auto` detects it from the field names and reports it."""
    fields: Annotated[dict[str, str], BeforeValidator(_check_names), _UNMIXED] = Field(default_factory=dict)
    """Names of the format's fields in your records, such as {prompt: question, completion: answer}."""
    roles: Annotated[
        dict[str, StringList],
        BeforeValidator(_check_names),
        Needs(".format", ("messages", "sharegpt", "preference", "unpaired")),
        *_TEXT,
    ] = Field(default_factory=dict)
    """Names of the roles user, assistant, system and tool in your records, such as {assistant: [agent, helper]}."""
    template: Annotated[str | None, Needs(".format", ("custom",)), *_TEXT] = None
    """For `custom`: a prompt with {field} placeholders; `fields.completion` names the field of the completion."""
    template_without_input: Annotated[str | None, Needs(".template"), *_TEXT] = None
    """For `custom`: the prompt for records with an empty field `input` (or the one named by `fields.input`)."""
    text_mode: Annotated[Literal["line", "paragraph", "file"], *_TEXT] = "line"
    """How to split a .txt or .md file into records: by line, by paragraph (separated by blank lines), or not at all
    (`file`). Blank lines are not records."""
    weight: Positive = 1.0
    """Weight of this source in a mix: with 2.0 each example is drawn twice as often as with 1.0."""
    max_samples: Annotated[PositiveInt | None, _UNMIXED] = None
    """Maximum number of records to use."""


class DatasetSection(SourceSection):
    """Training data and held-out data."""

    mix: Annotated[tuple[SourceSection, ...], Field(max_length=1000)] = ()
    """Several weighted sources, instead of `path`."""
    evaluation: SourceSection | None = None
    """A separate held-out source, instead of `val_split`."""
    val_split: Annotated[float, Field(ge=0.0, le=1e9), BeforeValidator(_check_fraction_or_count)] = 0.0
    """Records held out for evaluation: a fraction up to 0.5, or a number (1 or more)."""
    on_bad_record: Annotated[Literal["stop", "skip"], LANGUAGE] = "stop"
    """How to handle records that cannot be read or do not match their format. `stop`: save a checkpoint if training has
    started, and exit with code 2. `skip`: skip and count such records."""
    max_length: Annotated[int, Field(ge=1, le=2**24), LANGUAGE] = 2048
    """Maximum length of a sequence in tokens; longer sequences are cut at the end and counted. With packing, the length
    of a packed sequence. The default is the model's context length if that is shorter."""
    too_long: Annotated[Literal["cut", "drop", "split"], LANGUAGE] = "cut"
    """How to handle documents longer than max_length: `cut` at the end, `drop`, or `split` into several. `split`
    applies to texts without a prompt and trains every token once; all other documents are then cut."""
    min_pixels: Annotated[Annotated[int, Field(ge=1, le=50_000_000)] | None, LANGUAGE] = None
    """Minimum size of an image in pixels (width x height); smaller images are scaled up. For models that accept images
    of any size, such as Qwen2.5-VL; default: the processor's value."""
    max_pixels: Annotated[PositiveInt | None, LANGUAGE] = None
    """Maximum size of an image in pixels; larger images are scaled down, for the same models as `min_pixels`. In
    Qwen2.5-VL a token covers 28 x 28 pixels."""
    packing: Annotated[bool, LANGUAGE] = False
    """Pack several documents into one sequence; attention, recurrent states and positions stay separate."""
    batching: Annotated[Literal["samples", "tokens"], LANGUAGE] = "samples"
    """How to batch sequences without packing. `samples`: batch_size sequences per micro-batch, in shuffled order.
    `tokens`: group sequences of similar length, with about the same number of tokens in each micro-batch of a step,
    to reduce padding; the global batch stays the same."""
    train_on: Annotated[StringList, LANGUAGE] = ("assistant",)
    """Roles to train on: assistant, user, system, tool; `last`: only the last assistant turn; `all`: the whole text."""
    thinking: Annotated[Literal["train", "mask", "strip", "empty"], LANGUAGE] = "train"
    """How to handle reasoning in assistant turns. `train`: train on it as the chat template writes it; `mask`: keep it
    and its tags, but do not train on it; `strip`: remove it; `empty`: remove it, and begin answers with the template's
    empty thinking block (`enable_thinking: false`), in training and generation."""
    system_prompt: Annotated[str | None, LANGUAGE] = None
    """System prompt for records without one: the first turn of a conversation, or the first lines of a text prompt. A
    system turn in a record's list of turns takes precedence over its `system` field."""
    chat_template: Annotated[TemplateText | None, LANGUAGE] = None
    """A Jinja chat template, or the path of a file that contains one, to use instead of the tokenizer's."""
    chat_template_kwargs: Annotated[dict[str, Any], LANGUAGE] = Field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false}, in training and generation."""
    streaming: Annotated[bool, LANGUAGE] = False
    """Read and tokenize during training, for datasets larger than memory; needs training.max_steps."""
    shuffle: bool = True
    """Shuffle the data in every epoch, using `seed`."""
    workers: Annotated[int, Field(ge=1, le=64), Needs(".streaming", (False,))] = 1
    """Number of processes that tokenize the data before training."""
    cache_dir: LocalText = Field("~/.cache/zerolora/datasets", validate_default=True)
    """Folder for tokenized data, which is reused while the content is unchanged."""
