"""Cache of prepared (tokenized, masked, split and packed) data, keyed by content, tokenizer and settings."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
import transformers
import xxhash
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from trainer.config import DatasetSection, UserError
from trainer.data.built_folder import digest_json, load_or_build
from trainer.data.documents import DocumentEncoder, SourceReport, encode_source
from trainer.data.formats import UNPAIRED
from trainer.data.grouping import DataStats, Sources, group_documents, read_columns
from trainer.data.image_parts import FILE_PREFIX, get_stored_file, has_file_changed
from trainer.data.samples import Samples, SampleStream
from trainer.data.sources import compute_content_key
from trainer.data.streams import inspect_stream, stream_samples
from trainer.data.vision import ImageReader

# Part of every cache key: increment it when a code change produces different documents from the same input.
CACHE_FORMAT = 11
# Minimum fraction of a mixed stream's documents that each source must provide.
MIN_SOURCE_FRACTION = 1e-6


@dataclass(frozen=True)
class PreparedData:
    train: Samples | SampleStream
    evaluation: Samples | None
    stats: DataStats
    fingerprint: str
    origin: dict[str, str] = field(default_factory=dict)
    """Digests that are compared on resuming. `content`: the sources' bytes (except streams); `tokenizer`: the tokenizer
    with its template; `vocabulary`: the tokenizer alone."""


def prepare_data(
    section: DatasetSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    cache_dir: Path,
    model_max_length: int | None,
    check: Callable[[DataStats], object] = lambda stats: None,
    image_reader: ImageReader | None = None,
) -> PreparedData:
    """Tokenize, mask, split and pack a dataset, or load the result from `cache_dir`.

    Several processes may call this at once: the first one builds the cache, and the others wait and then read it. An
    interrupted build is never mistaken for a complete one. Raises UserError for mistakes in the data, including those
    found by `check`, and for a `max_length` above `model_max_length`, the size of the model's position table.
    """
    if model_max_length is not None and section.max_length > model_max_length:
        raise UserError(
            f"dataset.max_length={section.max_length}: the model only has positions for {model_max_length} tokens; "
            f"use {model_max_length} or less"
        )
    train: Sources = [(f"dataset.mix.{index}", source) for index, source in enumerate(section.mix)]
    train = train or [("dataset", section)]
    evaluation: Sources = [("dataset.evaluation", section.evaluation)] if section.evaluation else []
    encoder = DocumentEncoder(tokenizer, section, image_reader)
    streamed, stored = (train, []) if section.streaming else ([], train)
    _check_weights(streamed)
    identity = _identify_data(section, encoder, stored + evaluation, seed)
    origin = {
        "content": digest_json(identity["content"]),
        "tokenizer": digest_json([identity[name] for name in ("tokenizer", "special_tokens", "template")]),
        "vocabulary": str(identity["tokenizer"]),
    }
    key = digest_json(identity)
    samples, held_out, stats = None, None, DataStats(max_length=section.max_length)
    if stored or evaluation:

        def build(folder: Path) -> None:
            _build_cache(section, encoder, stored, evaluation, seed, folder)
            check(_load_cache(folder, section.packing)[2])

        loaded, note = load_or_build(cache_dir / key, build, lambda folder: _load_cache(folder, section.packing))
        samples, held_out, stats = loaded
        check(stats)
        stats = replace(stats, notes=((note, *stats.notes) if note else stats.notes))
    if streamed:
        reports, parts = zip(*(inspect_stream(source, label, encoder) for label, source in streamed), strict=True)
        if any(report.format.name == UNPAIRED for report in reports):
            raise UserError("dataset.streaming=true: labeled answers cannot be streamed; set streaming to false")
        first = group_documents(section, streamed, parts, [], seed)[2]
        check(replace(first, formats={report.label: report.format.name for report in reports}))
        read = partial(stream_samples, section, streamed, [report.format for report in reports], encoder, seed)
        notes = [f"{label}: streamed from {source.path}" for label, source in streamed]
        notes += chain.from_iterable(report.notes for report in reports)
        stats = replace(stats, notes=(*notes, *stats.notes), prompt_text=_choose_prompt_format(reports))
        return PreparedData(SampleStream(read, section.packing), held_out, stats, key, origin)
    assert samples is not None
    return PreparedData(samples, held_out, stats, key, origin)


def _choose_prompt_format(reports: Sequence[SourceReport]) -> str | None:
    """Return the format string for text prompts; None if any source has conversations, which use the chat template."""
    return None if any(report.prompt_text is None for report in reports) else reports[0].prompt_text


def _check_weights(streamed: Sources) -> None:
    total = sum(source.weight for _, source in streamed)
    for label, source in streamed:
        if source.weight < MIN_SOURCE_FRACTION * total:
            raise UserError(
                f"{label}.weight={source.weight:g}: fewer than one document in a million would come from this source; "
                "raise the weight, or remove the source"
            )


def _identify_data(section: DatasetSection, encoder: DocumentEncoder, sources: Sources, seed: int) -> dict[str, Any]:
    """Return everything that determines the documents: data, tokenizer, template and settings."""
    # These settings only change the order and speed of training.
    ignored = {"workers", "shuffle", "cache_dir", "batching"}
    return {
        "format": CACHE_FORMAT,
        "settings": section.model_dump(mode="json", exclude=ignored),
        "seed": seed if section.val_split or section.mix else None,
        "content": [compute_content_key(source, label) for label, source in sources],
        "template": encoder.chat.template if encoder.chat else None,
        "tokenizer": xxhash.xxh3_128_hexdigest(encoder.tokenizer.backend_tokenizer.to_str().encode()),
        "special_tokens": {name: str(token) for name, token in encoder.tokenizer.special_tokens_map.items()},
        "images": [encoder.images.settings_digest, os.getcwd()] if encoder.images else None,  # relative paths
        "transformers": transformers.__version__,
    }


def _build_cache(
    section: DatasetSection, encoder: DocumentEncoder, train: Sources, evaluation: Sources, seed: int, folder: Path
) -> None:
    parts, reports = [], []
    for number, (label, source) in enumerate(train + evaluation):
        file = folder / f"source-{number:03d}.arrow"
        documents, report = encode_source(source, label, encoder, workers=section.workers, file=file)
        parts.append(read_columns(documents.data))
        reports.append(report)
    training, held_out, stats = group_documents(section, train, parts[: len(train)], parts[len(train) :], seed)
    np.savez(
        folder / "index.npz",
        train_starts=training.starts,
        train_members=training.members,
        evaluation_starts=held_out.starts,
        evaluation_members=held_out.members,
    )
    stats = replace(
        stats,
        notes=tuple(chain.from_iterable(report.notes for report in reports)),
        prompt_text=_choose_prompt_format(reports[: len(train)] or reports),
        formats={report.label: report.format.name for report in reports},
        skipped={report.label: report.skipped for report in reports},
    )
    (folder / "stats.json").write_text(json.dumps(asdict(stats)), encoding="utf-8")


def _load_cache(folder: Path, packed: bool) -> tuple[Samples | None, Samples | None, DataStats]:
    """Return a cache folder's training samples, held-out samples and statistics; the documents are memory-mapped."""
    stats = TypeAdapter(DataStats).validate_json((folder / "stats.json").read_bytes())
    maps = [pyarrow.memory_map(str(file)) for file in sorted(folder.glob("source-*.arrow"))]
    documents = pyarrow.concat_tables(pyarrow.ipc.open_stream(each).read_all() for each in maps)
    _check_images(documents)
    samples: list[Samples | None] = []
    with np.load(folder / "index.npz") as index:
        for name in ("train", "evaluation"):
            starts, members = index[f"{name}_starts"], index[f"{name}_members"]
            samples.append(Samples(documents, starts, members, packed=packed) if len(starts) > 1 else None)
    return samples[0], samples[1], stats


