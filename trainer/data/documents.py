"""Records to tokenised documents: a source's shape is found once, then batches are read, templated, masked and cut."""

import gc
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from trainer.config import DatasetSection, SourceSection, UserError
from trainer.data.conversations import ChatEncoder, chat_template_of
from trainer.data.forked_workers import ended_by_sigterm
from trainer.data.formats import Shape, find_shape
from trainer.data.records import Text, Turns, answers_of, read_record
from trainer.data.source_files import where_from
from trainer.data.sources import read_source
from trainer.data.text_files import record_of
from trainer.data.tokens import Encoded, encode_texts

if TYPE_CHECKING:
    from datasets import Dataset

# One row a record, or several of a text that is split, all but the first of which are `continued`. `length` and
# `targets` are of what is left of it; `first_target` says how many tokens of the whole document must stay for one
# target to be among them, 0 if it has none. `answers` it has, `empty` ones among them; `digest` is equal for equal
# documents.
LISTS = {"input_ids": "int32", "trained": "bool"}
VALUES = {
    "length": "int32",
    "targets": "int32",
    "first_target": "int32",
    "truncated": "bool",
    "answers": "int32",
    "empty": "int32",
    "digest": "int64",
    "continued": "bool",
}
ROWS_AT_ONCE = 512
# A token to predict, and one to predict it from.
SHORTEST_PART = 2


class DocumentEncoder:
    """Encodes records of any format with one tokenizer and one set of masking rules; travels to worker processes.

    Raises UserError for a tokenizer that does not say where in the text its tokens stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: DatasetSection) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"model.tokenizer={tokenizer.name_or_path}: has no fast version, which says where in a text each token "
                "stands; name a tokenizer that has one"
            )
        self.tokenizer = tokenizer
        self.max_length = section.max_length
        self.too_long = section.too_long
        self.train_on = frozenset(section.train_on)
        template = chat_template_of(tokenizer, section.chat_template)
        self.chat = ChatEncoder(tokenizer, template, section.train_on, section.system_prompt) if template else None

    def rows(self, records: Sequence[Mapping[str, Any]], first: int, shape: Shape, label: str) -> dict[str, list[Any]]:
        """The columns above for records, the first of which has the number `first` counted from 0."""
        where = [f"{label}, record {first + index + 1}" for index in range(len(records))]
        examples = [read_record(record, shape, place) for record, place in zip(records, where, strict=True)]
        documents = self.encode(examples, where)
        rows: dict[str, list[Any]] = {name: [] for name in (*LISTS, *VALUES)}
        for example, document, continued in self._split(examples, documents):
            answers = answers_of(example, self.train_on)
            # A document's first token has nothing before it to be predicted from.
            at = next((index for index, trained in enumerate(document.trained) if trained and index), 0)
            too_long = len(document.input_ids) > self.max_length
            rows["input_ids"].append(document.input_ids[: self.max_length])
            rows["trained"].append(document.trained[: self.max_length])
            rows["length"].append(min(len(document.input_ids), self.max_length))
            # What has no target is left out, here as in streams.
            left_out = too_long and self.too_long == "drop"
            rows["targets"].append(0 if left_out else sum(document.trained[1 : self.max_length]))
            rows["first_target"].append(at + 1 if at else 0)
            rows["truncated"].append(too_long)
            rows["answers"].append(len(answers))
            rows["empty"].append(sum(not answer for answer in answers))
            rows["digest"].append(xxhash.xxh3_64_intdigest(np.asarray(document.input_ids, np.int32).tobytes()) - 2**63)
            rows["continued"].append(continued)
        return rows

    def _split(
        self, examples: Sequence[Turns | Text], documents: Sequence[Encoded]
    ) -> Iterator[tuple[Turns | Text, Encoded, bool]]:
        """Documents with whether they go on with the one before: texts are cut into parts of max_length tokens.

        Each part begins with the last token of the one before, so that every token but the first is a target once.
        """
        for example, document in zip(examples, documents, strict=True):
            is_text = isinstance(example, Text) and not example.prompt
            if self.too_long != "split" or not is_text or self.max_length < SHORTEST_PART:
                yield example, document, False
                continue
            ids, trained = document.input_ids, document.trained
            for at in range(0, max(1, len(ids) - 1), self.max_length - 1):
                part = slice(at, at + self.max_length)
                yield example, Encoded(ids[part], trained[part]), at > 0

    def encode(self, examples: Sequence[Turns | Text], where: Sequence[str]) -> list[Encoded]:
        """Whole documents, in order; conversations and texts are each tokenised together."""
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


def encode_source(
    source: SourceSection, label: str, encoder: DocumentEncoder, *, workers: int, file: Path
) -> "tuple[Dataset, str]":
    """All documents of a source, written to `file` (one per worker beside it) and memory-mapped; and the format's note.

    Raises UserError for the first record that cannot be read.
    """
    from datasets import Dataset, Features, List, Value

    columns = {name: List(Value(kind)) for name, kind in LISTS.items()}
    columns |= {name: Value(kind) for name, kind in VALUES.items()}
    scratch = file.with_suffix(".records")
    records = read_source(source, label, scratch=scratch)
    assert isinstance(records, Dataset)
    first = [record_of(row) for row in records.take(ROWS_AT_ONCE)]
    shape = find_shape(source, fields_of(first), first[0], label, has_chat_template=encoder.chat is not None)
    environment = os.environ
    try:
        with ended_by_sigterm():
            documents = records.map(
                _encode_batch,
                batched=True,
                batch_size=ROWS_AT_ONCE,
                with_indices=True,
                remove_columns=records.column_names,
                features=Features(columns),
                fn_kwargs={"encoder": encoder, "shape": shape, "label": where_from(source, label)},
                num_proc=min(workers, len(records)) if workers > 1 else None,
                cache_file_name=str(file),
                new_fingerprint=file.stem,
                desc=f"tokenising {source.path}",
            )
    finally:
        # With several workers datasets replaces os.environ by a copy: others would keep reading the old one.
        os.environ = environment  # noqa: B003 (the very object, not its contents)
        del records
        shutil.rmtree(scratch, ignore_errors=True)
        if scratch.exists():
            # A network file system keeps files that are still mapped, and their folder with them.
            gc.collect()
            shutil.rmtree(scratch, ignore_errors=True)
    return documents, shape.note


def _encode_batch(
    batch: Mapping[str, list[Any]], indices: list[int], encoder: DocumentEncoder, shape: Shape, label: str
) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return encoder.rows([record_of(row) for row in rows], indices[0], shape, label)


def fields_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields that any of the records has, in the order of their appearance."""
    return list(dict.fromkeys(name for record in records for name in record))
