"""Check names of lm-eval's tasks in the text of its files, since its own index takes a quarter of a minute."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from trainer.config import UserError

_DECLARED = re.compile(rb"^(?:task|group|tag): *['\"]?([\w.+-]+)", re.MULTILINE)


def check_task_names(names: Sequence[str], setting: str = "evaluation.tasks") -> None:
    """Raise UserError, which names `setting`, for a missing file, or a name that is nowhere in lm-eval's files."""
    spec = find_spec("lm_eval") if names else None
    if names and spec is None:
        raise UserError(f"{setting}={names[0]}: lm-eval is not installed; pip install lm_eval==0.4.13")
    for name in names:
        if name.endswith(".yaml") and not Path(name).is_file():
            raise UserError(f"{setting}={name}: no such file; use a YAML file or the name of a task")
    unknown = [name for name in names if not name.endswith(".yaml") and not set(name) & set("*?[")]
    if spec is None or not unknown:
        return
    folder = Path(*spec.submodule_search_locations or (), "tasks")
    text = b"\n".join(each.read_bytes() for each in folder.rglob("*") if each.suffix != ".py" and each.is_file())
    for name in unknown:
        if name.encode() not in text:
            near = get_close_matches(name, {found.decode() for found in _DECLARED.findall(text)}, n=1)
            fix = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists them"
            raise UserError(f"{setting}={name}: not a task of lm-eval; {fix}")
