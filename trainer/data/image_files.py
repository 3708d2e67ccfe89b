"""Images from bytes: upright, in RGB, on white where they are transparent."""

import io
from typing import Any

from trainer.config import UserError

DEEP = ("I", "F")
"""First letters of the Pillow modes that conversion to RGB would clip at 255."""


def decode_image(data: bytes, name: str) -> Any:
    """Return an image in RGB, upright, on white if it is transparent. Raises UserError if it is damaged."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            refuse_deep(image, name)
            upright = ImageOps.exif_transpose(image)
            if not upright.has_transparency_data:
                return upright.convert("RGB")
            white = Image.new("RGBA", upright.size, "white")
            return Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise damaged_image_error(name, error) from None


def refuse_deep(image: Any, name: str) -> None:
    """Raise UserError for more than 8 bits a colour."""
    if image.mode[0] in DEEP:
        raise UserError(f"{name}: has more than 8 bits per colour (mode {image.mode}); save it with 8")


def is_animated(data: bytes) -> bool:
    """Return whether a readable image has several frames or pages."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return bool(getattr(image, "is_animated", False))


def damaged_image_error(name: str, error: Exception) -> UserError:
    """Return the error for bytes that Pillow cannot read."""
    from PIL import UnidentifiedImageError

    reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
    return UserError(f"{name}: cannot be read as an image ({reason}); replace it, or remove it from the data")
