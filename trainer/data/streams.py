"""Read, tokenize and pack streamed documents on demand, from any position in the stream.

The order does not depend on the number of ranks. The unit of work is a block of `BLOCK_ROWS` consecutive
records. Records without trained tokens are dropped, and packs depend on the lengths of documents, so the
start of a global batch is only known once all earlier blocks are tokenized. Every rank therefore reads all
records and needs all blocks, but tokenizes only one of the next blocks; `gather` exchanges the results.

`state_dict` contains the position of each source: its block, and the document within the block. With packing, this is
the position at the start of the current packing window. A resumed run does not tokenize earlier records again.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow

from trainer.config import DatasetSection, SourceSection, UserError
from trainer.data.documents import VALUES, DocumentEncoder, SourceReport
from trainer.data.formats import RecordFormat
from trainer.data.grouping import Columns, pack_best_fit, read_columns
from trainer.data.samples import Gather, Sample, join_samples, split_row_lengths
from trainer.data.source_files import describe_source
from trainer.data.sources import build_no_records_error, read_rows, read_source

BLOCK_ROWS = 64
# Number of records in the buffer from which a shuffled stream draws.
SHUFFLE_BUFFER = 10_000
# Number of documents that a packed stream packs together.
PACKING_WINDOW = 1_000
State = dict[str, Any]
Block = tuple[list[Sample], int]
"""The documents of a block, and its number of skipped records."""


def stream_samples(
    section: DatasetSection,
    sources: Sequence[tuple[str, SourceSection]],
    formats: Sequence[RecordFormat],
    encoder: DocumentEncoder,
    seed: int,
    epoch: int,
    state: State | None = None,
    rank: int = 0,
    gather: Gather | None = None,
) -> "MixedStream | PackedStream":
    """Return the samples for one pass, from the beginning or from `state`. `gather` is None for a single rank."""

    def start(number: int, position: State | None) -> SourceStream:
        label, source = sources[number]
        position = position or {"block": 0, "taken": 0, "skipped": 0}
        return SourceStream(section, source, label, formats[number], encoder, seed + epoch, position, rank, gather)

    weights = [source.weight for _, source in sources]
    if section.packing:
        documents = MixedStream(start, weights, [seed, epoch], state["documents"] if state else None)
        return PackedStream(documents, section.max_length, int(state["packs"]) if state else 0)
    return MixedStream(start, weights, [seed, epoch], state)


def inspect_stream(source: SourceSection, label: str, encoder: DocumentEncoder) -> tuple[SourceReport, Columns]:
    """Detect a stream's format from its first block, and report on the blocks up to the first with a useful answer.

    Also returns the numeric columns of these documents. Raises UserError if the stream cannot be read.
    """
    rows_left = read_rows(read_source(source, label, streaming=True), source, label)
    types = {name: pyarrow.type_for_alias(kind) for name, kind in VALUES.items()}
    types["unread"], tables = pyarrow.list_(pyarrow.string()), list[pyarrow.Table]()
    for number, rows in enumerate(iter(lambda: list(islice(rows_left, BLOCK_ROWS)), [])):
        if not tables:
            fmt, first = encoder.detect_format(source, rows, label)
        columns = encoder.encode_rows(rows, number * BLOCK_ROWS, fmt, describe_source(source, label))
        tables.append(pyarrow.table({name: pyarrow.array(columns[name], kind) for name, kind in types.items()}))
        answers = zip(columns["targets"], columns["answers"], columns["empty"], strict=True)
        if number * BLOCK_ROWS >= SHUFFLE_BUFFER or any(n and empty < max(total, 1) for n, total, empty in answers):
            break
    if not tables:
        raise build_no_records_error(source, label)
    table = pyarrow.concat_tables(tables).combine_chunks()
    return encoder.build_report(label, fmt, first, table), read_columns(table)


class SourceStream:
    """Yields the documents of one pass over a source, except records without trained tokens."""

    def __init__(
        self,
        section: DatasetSection,
        source: SourceSection,
        label: str,
        fmt: RecordFormat,
        encoder: DocumentEncoder,
        seed: int,
        state: State,
        rank: int,
        gather: Gather | None,
    ) -> None:
        self._source, self.label, self._format, self._encoder = source, label, fmt, encoder
        self._description = describe_source(source, label) + (" (in shuffled order)" if section.shuffle else "")
        self.state = dict(state)
        """The block, the number of its documents already yielded, and the number of records skipped so far."""
        self._records = enumerate(self._read_blocks(section, seed))
        self._rank, self._gather = (rank, gather) if gather else (0, lambda block: [block])
        self._blocks: dict[int, Block | UserError | None] = {}

    def __iter__(self) -> Iterator[Sample]:
        state = self.state
        while (block := self._get_block(state["block"])) is not None:
            documents, skipped = block
            state["skipped"] += 0 if state["taken"] else skipped
            for document in documents[state["taken"] :]:
                state["taken"] += 1
                yield document
            state["block"], state["taken"] = state["block"] + 1, 0

    def _get_block(self, number: int) -> Block | None:
        """Return a block, or None after the last one. A UserError on one rank is raised on all, in the same step."""
        if number not in self._blocks:
            local = number + self._rank
            self._blocks = dict(self._gather((local, self._build_block(local))))
        block = self._blocks[number]
        if isinstance(block, UserError):
            raise block
        return block

    def _build_block(self, number: int) -> Block | UserError | None:
        try:
            for block, records in self._records:
                if block >= number:
                    return self._encode(number, records)
        except UserError as error:  # raised later, when the block is needed
            return error
        return None

    def _read_blocks(self, section: DatasetSection, seed: int) -> Iterator[list[dict[str, Any]]]:
        from datasets import IterableDataset

        source, label = self._source, self.label
        records = read_source(source, label, streaming=True)
        options = {"buffer_size": SHUFFLE_BUFFER} if isinstance(records, IterableDataset) else {}
        records = records.shuffle(seed=seed, **options) if section.shuffle else records
        rows = read_rows(records, source, label)
        while block := list(islice(rows, BLOCK_ROWS)):
            yield block

    def _encode(self, number: int, records: list[dict[str, Any]]) -> Block:
        columns = self._encoder.encode_rows(records, number * BLOCK_ROWS, self._format, self._description)
        trained = (weights or flags for weights, flags in zip(columns["weights"], columns["trained"], strict=True))
        if any(columns["images"]):
            raise UserError("dataset.streaming=true: records with images cannot be streamed; set streaming to false")
        documents = zip(columns["input_ids"], trained, columns["rejected"], columns["targets"], strict=True)
        problems = [problem for problem in columns["problem"] if problem]
        for problem in problems:
            print(f"skipped: {problem}", file=sys.stderr, flush=True)  # goes to this rank's log
        return [
            Sample(ids, trained, split_row_lengths(len(ids), rejected))
            for ids, trained, rejected, targets in documents
            if targets
        ], len(problems)


class MixedStream:
    """Draws documents from sources by weight. A source that ends is restarted until all sources have ended once."""

    def __init__(
        self,
        start: Callable[[int, State | None], SourceStream],
        weights: Sequence[float],
        seed: list[int],
        state: State | None,
    ) -> None:
        self._start = start
        self._probabilities = np.asarray(weights) / sum(weights)
        self._generator = np.random.default_rng(seed)
        states: list[State | None] = [None] * len(weights)
        self._ended = [False] * len(weights)
        if state is not None:
            states, self._ended = list(state["sources"]), list(state["ended"])
            self._generator.bit_generator.state = state["random"]
        self._streams = [start(number, position) for number, position in enumerate(states)]

    def __iter__(self) -> Iterator[Sample]:
        documents = [iter(stream) for stream in self._streams]
        while not all(self._ended):
            choice = int(self._generator.choice(len(documents), p=self._probabilities))
            sample = next(documents[choice], None)
            if sample is None:
                self._ended[choice] = True
                if all(self._ended):
                    return
                restart = {"block": 0, "taken": 0, "skipped": self._streams[choice].state["skipped"]}
                self._streams[choice] = self._start(choice, restart)
                documents[choice] = iter(self._streams[choice])
                sample = next(documents[choice], None)
            if sample is not None:
                yield sample

    @property
    def skipped(self) -> dict[str, int]:
        return {stream.label: stream.state["skipped"] for stream in self._streams}

    def state_dict(self) -> State:
        return {
            "sources": [dict(stream.state) for stream in self._streams],
            "ended": list(self._ended),
            "random": self._generator.bit_generator.state,
        }


class PackedStream:
    """Packs `PACKING_WINDOW` documents at a time, skipping the first `packs_yielded` packs of the first window."""

    def __init__(self, documents: MixedStream, max_length: int, packs_yielded: int) -> None:
        self._documents, self._max_length, self._packs_yielded = documents, max_length, packs_yielded
        self._window_start = documents.state_dict()

    def __iter__(self) -> Iterator[Sample]:
        documents = iter(self._documents)
        while window := list(islice(documents, PACKING_WINDOW)):
            packs = pack_best_fit([len(document.input_ids) for document in window], self._max_length)
            for pack in packs[self._packs_yielded :]:
                self._packs_yielded += 1
                yield join_samples([window[index] for index in pack])
            self._window_start, self._packs_yielded = self._documents.state_dict(), 0

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped records per source so far, including the current window."""
        return self._documents.skipped

    def state_dict(self) -> State:
        return {"documents": self._window_start, "packs": self._packs_yielded}
