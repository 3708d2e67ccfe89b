"""Encoding of records as tokenized documents: find a source's format once, then read, template, mask and truncate."""

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
from trainer.config.errors import shown
from trainer.config.yaml_core import read_yaml
from trainer.contract.known_versions import replaces
from trainer.data.conversations import LOST, ChatEncoder, find_chat_template, template_variables
from trainer.data.formats import PREFERENCE, UNPAIRED, Shape, find_shape, listed
from trainer.data.marks import strip_reasoning
from trainer.data.pairs import Labelled, Pair, join_labelled, join_pair, read_pair, read_unpaired
from trainer.data.records import Text, Turns, find_answers, prompt_form, read_record
from trainer.data.source_files import describe_source
from trainer.data.sources import read_source
from trainer.data.text_files import parse_row
from trainer.data.tokens import Encoded, encode_texts, leading_token
from trainer.data.vision import ImageReader

if TYPE_CHECKING:
    from datasets import Dataset

_COLUMNS: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("columns.yaml")).tree
LISTS, VALUES = _COLUMNS["lists"], _COLUMNS["values"]
"""Types of the columns of tokenized documents, which columns.yaml describes."""
ROWS_AT_ONCE = 512
Example = Turns | Text | Pair | Labelled
# A token to predict and one before it.
SHORTEST_PART = 2


@dataclass(frozen=True)
class SourceReport:
    """Facts about a source."""

    shape: Shape
    skipped: int
    notes: tuple[str, ...]
    prompt_text: str | None
    """Form of its prompts as text (see `prompt_form`); None for conversations."""