def _check_images(documents: pyarrow.Table) -> None:
    """Raise ValueError, which triggers a rebuild, if an image file has changed."""
    for chunk in documents.column("images").chunks:
        stored = chunk.flatten()
        for reference in stored.filter(pc.starts_with(stored, FILE_PREFIX)).unique().to_pylist():
            if has_file_changed(reference):
                raise ValueError(f"the image {get_stored_file(reference)} has changed")


def prepare_reference(section: DatasetSection, tokenizer: Any, path: str, *, setting: str, seed: int) -> Samples:
    """Load the texts at `path` as samples in which every token is a target.

    The tokenized texts are cached like those at `dataset.path`. `setting` is the name of the path in error
    messages. Raises UserError if the file has no texts, or if a text is longer than `dataset.max_length`.
    """
    reference = DatasetSection(
        path=path, max_length=section.max_length, train_on=("all",), shuffle=False, cache_dir=section.cache_dir
    )
    cache_dir = Path(section.cache_dir).expanduser()
    try:
        prepared = prepare_data(reference, tokenizer, seed=seed, cache_dir=cache_dir, model_max_length=None)
    except UserError as error:
        raise UserError(str(error).replace("dataset.path=", f"{setting}=").replace("dataset:", f"{setting}:")) from None
    samples = prepared.train
    assert isinstance(samples, Samples)
    if prepared.stats.truncated:
        raise UserError(
            f"{setting}={path}: {prepared.stats.truncated} of {prepared.stats.documents} documents are longer than "
            f"dataset.max_length={section.max_length}; split these documents, or raise dataset.max_length"
        )
    return samples
