"""Sample images of a run: their files (samples/00-before.png, ...), their prompts, and their thumbnails on a page."""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.files import read_json
from trainer.contract.whole_files import write_json

SAMPLES = "samples"
INDEX = "prompts.json"
MOST_SHOWN = 60
MOST_CHARACTERS = 600_000
"""Limit for all images of a page together; the page must stay under 1 MB."""
SIDES = (448, 320, 224, 160, 112, 80)
JPEG_QUALITY = 80


@dataclass(frozen=True)
class EmbeddedImage:
    """An image embedded in a page: when it was drawn, and its `data:` URL."""

    when: str
    address: str


def save_sample_image(run_dir: Path, prompt: str, when: str, image: Any) -> None:
    """Write one image; `when` is before, after, or step-N."""
    folder = run_dir / SAMPLES
    folder.mkdir(exist_ok=True)
    prompts = read_prompts(run_dir)
    if prompt not in prompts:
        prompts.append(prompt)
        write_json(folder / INDEX, prompts)
    image.save(folder / f"{prompts.index(prompt):02d}-{when}.png")


def read_prompts(run_dir: Path) -> list[str]:
    """Return the prompts that have images, in their order. Raises UnreadableFile."""
    try:
        prompts: list[str] = read_json(run_dir / SAMPLES / INDEX, list[str])
    except FileNotFoundError:
        return []
    return prompts


def find_sample_images(run_dir: Path) -> list[tuple[str, list[Path]]]:
    """Return (prompt, image files) pairs; files are in the order before, step-N, after."""
    found = []
    for index, prompt in enumerate(read_prompts(run_dir)):
        files = (run_dir / SAMPLES).glob(f"{index:02d}-*.png")
        found.append((prompt, sorted(files, key=_sort_key)))
    return found


def embed_sample_images(run_dir: Path) -> list[tuple[str, list[EmbeddedImage]]]:
    """Return the sample images as embedded JPEGs, as large as `MOST_CHARACTERS` allows; unreadable files are skipped.

    For a long run each prompt keeps its first image, its last, and some in between, evenly spaced.
    """
    rows = find_sample_images(run_dir)[: MOST_SHOWN // 2]
    each = max(2, MOST_SHOWN // max(1, len(rows)))
    chosen = [(prompt, _pick_evenly(files, each)) for prompt, files in rows]
    shown: list[tuple[str, list[EmbeddedImage]]] = []
    for side in SIDES:
        shown = [(prompt, _embed(files, side)) for prompt, files in chosen]
        if sum(len(image.address) for _, row in shown for image in row) <= MOST_CHARACTERS:
            break
    return [(prompt, row) for prompt, row in shown if row]


def _pick_evenly(files: Sequence[Path], count: int) -> list[Path]:
    if len(files) <= count:
        return list(files)
    return [files[at * (len(files) - 1) // (count - 1)] for at in range(count)]


def _embed(files: Sequence[Path], side: int) -> list[EmbeddedImage]:
    from PIL import Image  # every rank imports this module, only rank 0 draws

    shown = []
    for file in files:
        out = io.BytesIO()
        try:
            with Image.open(file) as image:
                small = image.convert("RGB")
        except OSError:
            continue
        small.thumbnail((side, side))
        small.save(out, "JPEG", quality=JPEG_QUALITY, optimize=True)
        address = f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
        shown.append(EmbeddedImage(file.stem.partition("-")[2], address))
    return shown


def _sort_key(file: Path) -> tuple[int, int]:
    when = file.stem.partition("-")[2]
    if step := re.fullmatch(r"step-([0-9]{1,18})", when):
        return 1, int(step[1])
    return (0, 0) if when == "before" else (2, 0)
