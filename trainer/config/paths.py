"""Expand `~` and environment variables in path settings, and reject invalid names.

Object-store URLs, such as s3://bucket/run, are mapped to the paths of local copies, and these paths back to URLs.
"""

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

LONGEST_NAME = 255  # bytes, on every file system in use
LONGEST_PATH = 4095
_STORE = re.compile(r"(?!https?:|file:)[a-z][a-z0-9+.-]*://[^/]")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def expand_path(text: str) -> str:
    """Replace `~`, `$NAME` and `${NAME}` in a path. Raises ValueError for unset variables and invalid names."""

    def get_variable(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if not os.environ.get(name):
            raise ValueError(f"the variable {name} is not set; export it, or write the full path")
        return os.environ[name]

    if 0 < len(text.strip()) < len(text) and not os.path.lexists(text):
        raise ValueError("begins or ends with a space; remove it")
    path = _VARIABLE.sub(get_variable, text)
    if "${" in path:
        raise ValueError("invalid or unclosed ${; write variables as ${NAME}")
    if path.startswith("~"):
        path = os.path.expanduser(path)
        if path.startswith("~"):
            raise ValueError(f"home folder of {path.partition('/')[0]} not found; write the full path")
    if one_slash := re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", path):
        raise ValueError(f"has only one slash after {one_slash[1]}:; write s3://bucket/name, or a path")
    if "\0" in path:
        raise ValueError("has a NUL character; remove it")
    longest = max(len(name.encode(errors="surrogateescape")) for name in path.split("/"))
    if longest > LONGEST_NAME:
        raise ValueError(f"has a name of {longest} bytes, but file systems allow {LONGEST_NAME}; use a shorter one")
    if (length := len(path.encode(errors="surrogateescape"))) > LONGEST_PATH:
        raise ValueError(f"has {length} bytes, but file systems allow {LONGEST_PATH}; use a shorter path")
    return path


def find_similar_path(path: Path) -> Path | None:
    """Return the path in the same folder with the most similar name; None if there is none."""
    names = os.listdir(path.parent) if os.access(path.parent, os.R_OK) and path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None


def is_remote(text: str) -> bool:
    """Return whether a path is an object-store URL."""
    return _STORE.match(text) is not None


def get_local_path(url: str) -> Path:
    scheme, _, rest = url.partition("://")
    return _get_cache_folder().joinpath(scheme, *(part for part in rest.split("/") if part not in ("", ".", "..")))


def get_remote_url(path: Path) -> str | None:
    path = path.absolute()
    if not path.is_relative_to(_get_cache_folder()):
        return None
    scheme, *rest = path.relative_to(_get_cache_folder()).parts
    return f"{scheme}://{'/'.join(rest)}"


def _get_cache_folder() -> Path:
    return Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser().absolute() / "stores"


def _expand_output(text: str) -> str:
    if control := re.search(r"[\x01-\x1f\x7f]", text):
        raise ValueError(f"has a control character ({control[0]!r}), which terminals would interpret; remove it")
    if _STORE.match(path := expand_path(text)):
        return str(get_local_path(path))
    if "://" in path:
        raise ValueError("is not the URL of an object store; use a folder, or a URL such as s3://bucket/run")
    return path


def _expand_local(text: str) -> str:
    if "://" in text:
        raise ValueError("is a URL; use a folder on this machine")
    if not text.strip():
        raise ValueError("is empty; use a folder")
    return expand_path(text)


def _expand_unless_template(text: str) -> str:
    return text if "{{" in text or "{%" in text or "\n" in text else expand_path(text)


def _parse_checkpoint(value: Any) -> Any:
    text = str(value).strip().lower()
    if text in ("true", "false"):
        return "latest" if text == "true" else None
    return _expand_output(value) if isinstance(value, str) else value


PathText = Annotated[str, AfterValidator(expand_path)]
LocalText = Annotated[str, AfterValidator(_expand_local)]
OutputText = Annotated[str, AfterValidator(_expand_output)]
TemplateText = Annotated[str, AfterValidator(_expand_unless_template)]
CheckpointText = Annotated[str | None, BeforeValidator(_parse_checkpoint)]
