"""Group documents into samples (held-out split, mix weights, packing) and compute statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import Table
from pyarrow.types import is_primitive

from trainer.config import DatasetSection, SourceSection, UserError
from trainer.config.errors import format_count, to_text
from trainer.data.source_files import describe_source

# Fractions of documents above which the user is warned.
WARNING_THRESHOLD = 0.01
MANY_COPIES = 0.05
# Limits on a source's weight: repeats per document, and total number of documents (8 bytes each).
MAX_REPEATS = 1000
MAX_DOCUMENTS = 200_000_000

Sources = list[tuple[str, SourceSection]]
IntArray = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class DataStats:
    """Statistics for one pass over the data. Unless noted, counts cover the documents that are trained on.

    `records`: all records read. `truncated`: documents cut to max_length. `dropped`: records without a trained token,
    before or after truncation. `too_long`: records dropped because of their length. `empty`: empty `answers`
    (both without dropped records). `control`: conversations with special tokens in a turn's text. `copies`: documents
    equal to an earlier one or, in held-out data, to a training document.
    """

    records: int = 0
    documents: int = 0
    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    truncated: int = 0
    dropped: int = 0
    first_dropped: int = 0
    """Number of the first dropped record in the training data, counted from 1; 0 if none, or if sources are mixed."""
    too_long: int = 0
    answers: int = 0
    empty: int = 0
    control: int = 0
    copies: int = 0
    max_length: int = 0
    packed: bool = False
    pairs: int = 0
    """Number of documents that are pairs of a chosen and a rejected answer, or labeled answers."""
    desirable: int = 0
    undesirable: int = 0
    margins: int = 0
    """Number of pairs with a margin."""
    with_images: int = 0
    """Number of documents with images."""
    image_tokens: int = 0
    prompt_text: str | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of records skipped by `dataset.on_bad_record: skip`, per source."""
    formats: dict[str, str] = field(default_factory=dict)
    """Format of each source, by label (dataset, dataset.mix.0, dataset.evaluation)."""
    notes: tuple[str, ...] = ()
    evaluation: "DataStats | None" = None

    @property
    def trained_fraction(self) -> float:
        return self.target_tokens / self.tokens if self.tokens else 0.0

    @property
    def packing_efficiency(self) -> float:
        return self.tokens / (self.samples * self.max_length) if self.samples else 0.0

    def find_source(self, label: str, *formats: str) -> str:
        """Return the label of the first source below `label` that has one of these formats, such as dataset.mix.1."""
        sources = (name for name, format_ in self.formats.items() if name.startswith(label) and format_ in formats)
        return next(sources, label)

    def format_summary(self) -> list[str]:
        lines = [*self.notes, *(self._format_counts("train") if self.records else [])]
        lines += self.evaluation._format_counts("held out") if self.evaluation else []
        return lines + [f"warning: {warning}" for warning in self.list_warnings()]

    def list_warnings(self) -> list[str]:
        limit, held_out = f"dataset.max_length={self.max_length}", self.evaluation or DataStats()
        cut = " by removing the beginning of their prompts" * bool(self.pairs)
        leaks = "held-out documents are also in the training data, so the held-out loss is too low"
        problems = (
            (self.truncated, self.documents, WARNING_THRESHOLD, f"{self._unit}s are truncated to fit {limit}{cut}"),
            (self.dropped, self.records, WARNING_THRESHOLD, "records are dropped because they have no trained tokens"),
            (self.too_long, self.records, WARNING_THRESHOLD, f"records are dropped because they exceed {limit}"),
            (self.copies, self.documents, MANY_COPIES, "documents are exact copies of others"),
            (held_out.copies, held_out.documents, WARNING_THRESHOLD, leaks),
        )
        warnings = []
        if self.empty > WARNING_THRESHOLD * self.answers:
            warnings.append(f"{self.empty:,} of {self.answers:,} answers are empty; they teach the model not to answer")
        if self.control:
            warnings.append(
                f"{self.control:,} conversations have the tokenizer's special tokens in the text of a turn, which the "
                "model can mistake for the end of the turn; remove these tokens from the text"
            )
        parts = ((count / total, limit, text) for count, total, limit, text in problems if total)
        return warnings + [f"{part:.1%} of the {text}" for part, limit, text in parts if part > limit]

    @property
    def _unit(self) -> str:
        return "answer" if self.desirable + self.undesirable else "pair" if self.pairs else "document"

    def _format_counts(self, name: str) -> list[str]:
        packs = f" in {format_count(self.samples, 'pack')}, {self.packing_efficiency:.1%} full" if self.packed else ""
        losses = [f"{self.truncated:,} cut to {self.max_length:,} tokens"] if self.truncated else []
        losses += [f"{self.too_long:,} dropped (longer than {self.max_length:,} tokens)"] if self.too_long else []
        first = f", first: record {self.first_dropped:,}" * bool(self.first_dropped)
        losses += [f"{self.dropped:,} dropped (no trained tokens{first})"] if self.dropped else []
        return [
            f"{name}: {format_count(self.documents, self._unit)}{packs}, {format_count(self.tokens, 'token')}, "
            f"{self.target_tokens:,} of them trained ({self.trained_fraction:.1%})"
            + (f"; {self.with_images:,} with images ({self.image_tokens:,} image tokens)" if self.with_images else "")
            + "".join(f"; {loss}" for loss in losses)
        ]


