"""A working directory with files named like zerolora's packages and libraries, which report if one is run."""

from pathlib import Path

OURS = ("trainer", "ops", "launcher")
OF_LIBRARIES = ("datasets", "evaluate", "random", "torch", "yaml")
MARK = "imported.txt"


def write_foreign_files(folder: Path, names: tuple[str, ...] = OURS + OF_LIBRARIES) -> Path:
    """Write NAME.py and NAME/__init__.py for every name; returns the file that exists once one of them is imported."""
    mark = folder / MARK
    code = f"open({str(mark)!r}, 'a').write(__file__ + '\\n')\nraise RuntimeError('a file of the user was imported')\n"
    for name in names:
        (folder / name).mkdir(parents=True)
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            path.write_text(code)
    return mark
