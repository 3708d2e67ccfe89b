"""Save the sample images of a run (samples/00-before.png, ...) and embed their thumbnails in a page."""

import base64
import io
import re
from pathlib import Path
from typing import Any

from trainer.config.files import read_json
from trainer.contract.whole_files import write_json

SAMPLES = "samples"
INDEX = "prompts.json"
MAX_SHOWN, SIDE, JPEG_QUALITY = 24, 224, 80
"""Limits for the images on a page, which must stay under 1 MB."""


def save_sample_image(run_dir: Path, prompt: str, when: str, image: Any) -> None:
    """Save an image; `when` is "before", "after" or "step-N"."""
    folder = run_dir / SAMPLES
    folder.mkdir(exist_ok=True)
    prompts = read_prompts(run_dir)
    if prompt not in prompts:
        prompts.append(prompt)
        write_json(folder / INDEX, prompts)
    image.save(folder / f"{prompts.index(prompt):02d}-{when}.png")


def read_prompts(run_dir: Path) -> list[str]:
    """Return the prompts that have images, in order. Raises UnreadableFileError if the list of prompts is damaged."""
    try:
        return read_json(run_dir / SAMPLES / INDEX, list[str])
    except FileNotFoundError:
        return []


def find_sample_images(run_dir: Path) -> list[tuple[str, list[Path]]]:
    """Return (prompt, image files) pairs, with the files in the order before, step-N, after."""
    return [
        (prompt, sorted((run_dir / SAMPLES).glob(f"{index:02d}-*.png"), key=_sort_key))
        for index, prompt in enumerate(read_prompts(run_dir))
    ]


def embed_sample_images(run_dir: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (prompt, [(when, `data:` URL)]) for the sample images, omitting unreadable files.

    If a prompt has too many images, returns evenly spaced ones, including the first and the last.
    """
    rows = find_sample_images(run_dir)[: MAX_SHOWN // 2]
    limit = MAX_SHOWN // max(1, len(rows))
    embedded = []
    for prompt, files in rows:
        if len(files) > limit:
            files = [files[number * (len(files) - 1) // (limit - 1)] for number in range(limit)]
        embedded.append((prompt, [(_parse_label(file), address) for file in files if (address := _encode(file))]))
    return [(prompt, row) for prompt, row in embedded if row]


def _encode(file: Path) -> str | None:
    from PIL import Image  # only rank 0 needs it

    out = io.BytesIO()
    try:
        with Image.open(file) as image:
            small = image.convert("RGB")
    except OSError:
        return None
    small.thumbnail((SIDE, SIDE))
    small.save(out, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def _parse_label(file: Path) -> str:
    return file.stem.partition("-")[2]


def _sort_key(file: Path) -> tuple[int, int]:
    if step := re.fullmatch(r"step-([0-9]{1,18})", _parse_label(file)):
        return 1, int(step[1])
    return (0, 0) if _parse_label(file) == "before" else (2, 0)