def read_columns(documents: Table) -> Columns:
    """Return the numeric columns (columns.yaml) of a source's documents, and a column `skipped` for bad records."""
    numbers = [column.name for column in documents.schema if is_primitive(column.type)]
    skipped = pc.is_valid(documents.column("problem"))
    return {name: documents.column(name).to_numpy() for name in numbers} | {"skipped": skipped.to_numpy()}


@dataclass(frozen=True)
class Grouping:
    """A grouping of documents into samples: sample i has the documents `members[starts[i]:starts[i + 1]]`."""

    starts: IntArray
    members: IntArray


def group_documents(
    section: DatasetSection, sources: Sources, train: Sequence[Columns], evaluation: Sequence[Columns], seed: int
) -> tuple[Grouping, Grouping, DataStats]:
    """Return training samples, held-out samples and their statistics, given the columns of all documents.

    Records are held out before mix weights repeat them, so that no record is in both parts. Raises UserError if no
    record remains for training, if a part has no trained tokens, or if all answers in a source are empty.
    """
    generator = np.random.default_rng(seed)
    parts = [*train, *evaluation]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    total = sum(len(part["length"]) for part in train)
    # All parts of a split text are held out together.
    record = np.cumsum(~columns["continued"][:total]) - 1
    records = int(record[-1]) + 1 if total else 0
    is_held_record = np.zeros(records, dtype=bool)
    is_held_record[generator.permutation(records)[: count_held_out(section, records)]] = True
    is_held = is_held_record[record]
    members: list[IntArray] = []
    first = 0
    for (label, source), part in zip(sources, train, strict=True):
        if part["answers"].any() and part["empty"].sum() == part["answers"].sum():
            removed = f" with dataset.thinking={section.thinking}" * (section.thinking in ("strip", "empty"))
            raise UserError(
                f"{label}.path={to_text(source.path)}: all {part['answers'].sum():,} answers are empty{removed}; check "
                f"the records with `zerolora inspect`, or map the answer field in {label}.fields"
            )
        documents = np.arange(first, first + len(part["length"]))
        documents = documents[~is_held[documents] & (part["targets"] > 0)]
        repeats = section.mix and not section.streaming
        members.append(repeat_by_weight(documents, source.weight, generator, label) if repeats else documents)
        first += len(part["length"])
    held_out = np.concatenate([np.flatnonzero(is_held), np.arange(total, len(columns["length"]))])
    training, stats = _build_samples(section, columns, np.flatnonzero(~is_held), _concatenate(members), "dataset")
    held_out_members = held_out[columns["targets"][held_out] > 0]
    evaluating, held_out_stats = _build_samples(section, columns, held_out, held_out_members, "dataset.evaluation")
    trained = np.unique(columns["digest"][training.members])
    held_out_stats = replace(held_out_stats, copies=int(np.isin(columns["digest"][held_out_members], trained).sum()))
    return training, evaluating, replace(stats, evaluation=held_out_stats if len(held_out) else None)


def count_held_out(section: DatasetSection, total: int) -> int:
    """Return the number of records that `val_split` holds out. Raises UserError if none would remain for training."""
    if not section.val_split or not total:
        return 0
    count = int(section.val_split) or max(1, round(total * section.val_split))
    if count >= total:
        raise UserError(
            f"dataset.val_split={section.val_split:g}: none of {format_count(total, 'record')} would remain for "
            "training; hold out fewer, add data, or use dataset.evaluation"
        )
    return count


