"""Encode records as tokenized documents: detect the source's format once, then parse, render, mask and truncate."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import xxhash
from transformers import PreTrainedTokenizerBase

from trainer.config import DatasetSection, SourceSection, UserError
from trainer.config.errors import to_text
from trainer.config.yaml_core import read_yaml
from trainer.contract.known_versions import replaces
from trainer.data.conversations import RECORD_WARNINGS, ChatEncoder, build_template_variables, load_chat_template
from trainer.data.formats import PREFERENCE, UNPAIRED, RecordFormat, detect_format, join_names
from trainer.data.markers import strip_reasoning
from trainer.data.pairs import LabeledAnswer, Pair, join_labeled_answers, join_pair, read_pair, read_unpaired
from trainer.data.records import Conversation, PlainText, find_prompt_format, flag_nonempty_answers, read_record
from trainer.data.source_files import describe_source
from trainer.data.sources import read_source
from trainer.data.text_files import describe_record, parse_row
from trainer.data.tokens import EncodedDocument, detect_bos_token_id, encode_texts
from trainer.data.vision import ImageReader

if TYPE_CHECKING:
    from datasets import Dataset

_COLUMNS: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("columns.yaml")).tree
LISTS, VALUES = _COLUMNS["lists"], _COLUMNS["values"]
"""Column types of tokenized documents; columns.yaml describes the columns."""
ENCODING_BATCH_SIZE = 512
Example = Conversation | PlainText | Pair | LabeledAnswer
# A token to predict, and the token before it.
MIN_PART_TOKENS = 2


@dataclass(frozen=True)
class SourceReport:
    label: str
    format: RecordFormat
    skipped: int
    notes: tuple[str, ...]
    prompt_text: str | None
    """Format string for text prompts (see `find_prompt_format`); None for conversations."""


class DocumentEncoder:
    """Encodes records of any format with one tokenizer and one set of masking rules; can be pickled for workers.

    Raises UserError for a tokenizer that does not report the offsets of its tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, section: DatasetSection, image_reader: ImageReader | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"model.tokenizer={tokenizer.name_or_path}: is a slow tokenizer, which does not return character "
                "offsets of tokens; use a fast tokenizer"
            )
        self.tokenizer, self.images = tokenizer, image_reader
        self.max_length = section.max_length
        self.too_long = section.too_long
        self.train_on = frozenset("assistant" if role == "last" else role for role in section.train_on)
        self._only_last = "last" in section.train_on
        self._strips = section.thinking in ("strip", "empty")
        template = load_chat_template(tokenizer, section.chat_template)
        self.chat = None
        if template:
            for_tools = load_chat_template(tokenizer, section.chat_template, for_tools=True)
            if section.thinking == "empty" and "enable_thinking" not in template:
                raise UserError("dataset.thinking=empty: the chat template has no enable_thinking variable; use strip")
            self.chat = ChatEncoder(
                tokenizer,
                template,
                tuple(self.train_on),
                section.system_prompt,
                build_template_variables(section),
                for_tools,
                mask_reasoning=section.thinking == "mask",
                image_reader=image_reader,
                setting=section.chat_template,
            )
        self.system_prompt = section.system_prompt
        self.skips_bad_records = section.on_bad_record == "skip"
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._bos_id = detect_bos_token_id(tokenizer)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def detect_format(
        self, source: SourceSection, rows: Sequence[Mapping[str, Any]], label: str
    ) -> tuple[RecordFormat, dict[str, Any]]:
        """Detect a source's format from its first rows; return the format and each field's first value.

        Raises UserError if no format matches, or if a row cannot be read. With `skips_bad_records`, unreadable rows
        are ignored unless all of them are unreadable.
        """
        records = []
        for row in rows:
            with suppress(UserError) if self.skips_bad_records else nullcontext():
                records.append(parse_row(row))
        records = records or [parse_row(row) for row in rows]
        # The first record may lack a field that decides the format, such as a label.
        first = {name: value for record in reversed(records) for name, value in record.items() if value is not None}
        fields = dict.fromkeys(name for record in records for name in record)
        fmt = detect_format(source, list(fields), first, label, has_chat_template=self.chat is not None)
        return replace(fmt, supports_images=self.images is not None), first

    def encode_rows(
        self, rows: Sequence[Mapping[str, Any]], first_index: int, fmt: RecordFormat, label: str
    ) -> dict[str, list[Any]]:
        """Return the columns (columns.yaml) for consecutive rows of a source. `first_index`: that of the first row."""
        origins = [describe_record(label, number, row) for number, row in enumerate(rows, start=first_index + 1)]
        try:
            return self._encode_columns(rows, fmt, origins)
        except UserError:
            if not self.skips_bad_records:
                raise
        problems: dict[str, str] = {}
        for row, origin in zip(rows, origins, strict=True):
            try:
                self._encode_columns([row], fmt, [origin])
            except UserError as error:
                problems[origin] = str(error)
        good = [(row, origin) for row, origin in zip(rows, origins, strict=True) if origin not in problems]
        columns = self._encode_columns([row for row, _ in good], fmt, [origin for _, origin in good])
        for problem in problems.values():
            for name, column in columns.items():
                column.append([] if name in LISTS else {"bool": False, "string": problem}.get(VALUES[name], 0))
        return columns

    def _encode_columns(
        self, records: Sequence[Mapping[str, Any]], fmt: RecordFormat, origins: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Return the same columns as `encode_rows`, but always raise UserError for a bad record."""
        columns: dict[str, list[Any]] = {name: [] for name in (*LISTS, *VALUES)}
        read: Callable[..., Any] = {PREFERENCE: read_pair, UNPAIRED: read_unpaired}.get(fmt.name, read_record)
        examples: list[Any] = []
        example_origins: list[str] = []
        for record, origin in zip(records, origins, strict=True):
            example = read(parse_row(record), fmt, origin, self.system_prompt)
            for each in example if isinstance(example, list) else [example]:
                examples.append(self._apply_settings(each))
                example_origins.append(origin)
        for example, document, continued in self._split(examples, self.encode_examples(examples, example_origins)):
            for name, value in self._build_row(example, document, continued).items():
                columns[name].append(value)
        return columns

    def _build_row(self, example: Example, document: EncodedDocument, continued: bool) -> dict[str, Any]:
        if isinstance(example, Pair):
            sides = [example.chosen, example.rejected]
        else:
            sides = [example.answer if isinstance(example, LabeledAnswer) else example]
        answers = [answer for side in sides for answer in flag_nonempty_answers(side, self.train_on)]
        turns = [turn for side in sides if isinstance(side, Conversation) for turn in side.messages]
        weights = document.loss_weights[: self.max_length]
        trained = [weight > 0 for weight in weights]
        too_long = len(document.input_ids) > self.max_length
        image_ids = frozenset(self.images.token_ids if self.images and document.images else ())
        # Answers in pairs and image tokens are never cut. Instead, the document has no targets and is dropped.
        is_dropped = too_long and (self.too_long == "drop" or document.rejected_tokens > 0)
        is_dropped |= not image_ids.isdisjoint(document.input_ids[self.max_length :])
        content = b"".join([np.asarray(document.input_ids, np.int32).tobytes(), *document.images])
        return {
            "input_ids": document.input_ids[: self.max_length],
            "trained": trained,
            "weights": weights if set(weights) - {0.0, 1.0} else [],
            "unread": [] if continued else [*example.unused_fields, *document.warnings],
            "images": document.images,
            "length": len(weights),
            "image_tokens": sum(token in image_ids for token in document.input_ids),
            "rejected": document.rejected_tokens,
            "margin": example.margin if isinstance(example, Pair) else 0.0,
            "label": (1 if example.is_desirable else -1) if isinstance(example, LabeledAnswer) else 0,
            "targets": 0 if is_dropped else sum(trained[1:]),
            "truncated": too_long or document.is_truncated,
            "answers": len(answers),
            "empty": answers.count(False),
            "digest": xxhash.xxh3_64_intdigest(content) - 2**63,
            "continued": continued,
            "control": any(self._special.search(str(turn["content"])) for turn in turns),
            "problem": None,
        }

    def _apply_settings(self, example: Example) -> Any:
        """Strip reasoning from conversations, and train only on their last answer, as configured."""
        if isinstance(example, Pair):
            chosen, rejected = map(self._apply_settings, (example.chosen, example.rejected))
            return replace(example, chosen=chosen, rejected=rejected)
        if isinstance(example, LabeledAnswer):
            return replace(example, answer=self._apply_settings(example.answer))
        if not isinstance(example, Conversation):
            return example
        messages, weights = example.messages, dict(example.weights)
        if self._strips:
            messages = [strip_reasoning(message) for message in messages]
        if self._only_last:
            answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
            weights |= dict.fromkeys(answers[:-1], 0.0)
        return replace(example, messages=messages, weights=weights)

    def build_report(self, label: str, fmt: RecordFormat, first_record: Mapping[str, Any], table: Any) -> SourceReport:
        problems = table.column("problem").drop_null().to_pylist()
        total = len(table.column("problem")) - pc.sum(table.column("continued")).as_py()
        if total == len(problems):
            raise UserError(problems[0])
        notes = [fmt.note]
        if self.system_prompt and fmt.name == "completion":
            notes.append(f"warning: {label}: texts have no prompt, so dataset.system_prompt is not used")
        flat = pc.list_flatten(table.column("unread"))
        rows = pc.list_parent_indices(table.column("unread"))
        records = np.cumsum(~table.column("continued").to_numpy())
        counts = pc.value_counts(flat).to_pylist()
        unread = {entry["values"]: entry["counts"] for entry in sorted(counts, key=lambda entry: -entry["counts"])}
        warnings = {phrase: unread.pop(phrase) for phrase in RECORD_WARNINGS if phrase in unread}
        if unread:
            names = join_names(f"{to_text(name, 30)} (in {count:,})" for name, count in unread.items())
            notes.append(f"{label}: unused fields in {total:,} records: {names}")
        for phrase, count in warnings.items():
            first = records[rows[pc.index(flat, phrase).as_py()].as_py()]
            notes.append(f"warning: {label}: {count:,} of {total:,} records have {phrase}; first: record {first:,}")
        if problems:
            notes.append(f"warning: {label}: {len(problems):,} of {total:,} records are skipped; first: {problems[0]}")
        text = find_prompt_format(fmt, first_record)
        if text is not None and self.chat is not None and fmt.name == "prompt_completion":
            fields = f"{{instruction: {fmt.names['prompt']}, output: {fmt.names['completion']}}}"
            notes.append(
                f"{label}: prompts are used as plain text, without the tokenizer's chat template, in training and "
                f"generation; to use the template, set {label}.format=alpaca and {label}.fields={fields}"
            )
        return SourceReport(label, fmt, len(problems), tuple(notes), text)

    def _split(
        self, examples: Sequence[Example], documents: Sequence[EncodedDocument]
    ) -> Iterator[tuple[Example, EncodedDocument, bool]]:
        """Yield each example with its document, or with the parts of its document if the text is split.

        With `too_long: split`, texts without a prompt are split into parts of `max_length` tokens. The third value
        yielded is whether the document belongs to the same record as the previous one. Each part starts with the
        last token of the previous part, so that every token except the first is a target exactly once.
        """
        for example, document in zip(examples, documents, strict=True):
            is_text = isinstance(example, PlainText) and not example.prompt
            if self.too_long != "split" or not is_text or self.max_length < MIN_PART_TOKENS:
                yield example, document, isinstance(example, LabeledAnswer) and example.is_second_answer
                continue
            ids, weights = document.input_ids, document.loss_weights
            for at in range(0, max(1, len(ids) - 1), self.max_length - 1):
                part = slice(at, at + self.max_length)
                yield example, EncodedDocument(ids[part], weights[part]), at > 0

    def encode_examples(self, examples: Sequence[Example], origins: Sequence[str]) -> list[EncodedDocument]:
        """Tokenize the examples, and return one document for each, in order.

        For pairs and labeled answers, a document contains two answers, and its prompts are truncated if it exceeds
        `max_length`. No other document is truncated.
        """
        labeled = [example for example in examples if isinstance(example, LabeledAnswer)]
        if labeled:
            answers = self.encode_examples([each.answer for each in labeled], origins)
            return join_labeled_answers(answers, [each.is_desirable for each in labeled], self.max_length, self._bos_id)
        pairs = [example for example in examples if isinstance(example, Pair)]
        if pairs:
            sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
            answers = self.encode_examples(sides, [origin for origin in origins for _ in range(2)])
            answer_pairs = zip(answers[::2], answers[1::2], strict=True)
            return [join_pair(chosen, rejected, self.max_length, self._bos_id) for chosen, rejected in answer_pairs]
        encoded: dict[int, EncodedDocument] = {}
        chats = {at: example for at, example in enumerate(examples) if isinstance(example, Conversation)}
        texts = {at: example for at, example in enumerate(examples) if isinstance(example, PlainText)}
        if chats:
            if self.chat is None:
                raise UserError(
                    f"{origins[min(chats)]}: is a conversation, but the tokenizer has no chat template; set "
                    "dataset.chat_template to a Jinja template, or model.tokenizer to a chat model"
                )
            documents = self.chat.encode(list(chats.values()), [origins[at] for at in chats])
            encoded.update(zip(chats, documents, strict=True))
        if texts:
            documents = encode_texts(self.tokenizer, list(texts.values()), self.train_on, [origins[at] for at in texts])
            encoded.update(zip(texts, documents, strict=True))
        return [encoded[at] for at in range(len(examples))]


@replaces("`os.environ` after `Dataset.map`")
def encode_source(
    source: SourceSection, label: str, encoder: DocumentEncoder, *, workers: int, file: Path
) -> "tuple[Dataset, SourceReport]":
    """Return a source's documents, memory-mapped from `file` (or a file per worker next to it), and a report on them.

    Raises UserError for the first record that cannot be read, unless bad records are skipped.
    """
    from datasets import Dataset, Features, List, Value

    columns = {name: List(Value(kind)) for name, kind in LISTS.items()}
    columns |= {name: Value(kind) for name, kind in VALUES.items()}
    scratch = file.with_suffix(".records")
    records = read_source(source, label, scratch=scratch)
    assert isinstance(records, Dataset)
    fmt, first = encoder.detect_format(source, list(records.take(ENCODING_BATCH_SIZE)), label)
    environment, count = os.environ, min(workers, len(records))
    # With a handler installed, CPython loses a signal that reaches a forked worker before its first instruction. A pool
    # that terminates its workers because one has failed would then wait forever.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL) if count > 1 else None
    try:
        documents = records.map(
            _encode_batch,
            batched=True,
            batch_size=ENCODING_BATCH_SIZE,
            with_indices=True,
            remove_columns=records.column_names,
            features=Features(columns),
            fn_kwargs={"encoder": encoder, "fmt": fmt, "label": describe_source(source, label)},
            num_proc=count if count > 1 else None,
            cache_file_name=str(file),
            new_fingerprint=file.stem,
            desc=f"tokenizing {source.path}",
        )
    finally:
        # With several workers, datasets replaces os.environ with a copy, while other code still uses the original.
        os.environ = environment  # noqa: B003 (restores the object, not its contents)
        if count > 1:
            signal.signal(signal.SIGTERM, handler)
        del records
        shutil.rmtree(scratch, ignore_errors=True)
    return documents, encoder.build_report(label, fmt, first, documents.data)


def _encode_batch(
    batch: Mapping[str, list[Any]], indices: list[int], encoder: DocumentEncoder, fmt: RecordFormat, label: str
) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return encoder.encode_rows(rows, indices[0], fmt, label)
