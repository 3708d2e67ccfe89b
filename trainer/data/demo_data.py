"""Demo data: conversations about the functions in Python's standard library.

Each one is about one function: the user gives the signature, and the assistant answers with a JSON record (module,
name, arguments, first line of the docstring). Pretrained models answer in prose, so the held-out loss drops sharply.
"""

import ast
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from trainer.contract.whole_files import apply_umask

# Increment when the records change, so that an older cache is not reused.
DATA_VERSION = 1
# One function name in 32 is held out: 224 of 6,653 records with Python 3.11.7.
HELD_OUT_DIVISOR = 32
# Longer records are omitted: batches are padded to their longest record, and padding costs time.
MAX_CHARACTERS = 400
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Example = dict[str, list[dict[str, str]]]


def build_demo_data(cache: Path) -> tuple[Path, Path]:
    """Return the paths of train.jsonl and eval.jsonl, built from the running Python's standard library."""
    version = ".".join(map(str, sys.version_info[:3]))
    folder = cache / f"stdlib-{version}-v{DATA_VERSION}"
    if not folder.is_dir():
        build_once(folder, _write_splits)
    return folder / "train.jsonl", folder / "eval.jsonl"


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Build `folder` if it is missing, while other processes wait. `build` receives a temporary folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.is_dir():
            return
        unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
        unfinished.mkdir()
        try:
            build(unfinished)
            apply_umask(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _write_splits(folder: Path) -> None:
    splits: dict[str, list[Example]] = {"train": [], "eval": []}
    for name, example in list_stdlib_examples(Path(sysconfig.get_path("stdlib"))):
        splits["eval" if _hash(name) % HELD_OUT_DIVISOR == 0 else "train"].append(example)
    for split, examples in splits.items():
        # In source order, a short evaluation would cover only one module. Order by hash is the same on all machines.
        examples.sort(key=lambda example: _hash(example["messages"][0]["content"]))
        lines = (json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def list_stdlib_examples(root: Path) -> Iterator[tuple[str, Example]]:
    """Yield the name and conversation of each documented function and method below `root`.

    Duplicate prompts and long conversations are skipped. The sources are parsed, never imported. The name does
    not include the class, and determines the split: methods with the same name, such as `close`, often have
    identical docstrings in several classes, so they must not be divided between training and held-out data.
    """
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        for owner, function in _find_documented_functions(path):
            example = _build_example(module, owner, function)
            prompt = example["messages"][0]["content"]
            if prompt not in seen and sum(len(turn["content"]) for turn in example["messages"]) <= MAX_CHARACTERS:
                seen.add(prompt)
                yield function.name, example


def _find_documented_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the library
            tree = ast.parse(file.read())
    except (SyntaxError, UnicodeDecodeError):
        return  # deliberately broken files, and templates
    pending: list[tuple[str, Any]] = [("", tree)]
    while pending:
        owner, node = pending.pop()
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                pending.append((f"{owner}{child.name}.", child))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(child):
                yield owner, child


def _build_example(module: str, owner: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Example:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    summary = (ast.get_docstring(function) or "").splitlines()[0].strip()
    record = {"module": module, "name": owner + function.name, "arguments": names, "summary": summary}
    prompt = f"{module}.{owner}{function.name}({ast.unparse(arguments)})"
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": json.dumps(record, ensure_ascii=False)},
        ]
    }