def repeat_by_weight(members: IntArray, weight: float, generator: np.random.Generator, label: str) -> IntArray:
    """Repeat members by weight, a random subset once more for its fraction. Raises UserError for extreme weights."""
    if weight > MAX_REPEATS or weight * len(members) > MAX_DOCUMENTS:
        limit = min(MAX_REPEATS, MAX_DOCUMENTS // max(1, len(members)))
        raise UserError(
            f"{label}.weight={weight:g}: would repeat each of the {len(members):,} records {weight:g} times; "
            f"use {limit} or less, or lower the other weights"
        )
    repeats = int(weight)
    extra = generator.permutation(len(members))[: round((weight - repeats) * len(members))]
    if len(members) and not repeats and not len(extra):
        fix = f"use {1 / len(members):.1g} or more, or remove the source"
        raise UserError(f"{label}.weight={weight:g}: selects none of the {len(members):,} records; {fix}")
    return _concatenate([members] * repeats + [members[np.sort(extra)]])


def _build_samples(
    section: DatasetSection, columns: Columns, records: IntArray, members: IntArray, label: str
) -> tuple[Grouping, DataStats]:
    if len(records) and not len(members):
        raise _build_no_targets_error(section, columns, records, label)
    record_columns = {name: column[records] for name, column in columns.items()}
    member_columns = {name: column[members] for name, column in columns.items()}
    too_long = record_columns["truncated"] & (record_columns["targets"] == 0)
    is_uncut = (record_columns["rejected"] > 0) | (record_columns["image_tokens"] > 0)
    too_long &= (section.too_long == "drop") | is_uncut
    dropped = (record_columns["targets"] == 0) & ~record_columns["skipped"] & ~too_long
    is_kept = record_columns["targets"] > 0
    # Parts of a split text count as one record.
    before_first = columns["continued"][: records[dropped.argmax()] + 1] if dropped.any() else np.ones(0, dtype=bool)
    unique = np.unique(members)  # repeats due to mix weights are intended
    if section.packing:
        packs = pack_best_fit(member_columns["length"], section.max_length)
        starts = np.concatenate([[0], np.cumsum([len(pack) for pack in packs], dtype=np.int64)]).astype(np.int64)
        grouping = Grouping(starts, _concatenate([members[pack] for pack in packs]))
    else:
        grouping = Grouping(np.arange(len(members) + 1), members)
    return grouping, DataStats(
        records=int((~record_columns["continued"]).sum()),
        documents=len(members),
        samples=len(grouping.starts) - 1,
        tokens=int(member_columns["length"].sum()),
        target_tokens=int(member_columns["targets"].sum()),
        dropped=int(dropped.sum()),
        first_dropped=0 if section.mix or label != "dataset" else int((~before_first).sum()),
        too_long=int(too_long.sum()),
        copies=len(unique) - len(np.unique(columns["digest"][unique])),
        max_length=section.max_length,
        packed=section.packing,
        pairs=int((member_columns["rejected"] > 0).sum()),
        desirable=int((member_columns["label"] > 0).sum()),
        undesirable=int((member_columns["label"] < 0).sum()),
        margins=int((member_columns["margin"] != 0).sum()),
        with_images=int((member_columns["image_tokens"] > 0).sum()),
        answers=int(record_columns["answers"][is_kept].sum()),
        empty=int(record_columns["empty"][is_kept].sum()),
        control=int(record_columns["control"].sum()),
        truncated=int(member_columns["truncated"].sum()),
        image_tokens=int(member_columns["image_tokens"].sum()),
    )


def _build_no_targets_error(section: DatasetSection, columns: Columns, records: IntArray, label: str) -> UserError:
    held_out = section.evaluation if label == "dataset.evaluation" else None
    source = describe_source(held_out or section, label if held_out else "dataset")
    where = "dataset.mix" if section.mix and not held_out else source
    if section.val_split and not held_out:
        where += f" {'left' if label == 'dataset' else 'held out'} by dataset.val_split={section.val_split:g}"
    count = f"{'first ' * (section.streaming and label == 'dataset')}{len(records):,} records of {where}"
    if not columns["truncated"][records].any():
        roles = ", ".join(section.train_on)
        renamed = any(source.roles for source in (section, *section.mix))
        fix = (
            f"{'correct dataset.roles, ' * renamed}train on other roles or all, raise weights, or remove empty records"
        )
        problem = f"none of the {count} has a token to train on"
        return UserError(f"dataset.train_on={roles}: {problem}; {fix}; `zerolora inspect` shows the records")
    length = f"dataset.max_length={section.max_length}"
    if section.too_long == "drop":
        problem = f"all {count} are longer, or have no trained token"
        return UserError(f"{length}: {problem}; raise max_length, or set dataset.too_long: cut")
    split = "" if columns["answers"][records].any() else ", or set dataset.too_long: split"
    return UserError(f"{length}: cuts all trained tokens of {count}; raise max_length{split}")


def _concatenate(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def pack_best_fit(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack documents into packs of at most `capacity` tokens, and return each pack's document indices.

    Best-fit decreasing: the longest document first, into the fullest pack with enough room (at most 11/9 of the minimum
    number of packs, plus 4: Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms"). Deterministic. Packs keep the input order of their documents, and are sorted by their first document.
    Raises ValueError if a document is longer than `capacity`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"document of {int(sizes.max())} tokens exceeds the capacity {capacity}")
    packs: list[list[int]] = []
    # open_packs[room] has the packs with exactly that much room; bit `room` of `rooms` is set if there are any. Finding
    # the smallest sufficient room needs only bit operations, so total time is linear in the number of documents.
    open_packs: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        sufficient = rooms >> size
        if sufficient:
            room = size + (sufficient & -sufficient).bit_length() - 1
            pack = open_packs[room].pop()
            if not open_packs[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(document)
        open_packs[room - size].append(pack)
        rooms |= 1 << (room - size)
    return sorted((sorted(pack) for pack in packs), key=lambda pack: pack[0])
