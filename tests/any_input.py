"""Property tests: how many examples hypothesis tries, and what every mistake must look like.

`ZEROLORA_EXAMPLES=100` tries a hundred times as many, drawn again each time; CI tries the same few every time.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from trainer.config import UserError
from trainer.config.errors import LONGEST_LINE, UserErrors

Result = TypeVar("Result")
TIMES = int(os.environ.get("ZEROLORA_EXAMPLES", "1"))
HARM = st.sampled_from(["flip", "cut", "empty", "gone", "swap", "noise"])
"""What happens to files; `damage` does it."""


def tries(examples: int) -> settings:
    """The settings of a property test that tries so many examples in CI."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        print_blob=False,
        # A failing example is made simpler only on request: that takes minutes where examples take seconds.
        phases=tuple(Phase) if TIMES > 1 else (Phase.explicit, Phase.generate),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def or_refused(run: Callable[[], Result]) -> Result | None:
    """Return what `run` returns; None for a mistake reported properly. Everything else fails the test."""
    try:
        return run()
    except UserErrors as error:
        lines = error.messages
    except UserError as error:
        lines = [str(error)]
    assert lines
    for line in lines:
        assert_a_line(line)
    return None


def assert_a_line(line: str) -> None:
    """Fail for a message that is no single readable line."""
    assert line.strip() and "\n" not in line and len(line) <= LONGEST_LINE + len("error: "), line
    assert "Traceback" not in line and "object at 0x" not in line, line


def value_at(tree: Any, dotted: str) -> Any:
    """The value of a setting in a configuration."""
    for part in dotted.split("."):
        tree = getattr(tree, part)
    return tree


def damage(file: Path, at: int, what: str) -> None:
    """One of the things that happen to files."""
    if not file.exists():
        return
    content = file.read_bytes()
    place = at % max(1, len(content))
    if what == "gone":
        file.unlink()
    elif what == "swap":
        other = next(path for path in sorted(file.parent.iterdir()) if path.is_file() and path != file)
        file.write_bytes(other.read_bytes())
    else:
        flipped = content[:place] + bytes([content[place] ^ (1 << at % 8)]) + content[place + 1 :] if content else b""
        noise = random.Random(at).randbytes(len(content) if at % 2 else at % 200)
        file.write_bytes({"flip": flipped, "cut": content[:place], "empty": b"", "noise": noise}[what])
