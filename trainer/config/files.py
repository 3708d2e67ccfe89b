"""Read files that may be damaged: if a file is unusable, raise UnreadableFileError with a one-line message.

Hostfiles, model files and run files can be damaged, incomplete or edited by hand. All code that reads them uses this
module and passes the expected type as `type_`, so that no file causes a traceback.
"""

import errno
import json
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from trainer.config.errors import UserError, describe_first_error

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
ProcessId = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(ge=0.0, lt=2**40)]
"""Types for numbers used in computations: without NaN, infinity and implausibly large values."""
MAX_TEXT_BYTES = 1 << 28


class UnreadableFileError(UserError):
    """Raised if a file exists but cannot be used; callers may build their own message from its attributes."""

    def __init__(self, path: Path, problem: str, fix: str = "restore or replace the file") -> None:
        self.path, self.problem, self.fix = path, problem, fix
        super().__init__(f"{path}: {problem}; {fix}")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a safetensors file; offsets are relative to the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def describe_broken_link(path: Path) -> str | None:
    """Describe the symlink that makes a path unusable: it has no target, or is in a loop; None if there is none."""
    problems = {errno.ENOENT: "does not exist", errno.ELOOP: "leads back to it"}
    for part in (path, *path.parents):
        try:
            part.stat()
        except (OSError, ValueError) as error:
            if os.path.islink(part) and (problem := problems.get(getattr(error, "errno", 0))):
                return f"{part} is a symlink to {os.readlink(part)}, which {problem}"
    return None


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        FileNotFoundError: if the file does not exist, so that callers can distinguish missing from damaged files.
        UnreadableFileError: if it is a folder, pipe or device, may not be read, or is larger than `max_bytes`.
    """
    content = _read_bytes(path, 0, max_bytes + 1)
    if len(content) > max_bytes:
        raise UnreadableFileError(path, f"is larger than {max_bytes:,} bytes")
    return content


def _read_bytes(path: Path, offset: int, count: int) -> bytes:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise UnreadableFileError(path, f"is {kind}", "use a file")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(count)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, "No such file or directory", str(path)) from None
    except OSError as error:
        problem = describe_broken_link(path) or f"cannot be read ({error.strerror})"
        raise UnreadableFileError(path, problem, "check its permissions, disk and links") from None
    except ValueError:  # a null character in the name
        raise UnreadableFileError(path, "is not a valid file name") from None


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file without a byte-order mark. Raises the same errors as `read_bytes`."""
    return decode_text(read_bytes(path), path)


def decode_text(content: bytes, path: Path) -> str:
    """Decode UTF-8 and remove a byte-order mark. Raises UnreadableFileError with the line of the first invalid byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8"
        raise UnreadableFileError(path, problem, "save it as UTF-8 text") from None


def read_json(path: Path, type_: Any = dict[str, Any]) -> Any:
    """Return the JSON value in a file, validated as `type_`, which may be any type that pydantic supports.

    Raises:
        FileNotFoundError: if the file does not exist.
        UnreadableFileError: if it cannot be read, is not JSON, or does not have that type.
    """
    return parse_json(read_bytes(path), path, type_)


def read_json_or_default(path: Path, type_: Any, default: Any = None) -> Any:
    try:
        return read_json(path, type_)
    except (FileNotFoundError, UnreadableFileError):
        return default


def read_value(path: Path, dotted: str, type_: Any) -> Any:
    """Return a value from a JSON file by dotted name, validated as `type_`. Raises the same errors as `read_json`."""
    value = read_json(path)
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return check_type({dotted: value}, path, dict[str, type_])[dotted]


def parse_json(content: bytes | str, path: Path, type_: Any = dict[str, Any]) -> Any:
    """Parse JSON that was read from `path` and validate it as `type_`. Raises UnreadableFileError if it is invalid."""
    text = decode_text(content, path) if isinstance(content, bytes) else content
    try:
        value = json.loads(text)
    except RecursionError:
        raise UnreadableFileError(path, "is nested too deeply to parse as JSON") from None
    except json.JSONDecodeError as error:
        if text.startswith("version https://git-lfs"):
            raise UnreadableFileError(path, "is a git-lfs pointer", "run `git lfs pull`") from None
        problem = f"is not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
        raise UnreadableFileError(path, problem) from None
    except ValueError as error:  # more digits than Python converts
        raise UnreadableFileError(path, f"cannot be parsed as JSON ({error})") from None
    return check_type(value, path, type_)


def check_type(value: Any, path: Path, type_: Any) -> Any:
    """Validate a value read from `path` as `type_`. Raises UnreadableFileError naming the first invalid part."""
    try:
        return build_type_adapter(type_).validate_python(value)
    except ValidationError as error:
        raise UnreadableFileError(path, describe_first_error(error)) from None
    except RecursionError:
        raise UnreadableFileError(path, "is nested too deeply") from None


def read_safetensors_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str], int]:
    """Return the tensor entries, metadata and offset of the first data byte of a safetensors file.

    Only the header is read: an 8-byte little-endian length, then that many bytes of JSON.

    Raises:
        FileNotFoundError: if the file does not exist.
        UnreadableFileError: if it is not a safetensors file, or its header contradicts itself or the size of the file.
    """
    begin = _read_bytes(path, 0, 9)
    length = int.from_bytes(begin[:8], "little")
    if begin in (b"", b"version h"):
        raise UnreadableFileError(path, "is empty, or only a Git LFS pointer", "copy or download it again")
    # The first bytes of a pickle or zip file may be a valid length, but the ninth byte is not `{`.
    if len(begin) < 9 or begin[8:] != b"{":
        fix = "convert it to safetensors; pickled weights can run arbitrary code"
        raise UnreadableFileError(path, "is not a safetensors file", fix)
    try:
        with safe_open(path, "numpy"):
            header: dict[str, Any] = parse_json(_read_bytes(path, 8, length), path)
    except SafetensorError as error:
        raise UnreadableFileError(path, f"is truncated or damaged ({error})", "copy or download it again") from None
    metadata: dict[str, str] = check_type(header.pop("__metadata__", {}), path, dict[str, str])
    return check_type(header, path, dict[str, TensorEntry]), metadata, 8 + length


@lru_cache(maxsize=64)
def build_type_adapter(type_: Any) -> TypeAdapter[Any]:
    return TypeAdapter(type_)
