"""Read and decode a conversation's images: parts of its turns, or a list of images for its `<image>` placeholders."""

import base64
import binascii
import io
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trainer.config import UserError
from trainer.config.errors import format_count
from trainer.config.files import read_bytes
from trainer.data.formats import RecordFormat, describe_type

IMAGE_MARKER = "\ufdd2"
"""Placeholder for an image in a turn's text: a noncharacter, which no valid text contains."""
PLACEHOLDER = "<image>"
"""Image placeholder in the formats of LLaVA, LLaMA-Factory and others."""
PART_TYPES = ("image", "image_url", "input_image")
IMAGE_KEYS = ("bytes", "base64", "data", "image_url", "url", "path", "image")
"""Keys of a part, or of an image's record, that may contain the image, in order of precedence."""
FILE_PREFIX = b"file:"
THUMBNAIL, THUMBNAIL_START = 224, "data:image/jpeg;base64,"
HIGH_DEPTH_MODES = ("I", "F")
"""First letters of the Pillow modes with values above 255, which conversion to RGB would clip."""
_DATA_URL = re.compile(r"data:[\w/+.-]*;base64,(.*)", re.DOTALL)


class ImageParts:
    """Collects the images of one record while its turns are read."""

    def __init__(self, record: Mapping[str, Any], fmt: RecordFormat) -> None:
        names = (fmt.names.get("images", "images"), "image")
        self._record, self._name = record, next((name for name in names if name in record), None)
        self._folder, self._is_supported = fmt.folder, fmt.supports_images
        self._values = list[Any]()
        """The image for each placeholder; None if the image is in the record's list of images."""

    def read_part(self, part: Mapping[str, Any]) -> str:
        self._values.append(_select_source(part))
        return IMAGE_MARKER

    def replace_placeholders(self, text: str) -> str:
        """Replace `<image>` in a string with IMAGE_MARKER if the record has a list of images."""
        if self._name is None or IMAGE_MARKER in text or PLACEHOLDER not in text:
            return text
        self._values += [None] * text.count(PLACEHOLDER)
        return text.replace(PLACEHOLDER, IMAGE_MARKER)

    def encode_images(self, origin: str) -> tuple[bytes, ...]:
        """Return each image's bytes or file reference (see `encode_image`), in order.

        Raises UserError if the model does not support images, or if the record has more or fewer than placeholders.
        """
        count, images = self._values.count(None), list[Any]()
        if self._name is not None and (count or self._name != "image"):
            value = self._record[self._name]
            if isinstance(value, str) and value.lstrip().startswith("["):
                with suppress(ValueError):
                    value = json.loads(value)
            images = value if isinstance(value, list) else [] if value is None else [value]
        if not self._is_supported and (images or self._values):
            fix = "use a model listed in docs/reference/vision-models.md and install its package, or remove the images"
            raise UserError(f"{origin}: has images, but image input is not supported for this model; {fix}")
        if count != len(images):
            raise UserError(
                f"{origin}: has {format_count(len(images), 'image')}, but {count} "
                f"placeholder{'s' * (count != 1)}; write {PLACEHOLDER} once per image, in the order of the images"
            )
        rest = iter(images)
        values = [next(rest) if value is None else value for value in self._values]
        return tuple(encode_image(value, self._folder, f"{origin}, image {i}") for i, value in enumerate(values, 1))


def encode_image(value: Any, folder: Path | None, origin: str) -> bytes:
    """Return the bytes of an image, or a reference to its file. Raises UserError if the value is not an image.

    Relative paths are resolved against `folder`, which contains the records, and then against the working directory.
    """
    if isinstance(value, Mapping):
        return encode_image(_select_source(value), folder, origin)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(f"{origin}: is {describe_type(value)}; use a path, a data: URL, base64 or bytes")
    if match := _DATA_URL.fullmatch(value):
        return _decode_base64(match[1], origin)
    if value.startswith(("http://", "https://")):
        raise UserError(f"{origin}: is a URL ({value[:80]}), but images are only read from files; download the image")
    name = unquote(urlsplit(value).path) if value.startswith("file://") else value
    for path in (Path(folder or ".", name).expanduser(), Path(name).expanduser()):
        try:
            if path.is_file():
                stat = path.stat()
                return f"{FILE_PREFIX.decode()}{stat.st_size}:{stat.st_mtime_ns}:{path.absolute()}".encode()
        except (OSError, ValueError):  # base64 data is too long for a file name
            break
    if len(value) > 60 and re.fullmatch(r"[A-Za-z0-9+/\s]+=*\s*", value):
        return _decode_base64(value, origin)
    raise UserError(f"{origin}: no such file: {value[:200]} (searched in {folder or '.'}); fix the path")


def _select_source(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in IMAGE_KEYS if part.get(name) is not None), None)


def _decode_base64(text: str, origin: str) -> bytes:
    try:
        return base64.b64decode(text, validate=False)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{origin}: is not valid base64 ({error}); encode the image again") from None


def read_stored_image(stored: bytes) -> tuple[bytes, str]:
    """Return a stored image's bytes and the path of its file ("" if the bytes themselves were stored)."""
    if not stored.startswith(FILE_PREFIX):
        return stored, ""
    file = get_stored_file(stored)
    try:
        return read_bytes(file), str(file)
    except OSError as error:
        raise UserError(f"{file}: the image cannot be read ({error.strerror}); restore the file") from None


def get_stored_file(stored: bytes) -> Path:
    return Path(stored.split(b":", 3)[3].decode())


def has_file_changed(stored: bytes) -> bool:
    _, size, time, name = stored.split(b":", 3)
    try:
        stat = Path(name.decode()).stat()
    except OSError:
        return True
    return (stat.st_size, stat.st_mtime_ns) != (int(size), int(time))


def decode_image(data: bytes, name: str) -> Any:
    """Decode an image as upright RGB; transparency becomes white. Raises UserError if the image is damaged."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            reject_high_bit_depth(image, name)
            upright = ImageOps.exif_transpose(image)
            if not upright.has_transparency_data:
                return upright.convert("RGB")
            white = Image.new("RGBA", upright.size, "white")
            return Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise build_damaged_image_error(name, error) from None


def build_thumbnail(stored: bytes) -> str:
    """Return a small copy of a stored image as a `data:` URL."""
    image, file = decode_image(*read_stored_image(stored)), io.BytesIO()
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    image.save(file, "JPEG", quality=80)
    return f"{THUMBNAIL_START}{base64.b64encode(file.getvalue()).decode()}"


def reject_high_bit_depth(image: Any, name: str) -> None:
    """Raise UserError if the image has more than 8 bits per channel."""
    if image.mode[0] in HIGH_DEPTH_MODES:
        raise UserError(f"{name}: has more than 8 bits per channel (mode {image.mode}); convert it to 8 bits")


def is_animated(data: bytes) -> bool:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return bool(getattr(image, "is_animated", False))


def build_damaged_image_error(name: str, error: Exception) -> UserError:
    from PIL import UnidentifiedImageError

    reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
    return UserError(f"{name}: cannot be read as an image ({reason}); replace it, or remove it from the data")
