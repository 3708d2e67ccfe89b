"""What a tokenizer saves, as bytes: it is saved with every checkpoint and never changes."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def files_of(tokenizer: Any) -> dict[str, bytes]:
    """What a tokenizer saves, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        root = Path(folder)
        return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write them into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