class DocumentEncoder:
    """Encoder of records of any format with one tokenizer and one set of masking rules; can be pickled for workers.

    Raises UserError for a tokenizer without the offsets of its tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, section: DatasetSection, images: ImageReader | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"model.tokenizer={tokenizer.name_or_path}: has no fast version, which gives the positions of tokens "
                "in the text; use a tokenizer that has one"
            )
        self.tokenizer, self.images = tokenizer, images
        self.max_length = section.max_length
        self.too_long = section.too_long
        self.train_on = frozenset("assistant" if role == "last" else role for role in section.train_on)
        self._only_last = "last" in section.train_on
        self._strips = section.thinking in ("strip", "empty")
        template = find_chat_template(tokenizer, section.chat_template)
        self.chat = None
        if template:
            for_tools = find_chat_template(tokenizer, section.chat_template, for_tools=True)
            variables, masks = template_variables(section), section.thinking == "mask"
            if section.thinking == "empty" and "enable_thinking" not in template:
                raise UserError("dataset.thinking=empty: the chat template has no enable_thinking; use strip")
            self.chat = ChatEncoder(
                tokenizer,
                template,
                tuple(self.train_on),
                section.system_prompt,
                variables,
                for_tools,
                mask_thoughts=masks,
                images=images,
            )
        self.system_prompt = section.system_prompt
        self.skips = section.on_bad_record == "skip"
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._first = leading_token(tokenizer)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def find_shape(
        self, source: SourceSection, rows: Sequence[Mapping[str, Any]], label: str
    ) -> tuple[Shape, dict[str, Any]]:
        """Return a source's format by its first rows, and its first record. Raises UserError if none is readable."""
        records = []
        for row in rows:
            with suppress(UserError) if self.skips else nullcontext():
                records.append(parse_row(row))
        records = records or [parse_row(row) for row in rows]
        fields = list(dict.fromkeys(name for record in records for name in record))
        return find_shape(source, fields, records[0], label, has_chat_template=self.chat is not None), records[0]

    def rows(self, rows: Sequence[Mapping[str, Any]], first: int, shape: Shape, label: str) -> dict[str, list[Any]]:
        """Return the columns above for rows of a source, starting at record `first`, counted from 0."""
        where = [f"{label}, record {first + index + 1}" for index in range(len(rows))]
        try:
            return self._columns(rows, shape, where)
        except UserError:
            if not self.skips:
                raise
        problems: dict[str, str] = {}
        for row, place in zip(rows, where, strict=True):
            try:
                self._columns([row], shape, [place])
            except UserError as error:
                problems[place] = str(error)
        good = [(row, place) for row, place in zip(rows, where, strict=True) if place not in problems]
        columns = self._columns([row for row, _ in good], shape, [place for _, place in good])
        for problem in problems.values():
            for name, column in columns.items():
                column.append([] if name in LISTS else {"bool": False, "string": problem}.get(VALUES[name], 0))
        return columns

    def _columns(
        self, records: Sequence[Mapping[str, Any]], shape: Shape, where: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Return the columns of some rows of a source. Raises UserError for a bad record."""
        rows: dict[str, list[Any]] = {name: [] for name in (*LISTS, *VALUES)}
        read: Callable[..., Any] = {PREFERENCE: read_pair, UNPAIRED: read_unpaired}.get(shape.format, read_record)
        found = [
            read(parse_row(record), shape, place, self.system_prompt)
            for record, place in zip(records, where, strict=True)
        ]
        several = [each if isinstance(each, list) else [each] for each in found]
        examples = [self._prepare(example) for each in several for example in each]
        where = [place for place, each in zip(where, several, strict=True) for _ in each]
        for example, place in zip(examples, where, strict=True):
            self._check_images(example, place)
        image_ids = frozenset(self.images.token_ids if self.images else ())
        for example, document, continued in self._split(examples, self.encode(examples, where)):
            sides = [example.chosen, example.rejected] if isinstance(example, Pair) else [example]
            sides = [each.answer if isinstance(each, Labelled) else each for each in sides]
            answers = [answer for side in sides for answer in find_answers(side, self.train_on)]
            too_long = len(document.input_ids) > self.max_length
            rows["input_ids"].append(document.input_ids[: self.max_length])
            weights = document.trained[: self.max_length]
            rows["trained"].append([weight > 0 for weight in weights])
            rows["weights"].append(weights if set(weights) - {0.0, 1.0} else [])
            rows["length"].append(min(len(document.input_ids), self.max_length))
            rows["rejected"].append(document.rejected)
            rows["margin"].append(example.margin if isinstance(example, Pair) else 0.0)
            rows["label"].append((1 if example.is_desirable else -1) if isinstance(example, Labelled) else 0)
            # Documents without targets are left out, as in streams; an answer of a pair is never cut.
            left_out = too_long and (self.too_long == "drop" or document.rejected > 0)
            # Nor are the tokens of an image.
            left_out |= bool(document.images) and not image_ids.isdisjoint(document.input_ids[self.max_length :])
            rows["images"].append(document.images)
            rows["image_tokens"].append(sum(each in image_ids for each in document.input_ids) if document.images else 0)
            rows["targets"].append(0 if left_out else sum(rows["trained"][-1][1:]))
            rows["truncated"].append(too_long or document.cut)
            rows["answers"].append(len(answers))
            rows["empty"].append(sum(not answer for answer in answers))
            content = b"".join([np.asarray(document.input_ids, np.int32).tobytes(), *document.images])
            rows["digest"].append(xxhash.xxh3_64_intdigest(content) - 2**63)
            rows["continued"].append(continued)
            turns = [turn for side in sides if isinstance(side, Turns) for turn in side.messages]
            rows["control"].append(any(self._special.search(str(turn["content"])) for turn in turns))
            rows["unread"].append([] if continued else [*example.unread, *document.lost])
            rows["problem"].append(None)
        return rows

    def _check_images(self, example: Example, where: str) -> None:
        """Raise UserError for images in one answer of a pair, or with a model that is not trained on images."""
        turns = example.answer if isinstance(example, Labelled) else example
        sides = [example.chosen, example.rejected] if isinstance(example, Pair) else [turns]
        if not any(isinstance(side, Turns) and side.images for side in sides):
            return
        if self.images is None:
            problem = "this model is not trained on images"
            fix = "use one of the table in docs/guide/vision.md, install what it names there, or remove the images"
            raise UserError(f"{where}: has images, and {problem}; {fix}")
        if len({side.images for side in sides if isinstance(side, Turns)}) > 1:
            raise UserError(f"{where}: chosen and rejected have different images; give those of the prompt alone")

    def _prepare(self, example: Example) -> Any:
        """Return a conversation without its reasoning, or only its last answer trained, as the settings say."""
        if isinstance(example, Pair):
            return replace(example, chosen=self._prepare(example.chosen), rejected=self._prepare(example.rejected))
        if isinstance(example, Labelled):
            return replace(example, answer=self._prepare(example.answer))
        if not isinstance(example, Turns):
            return example
        messages, weights = example.messages, dict(example.weights)
        if self._strips:
            messages = [strip_reasoning(message) for message in messages]
        if self._only_last:
            answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
            weights |= dict.fromkeys(answers[:-1], 0.0)
        return replace(example, messages=messages, weights=weights)

    def report(self, label: str, shape: Shape, first: Mapping[str, Any], rows: Any) -> SourceReport:
        """Return a report on a source from its first record and the columns of some or all records."""
        problems = rows.column("problem").drop_null().to_pylist()
        total = len(rows.column("problem")) - pc.sum(rows.column("continued")).as_py()
        if total == len(problems):
            raise UserError(problems[0])
        notes = [shape.note]
        counts = pc.value_counts(pc.list_flatten(rows.column("unread"))).to_pylist()
        found = {each["values"]: each["counts"] for each in sorted(counts, key=lambda each: -each["counts"])}
        lost = {phrase: found.pop(phrase) for phrase in LOST if phrase in found}
        if found:
            named = listed(f"{shown(name, 30)} (in {count:,})" for name, count in found.items())
            notes.append(f"{label}: fields that are not used, of {total:,} records: {named}")
        for phrase, count in lost.items():
            notes.append(f"warning: {label}: {count:,} of {total:,} records have {phrase}")
        if problems:
            notes.append(f"warning: {label}: {len(problems):,} of {total:,} records are skipped; first: {problems[0]}")
        text = prompt_form(shape, first)
        if text is not None and self.chat is not None and shape.format == "prompt_completion":
            fields = f"{{instruction: {shape.names['prompt']}, output: {shape.names['completion']}}}"
            notes.append(
                f"{label}: prompts are trained as text, without the tokenizer's chat template, and are asked the same "
                f"way; to train through the template set {label}.format=alpaca and {label}.fields={fields}"
            )
        return SourceReport(shape, len(problems), tuple(notes), text)

    def _split(
        self, examples: Sequence[Example], documents: Sequence[Encoded]
    ) -> Iterator[tuple[Example, Encoded, bool]]:
        """Yield documents and whether they continue the previous one: texts are split into parts of max_length tokens.

        Each part starts with the last token of the previous one, so that every token but the first is a target once.
        """
        for example, document in zip(examples, documents, strict=True):
            is_text = isinstance(example, Text) and not example.prompt
            if self.too_long != "split" or not is_text or self.max_length < SHORTEST_PART:
                yield example, document, isinstance(example, Labelled) and example.continued
                continue
            ids, trained = document.input_ids, document.trained
            for at in range(0, max(1, len(ids) - 1), self.max_length - 1):
                part = slice(at, at + self.max_length)
                yield example, Encoded(ids[part], trained[part]), at > 0

    def encode(self, examples: Sequence[Example], where: Sequence[str]) -> list[Encoded]:
        """Return whole documents, in order; conversations and texts are tokenized in one batch each."""
        labelled = [example for example in examples if isinstance(example, Labelled)]
        if labelled:
            answers = self.encode([each.answer for each in labelled], where)
            return join_labelled(answers, [each.is_desirable for each in labelled], self.max_length, self._first)
        pairs = [example for example in examples if isinstance(example, Pair)]
        if pairs:
            sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
            each = iter(self.encode(sides, [place for place in where for _ in range(2)]))
            return [join_pair(one, other, self.max_length, self._first) for one, other in zip(each, each, strict=True)]
        encoded: dict[int, Encoded] = {}
        chats = {at: example for at, example in enumerate(examples) if isinstance(example, Turns)}
        texts = {at: example for at, example in enumerate(examples) if isinstance(example, Text)}
        if chats:
            if self.chat is None:
                raise UserError(
                    f"{where[min(chats)]}: a conversation, and this tokenizer has no chat template; give "
                    "dataset.chat_template a Jinja text or file, or model.tokenizer one of an instruction-tuned model"
                )
            done = self.chat.encode(list(chats.values()), [where[at] for at in chats])
            encoded.update(zip(chats, done, strict=True))
        if texts:
            done = encode_texts(self.tokenizer, list(texts.values()), self.train_on, [where[at] for at in texts])
            encoded.update(zip(texts, done, strict=True))
        return [encoded[at] for at in range(len(examples))]


@replaces("`os.environ` after `Dataset.map`")
def encode_source(
    source: SourceSection, label: str, encoder: DocumentEncoder, *, workers: int, file: Path
) -> "tuple[Dataset, SourceReport]":
    """Return all documents of a source, memory-mapped from `file` (one per worker next to it), and a report on it.

    Raises UserError for the first record that cannot be read, unless bad records are skipped.
    """
    from datasets import Dataset, Features, List, Value

    columns = {name: List(Value(kind)) for name, kind in LISTS.items()}
    columns |= {name: Value(kind) for name, kind in VALUES.items()}
    scratch = file.with_suffix(".records")
    records = read_source(source, label, scratch=scratch)
    assert isinstance(records, Dataset)
    shape, first = encoder.find_shape(source, list(records.take(ROWS_AT_ONCE)), label)
    environment, count = os.environ, min(workers, len(records))
    # If a handler is installed, CPython loses a signal that reaches a forked worker before its first instruction, and
    # a pool that ends its workers because one has failed would wait forever.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL) if count > 1 else None
    try:
        documents = records.map(
            _encode_batch,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            with_indices=True,
            remove_columns=records.column_names,
            features=Features(columns),
            fn_kwargs={"encoder": encoder, "shape": shape, "label": describe_source(source, label)},
            num_proc=count if count > 1 else None,
            cache_file_name=str(file),
            new_fingerprint=file.stem,
            desc=f"tokenising {source.path}",
        )
    finally:
        # With several workers, datasets replaces os.environ by a copy: other code would keep using the old one.
        os.environ = environment  # noqa: B003 (the very object, not its contents)
        if count > 1:
            signal.signal(signal.SIGTERM, handler)
        del records
        shutil.rmtree(scratch, ignore_errors=True)
    return documents, encoder.report(label, shape, first, documents.data)


def _encode_batch(
    batch: Mapping[str, list[Any]], indices: list[int], encoder: DocumentEncoder, shape: Shape, label: str
) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return encoder.rows(rows, indices[0], shape, label)
