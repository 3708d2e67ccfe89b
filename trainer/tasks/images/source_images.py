"""Read images and captions: a folder with .txt, metadata.jsonl or metadata.csv files, or an image dataset."""

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash
from PIL import Image, UnidentifiedImageError

from trainer.config import SourceSection, UserError
from trainer.config.errors import format_count
from trainer.config.files import read_bytes, read_text
from trainer.data.image_parts import build_damaged_image_error, decode_image, reject_high_bit_depth
from trainer.data.sources import read_source
from trainer.data.text_files import parse_row, read_raw_records

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
CAPTION_FIELDS = ("text", "caption", "prompt", "description")
IMAGE_FIELDS = ("image", "img", "picture", "jpg", "png")
METADATA = {"metadata.jsonl": "json", "metadata.csv": "csv"}
ALPHA_WARNING = "have an alpha channel, and get a white background"
FIRST_FRAME = "have several frames or pages; only the first is used"
COLOR_MODE_WARNING = "are in CMYK or LAB, and are converted to RGB without their color profile"
SAVED_DATASET_FILES = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class SourceImage:
    name: str
    """The image's location, for messages."""
    caption: str
    digest: str
    """Hash of the bytes."""
    width: int
    height: int
    source: Any
    """A path, or (rows of a dataset, index, column)."""
    changes: tuple[str, ...] = ()
    """Conversions that change the image's appearance: ALPHA_WARNING, FIRST_FRAME, COLOR_MODE_WARNING."""

    def open(self) -> Image.Image:
        """Decode the image as upright RGB; transparency becomes white. Raises UserError if the image is damaged."""
        return decode_image(_read_image_bytes(self.source, self.name), self.name)


def read_images(source: SourceSection, label: str, caption: str | None) -> tuple[list[SourceImage], list[str]]:
    """Return a source's images in a fixed order, and a message for each kind of skipped file.

    `caption` is used for images without one. Raises UserError if an image is damaged or has no caption.
    """
    assert source.path is not None, f"{label}: a source without a path passed the configuration's checks"
    prefix, path = f"{label}.path={source.path}", Path(source.path).expanduser()
    if path.is_file() and path.suffix.lower() != ".parquet":
        raise UserError(f"{prefix}: is a file; use the folder of the images")
    skipped: list[str] = []
    if path.is_dir() and not any((path / name).exists() for name in SAVED_DATASET_FILES):
        # Notebooks and file managers create hidden entries.
        entries = [entry for entry in sorted(path.rglob("*")) if "/." not in f"/{entry.relative_to(path)}"]
        images = list(islice(_read_folder(path, entries, prefix, caption), source.max_samples))
        skipped = [f"{prefix}: {message}" for message in _describe_skipped(path, entries)]
    else:
        images = list(_read_rows(read_source(source, label), source, prefix, label, caption))
    if not images:
        details = "".join(f"; {message.partition(': ')[2]}" for message in skipped)
        raise UserError(f"{prefix}: has no images; add files that end in {', '.join(SUFFIXES[:4])}{details}")
    return images, skipped


def _describe_skipped(folder: Path, entries: list[Path]) -> Iterator[str]:
    images = {path for path in entries if path.suffix.lower() in SUFFIXES and path.is_file()}
    used = {*images, *(path.with_suffix(".txt") for path in images), *(folder / name for name in METADATA)}
    others = [path for path in entries if path not in used and not path.is_dir()]
    if broken := [path for path in others if not path.exists()]:
        yield f"skipped {format_count(len(broken), 'broken link')} (first: {broken[0].name})"
    kinds = Counter(path.suffix.lower() or "no suffix" for path in others if path.exists())
    if kinds:
        counts = ", ".join(f"{count:,} with {kind}" for kind, count in kinds.most_common())
        yield f"skipped {sum(kinds.values()):,} files that are neither images nor their captions: {counts}"


