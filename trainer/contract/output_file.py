"""Checks that a command can write its output file, made before its work."""

import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.files import find_json


def check_output_file(path: Path, named: str) -> None:
    """Raise UserError, which starts with `named`, if no file can be written at `path`."""
    folder = path.absolute().parent
    try:
        if path.is_dir():
            raise UserError(f"{named}: is a folder; name a file in it, such as {path / 'result'}{path.suffix}")
        if not folder.is_dir():
            raise UserError(f"{named}: its folder does not exist; create it first")
        allowed = os.access(path, os.W_OK) if path.exists() else os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:  # a name that is too long
        raise UserError(f"{named}: {error.strerror}; name another file") from None
    if not allowed:
        raise UserError(f"{named}: no permission to write; name a file in another folder")


def check_result_file(path: Path, named: str, keys: Set[str]) -> None:
    """Check like `check_output_file`; an existing file must be an earlier result, a JSON object with these keys."""
    check_output_file(path, named)
    if not path.is_file() or not path.stat().st_size:
        return
    if not keys <= find_json(path, dict[str, Any], {}).keys():
        raise UserError(f"{named}: exists with other content; name a new file, or remove it")
