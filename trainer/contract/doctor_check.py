"""A result of `zerolora doctor`; its processes print them as JSON in a line that begins with MARK."""

from dataclasses import dataclass
from typing import Literal

MARK = "zerolora-doctor: "
State = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One row of the doctor's table."""

    name: str
    state: State
    found: str
    fix: str = ""
    host: str = ""