def _read_folder(folder: Path, entries: list[Path], prefix: str, caption: str | None) -> Iterator[SourceImage]:
    files = [path for path in entries if path.suffix.lower() in SUFFIXES and path.is_file()]
    names = {path: str(path.relative_to(folder)) for path in files}
    metadata = _read_metadata(folder, prefix, set(names.values()))
    captions = {path: _read_caption(path, metadata.get(name)) for path, name in names.items()}
    missing = [path for path, text in captions.items() if text is None]
    if missing and caption is None:
        raise UserError(
            f"{prefix}: no caption for {missing[0].name} ({len(missing)} of {len(captions)} have none); write one to "
            f"{missing[0].with_suffix('.txt').name} or {next(iter(METADATA))}, or set image.caption for all images"
        )
    for path, text in captions.items():
        yield _build_source_image(str(path), caption if text is None else text, path)


def _read_caption(file: Path, default: str | None) -> str | None:
    try:
        text = " ".join(read_text(file.with_suffix(".txt")).split())
    except FileNotFoundError:
        return default
    if default is not None and text != " ".join(default.split()):
        raise UserError(f"{file.with_suffix('.txt')}: the metadata has another caption of {file.name}; remove one")
    return text


def _read_metadata(folder: Path, prefix: str, names: set[str]) -> dict[str, str]:
    """Return captions by file name, read like the `imagefolder` loader in datasets. `names` are the image files."""
    captions: dict[str, str] = {}
    for file, kind in METADATA.items():
        rows = read_raw_records([str(folder / file)], kind, prefix) if (folder / file).is_file() else ()
        for number, row in enumerate(rows, start=1):
            record, place = parse_row(row), f"{prefix}: {file}, record {number}"
            name, field = record.get("file_name"), next((key for key in CAPTION_FIELDS if key in record), None)
            if not isinstance(name, str) or field is None or not isinstance(record[field], str):
                raise UserError(f"{place}: needs file_name, and a caption in one of {', '.join(CAPTION_FIELDS)}")
            if str(Path(name)) not in names:
                raise UserError(f"{place}: the folder has no image {name}; fix file_name, or remove the record")
            captions[str(Path(name))] = record[field]
    return captions


def _read_rows(rows: Any, source: SourceSection, prefix: str, label: str, caption: str | None) -> Iterator[SourceImage]:
    import datasets

    columns = rows.column_names
    image = source.fields.get("image") or next((name for name in IMAGE_FIELDS if name in columns), None)
    text = source.fields.get("caption") or next((name for name in CAPTION_FIELDS if name in columns), None)
    if image not in columns or (text not in columns and (caption is None or text is not None)):
        kind = "images" if image not in columns else "captions"
        problem = f"has the columns {', '.join(columns)}, but none with {kind}"
        raise UserError(f"{prefix}: {problem}; set {label}.fields: {{image: ..., caption: ...}}")
    try:
        rows = rows.cast_column(image, datasets.Image(decode=False))
    except Exception as error:  # pyarrow may raise anything
        raise UserError(
            f"{prefix}: column {image} has no images ({error}); set another column in {label}.fields"
        ) from None
    for index, value in enumerate(rows[text] if text else [None] * len(rows)):
        name, row_caption = f"{source.path}, record {index + 1}", caption if value is None else value
        if not isinstance(row_caption, str):
            raise UserError(
                f"{name}: has no caption in column {text}; add a caption, or set image.caption for all images"
            )
        yield _build_source_image(name, row_caption, (rows, index, image))


def _build_source_image(name: str, caption: str | None, source: Any) -> SourceImage:
    try:
        data = _read_image_bytes(source, name)
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            reject_high_bit_depth(image, name)
            if image.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # rotated by 90 degrees
                width, height = height, width
            applies = {
                ALPHA_WARNING: image.has_transparency_data,
                FIRST_FRAME: getattr(image, "is_animated", False),
                COLOR_MODE_WARNING: image.mode in ("CMYK", "LAB"),
            }
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise build_damaged_image_error(name, error) from None
    assert caption is not None, f"{name}: an image without caption was not rejected"
    changes = tuple(change for change, is_made in applies.items() if is_made)
    return SourceImage(name, caption, xxhash.xxh3_128_hexdigest(data), width, height, source, changes)


def _read_image_bytes(source: Any, name: str) -> bytes:
    if isinstance(source, Path):
        return read_bytes(source)
    rows, index, column = source
    entry = rows[index][column]
    if entry is None:
        raise UserError(f"{name}: has no image in column {column}; remove the record")
    return entry["bytes"] if entry["bytes"] is not None else _read_image_bytes(Path(entry["path"]), name)
