"""Pictures and their captions: a folder with .txt files or metadata.jsonl beside them, or an image set of datasets."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from PIL import Image, UnidentifiedImageError

from trainer.config import SourceSection, UserError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
CAPTION_FIELDS = ("text", "caption", "prompt", "description")
IMAGE_FIELDS = ("image", "img", "picture", "jpg", "png")
METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Picture:
    """One picture, its bytes read when they are asked for."""

    name: str
    """Where it is, for messages."""
    caption: str
    digest: str
    """Of the bytes."""
    width: int
    height: int
    source: Any
    """A path, or the rows of a data set and a number."""

    def open(self) -> Image.Image:
        """The picture in three colours, upright. Raises UserError if it is damaged."""
        try:
            with Image.open(io.BytesIO(_bytes_of(self.source))) as image:
                return _upright(image).convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise _broken(self.name, error) from None


def read_pictures(source: SourceSection, label: str, caption: str | None) -> list[Picture]:
    """The pictures of a source in a fixed order. Raises UserError for a damaged one, or one without a caption.

    `caption` is that of pictures that have none.
    """
    assert source.path is not None, f"{label}: a source without a path passed the configuration's checks"
    said, path = f"{label}.path={source.path}", Path(source.path).expanduser()
    if path.is_dir() and not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists():
        found = _of_folder(path, said, caption)
    elif path.exists() and not path.is_dir():
        raise UserError(f"{said}: is a file; name the folder that holds the pictures")
    else:
        found = _of_dataset(source, path, said, caption)
    pictures = []
    for picture in found:
        pictures.append(picture)
        if source.max_samples is not None and len(pictures) == source.max_samples:
            break
    if not pictures:
        raise UserError(f"{said}: no pictures in it; there should be files that end in {', '.join(ENDINGS[:4])}")
    return pictures


def _of_folder(folder: Path, said: str, caption: str | None) -> Iterator[Picture]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    captions = _metadata(folder, said)
    without = [file for file in files if _caption_beside(file, folder, captions) is None]
    if without and caption is None:
        raise UserError(
            f"{said}: no caption for {without[0].name} ({len(without)} of {len(files)} have none); write it to "
            f"{without[0].with_suffix('.txt').name} or {METADATA}, or set image.caption for all of them"
        )
    for file in files:
        text = _caption_beside(file, folder, captions)
        yield _picture(str(file), caption if text is None else text, file)


def _caption_beside(file: Path, folder: Path, captions: dict[str, str]) -> str | None:
    text = file.with_suffix(".txt")
    if text.is_file():
        return " ".join(text.read_text(encoding="utf-8", errors="replace").split())
    return captions.get(str(file.relative_to(folder)))


def _metadata(folder: Path, said: str) -> dict[str, str]:
    """Captions by file name, as the datasets library writes them."""
    captions: dict[str, str] = {}
    file = folder / METADATA
    if not file.is_file():
        return captions
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name = record["file_name"]
            field = next(each for each in CAPTION_FIELDS if each in record)
        except (ValueError, TypeError, KeyError, StopIteration):
            raise UserError(
                f"{said}: {METADATA}, line {number}: must be JSON with file_name and one of {', '.join(CAPTION_FIELDS)}"
            ) from None
        captions[str(name)] = str(record[field])
    return captions


def _of_dataset(source: SourceSection, path: Path, said: str, caption: str | None) -> Iterator[Picture]:
    import datasets

    if not path.exists() and str(source.path).startswith(("/", ".", "~")):
        raise UserError(f"{said}: is not there; name a folder of pictures, or a data set of the hub")
    try:
        if path.is_dir():
            rows = datasets.load_from_disk(str(path))
            rows = rows[source.split] if isinstance(rows, datasets.DatasetDict) else rows
        else:
            rows = datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except Exception as error:  # whatever the library says of files and names
        raise UserError(
            f"{said}: cannot be read ({str(error).splitlines()[0]}); check the name and the split"
        ) from None
    columns = rows.column_names
    image = source.fields.get("image") or next((name for name in IMAGE_FIELDS if name in columns), None)
    text = source.fields.get("caption") or next((name for name in CAPTION_FIELDS if name in columns), None)
    if image not in columns or (text not in columns and caption is None):
        what = "pictures" if image not in columns else "captions"
        raise UserError(
            f"{said}: no column of {what} (there are {', '.join(columns)}); name them with dataset.fields: "
            "{image: ..., caption: ...}"
        )
    rows = rows.cast_column(image, datasets.Image(decode=False))
    for index in range(len(rows)):
        found = caption if text is None else rows[index][text]
        yield _picture(f"{source.path}, record {index + 1}", str(found or caption or ""), (rows, index, image))


def _picture(name: str, caption: str | None, source: Any) -> Picture:
    data = _bytes_of(source)
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if image.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # turned by a quarter
                width, height = height, width
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _broken(name, error) from None
    return Picture(name, caption or "", xxhash.xxh3_128_hexdigest(data), width, height, source)


def _bytes_of(source: Any) -> bytes:
    if isinstance(source, Path):
        try:
            return source.read_bytes()
        except OSError as error:
            raise UserError(f"{source}: cannot be read ({error.strerror}); mend its rights, or copy it") from None
    rows, index, column = source
    entry = rows[index][column]
    return entry["bytes"] if entry["bytes"] is not None else Path(entry["path"]).read_bytes()


def _upright(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    turned: Image.Image = ImageOps.exif_transpose(image)
    return turned


def _broken(name: str, error: Exception) -> UserError:
    return UserError(f"{name}: is no picture that can be read ({error}); replace it, or take it out of the data")
