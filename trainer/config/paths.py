"""Settings that are paths: `~` and environment variables are expanded, and impossible names are refused."""

import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

LONGEST_NAME = 255  # bytes, on every file system in use
LONGEST_PATH = 4095
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def expand_path(text: str) -> str:
    """Replace `~`, `$NAME` and `${NAME}` in a path; raises ValueError for unset variables and impossible names."""

    def get_variable(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if not os.environ.get(name):
            raise ValueError(f"the variable {name} is not set; export it, or write the full path")
        return os.environ[name]

    path = _VARIABLE.sub(get_variable, text)
    if "${" in path:
        raise ValueError("incomplete ${NAME}; write ${NAME}")
    if path.startswith("~"):
        path = os.path.expanduser(path)
        if path.startswith("~"):
            raise ValueError(f"the home folder {path.partition('/')[0]} is unknown here; write the full path")
    if "\0" in path:
        raise ValueError("has a NUL character; remove it")
    longest = max(len(name.encode(errors="surrogateescape")) for name in path.split("/"))
    if longest > LONGEST_NAME:
        raise ValueError(f"a name of {longest} bytes; file systems allow {LONGEST_NAME}, use a shorter one")
    if (length := len(path.encode(errors="surrogateescape"))) > LONGEST_PATH:
        raise ValueError(f"a path of {length} bytes; file systems allow {LONGEST_PATH}, use a shorter one")
    return path


def _expand_unless_template(text: str) -> str:
    return text if "{{" in text or "{%" in text or "\n" in text else expand_path(text)


def _parse_checkpoint(value: Any) -> Any:
    word = str(value).strip().lower()
    if word in ("true", "false"):
        return "latest" if word == "true" else None
    return expand_path(value) if isinstance(value, str) else value


PathText = Annotated[str, AfterValidator(expand_path)]
TemplateText = Annotated[str, AfterValidator(_expand_unless_template)]
CheckpointText = Annotated[str | None, BeforeValidator(_parse_checkpoint)]
