"""Settings that are paths: `~` and environment variables are written out, and names that no disk takes are refused."""

import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

LONGEST_NAME = 255  # bytes, on every file system in use
LONGEST_PATH = 4095
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def expanded(text: str) -> str:
    """The path with `~`, `$NAME` and `${NAME}` replaced. Raises ValueError for what is not set and for long names."""

    def value_of(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if not os.environ.get(name):
            raise ValueError(f"the variable {name} is not set; export it, or write the path out")
        return os.environ[name]

    path = _VARIABLE.sub(value_of, text)
    if "${" in path:
        raise ValueError("${ without a name and a }; write ${NAME}")
    if path.startswith("~"):
        path = os.path.expanduser(path)
        if path.startswith("~"):
            raise ValueError(f"the home folder {path.partition('/')[0]} is not known here; write the path out")
    if "\0" in path:
        raise ValueError("a path with a NUL character; write it again")
    longest = max(len(name.encode(errors="surrogateescape")) for name in path.split("/"))
    if longest > LONGEST_NAME:
        raise ValueError(f"a name of {longest} bytes, and file systems take {LONGEST_NAME}; use a shorter one")
    if (length := len(path.encode(errors="surrogateescape"))) > LONGEST_PATH:
        raise ValueError(f"a path of {length} bytes, and file systems take {LONGEST_PATH}; use a shorter one")
    return path


def _expanded_unless_template(text: str) -> str:
    return text if "{{" in text or "{%" in text or "\n" in text else expanded(text)


def _checkpoint(value: Any) -> Any:
    """`true` and `false` are what users of the Hugging Face Trainer write."""
    word = str(value).strip().lower()
    if word in ("true", "false"):
        return "latest" if word == "true" else None
    return expanded(value) if isinstance(value, str) else value


PathText = Annotated[str, AfterValidator(expanded)]
TemplateText = Annotated[str, AfterValidator(_expanded_unless_template)]
CheckpointText = Annotated[str | None, BeforeValidator(_checkpoint)]
